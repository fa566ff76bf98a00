# SPDX-License-Identifier: Apache-2.0
"""Ray helpers, which start this package's actors beside NeMo-RL's, call engine actors, and describe failures."""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVarTuple

import ray

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.remote_calls import EngineActorCalls, WorkerCalls
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.run_ahead.driver import ask_all
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.turns import ExchangeFailed

ENGINE_ACTOR = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
"""Class name of NeMo-RL's engine actor. This package's actors share its Python environment, because that has vLLM."""
_PACKAGE = "nemo_specrollout"
PATIENCE_S = 300.0
"""Seconds after which an unanswered call of the exchange counts as failed."""
Arguments = TypeVarTuple("Arguments")
Parameters = ParamSpec("Parameters")
_NO_GPU_MASK = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Environment variable that makes an actor see all GPUs instead of only its own. Like NeMo-RL's `init_ray`, this package does
not pass it on."""


def python_of(actor: str) -> str:
    """Returns the path of the Python that runs an actor of NeMo-RL. `actor` is the dotted name of the actor's class.

    If the actor has no environment yet, NeMo-RL makes one first. Raises ConfigError if that Python does not find this package.
    """
    from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env
    from nemo_rl.utils.venvs import create_local_venv_on_each_node

    python: str = get_actor_python_env(actor)
    if python.startswith("uv"):
        python = create_local_venv_on_each_node(python, actor)
    if not os.path.isfile(python):  # NeMo-RL makes no environment on a node that runs no actors
        return python
    search = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({_PACKAGE!r}) is None)"
    if subprocess.run([python, "-c", search], check=False).returncode:
        raise ConfigError(
            f"{python}, which runs {actor.rpartition('.')[2]}, does not find {_PACKAGE}: start with `nemo-specrollout run`, "
            "or put a folder that holds this package alone on PYTHONPATH"
        )
    return python


def pythons_of_actors() -> dict[str, str]:
    """Returns for each actor of NeMo-RL the path of its Python, by the dotted name of its class. A path may not exist yet."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.utils.venvs import DEFAULT_VENV_DIR

    environments = os.environ.get("NEMO_RL_VENV_DIR", DEFAULT_VENV_DIR)
    return {
        name: os.path.join(environments, name, "bin", "python") if python.startswith("uv") else python
        for name, python in ACTOR_ENVIRONMENT_REGISTRY.items()
    }


def engine_environment() -> dict[str, Any]:
    """Returns Ray's runtime environment for an actor that runs in an engine's Python.

    It is the one that NeMo-RL would give to an actor outside of a worker group.
    """
    python = python_of(ENGINE_ACTOR)
    venv = os.path.dirname(os.path.dirname(python))
    inherited = {name: value for name, value in os.environ.items() if name != _NO_GPU_MASK}
    return {"py_executable": python, "env_vars": {**inherited, "VIRTUAL_ENV": venv, "UV_PROJECT_ENVIRONMENT": venv}}


def is_loss_of_a_process(error: BaseException | None) -> bool:
    """Returns whether an error came from a lost or unreachable process or node, and not from the program itself.

    An `RpcError` counts as such an error. It comes from Ray, or from gRPC itself if NeMo-RL was asking Ray for the memory of
    all nodes. A TimeoutError counts too, because the trainer raises it if an engine dies while it receives the weights.
    """
    lost = (
        ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, TimeoutError
    )  # fmt: skip
    seen = set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, lost) or any(kind.__name__ == "RpcError" for kind in type(error).__mro__):
            return True
        seen.add(id(error))
        # Ray keeps the original error of a remote function in an attribute of its own.
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__
    return False


class ActorFailed(Exception):
    """Raised if an actor is gone, or if its last call raised an error. The message is the reason."""

    def __init__(self, reason: str, *, is_alive: bool = False) -> None:
        super().__init__(reason)
        self.is_alive = is_alive
        """Whether the actor's process is still running."""


class ActorLink:
    """The driver's connection to an actor. Owns the actor, which dies with the driver, and the pending call."""

    def __init__(self, actor: Any, *arguments: Any, first_call: str, **options: Any) -> None:
        """Starts an actor of the Ray class `actor` with Ray's `options` in an engine's environment, and calls `first_call`."""
        self._actor = actor.options(**options, runtime_env=engine_environment()).remote(*arguments)
        self.call(first_call)

    @property
    def is_idle(self) -> bool:
        return self._call is None

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._called_s

    def call(self, method: str, *arguments: Any) -> None:
        """Calls a method of the actor without waiting for the answer. No other call may be pending."""
        self._call = getattr(self._actor, method).remote(*arguments)
        self._called_s = time.monotonic()

    def restart(self) -> None:
        """Ends the actor's process, which Ray restarts if the actor's options allow it. No call is pending afterwards."""
        ray.kill(self._actor, no_restart=False)
        self._call = None

    def answer(self) -> Any:
        """Returns the answer to the pending call, or None if it has not arrived.

        Raises ActorFailed if the actor is gone or the call has raised an error.
        """
        if self._call is None or not ray.wait([self._call], timeout=0)[0]:
            return None
        call = self._call
        self._call = None
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            is_restarting = isinstance(error, ray.exceptions.ActorUnavailableError)
            reason = "its process died" if is_restarting else failure_text(error)
            raise ActorFailed(reason, is_alive=isinstance(error, ray.exceptions.RayTaskError)) from error

    def close(self) -> None:
        ray.kill(self._actor)


class EngineClient:
    """Calls the engine actors of a run, and through them the vLLM workers of their engines.

    A call of a vLLM worker goes to all ranks of the engine. The engine actor returns one reply for all of them.
    """

    def __init__(self, worker_group: Any) -> None:
        """`worker_group` is NeMo-RL's `RayWorkerGroup` of the engine actors."""
        self._group = worker_group
        self.num_engines: int = worker_group.dp_size

    def call(self, method: Callable[[WorkerCalls, *Arguments], object], *arguments: *Arguments) -> list[Any]:
        """Calls a method of the vLLM workers of all engines with the same arguments. Returns the reply of each engine."""
        return self.call_each(method, [arguments] * self.num_engines)

    def call_each(
        self, method: Callable[[WorkerCalls, *Arguments], object], arguments: Sequence[tuple[*Arguments] | None]
    ) -> list[Any]:
        """Calls a method of the vLLM workers with different arguments for each engine. Returns the replies.

        An engine is left out if its arguments are None, or if `arguments` has no entry for it.
        """
        calls = [
            self.start(engine, EngineActorCalls.specrollout_call, method=method.__name__, arguments=list(own))
            for engine, own in enumerate(arguments)
            if own is not None
        ]
        return ray.get(calls)

    def start(
        self,
        engine: int,
        method: Callable[Concatenate[EngineActorCalls, Parameters], object],
        /,
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Any:
        """Calls a method of an engine actor without waiting. Returns Ray's reference to the reply.

        NeMo-RL refuses positional arguments, so `arguments` must be empty. The parameter exists only because the type checker
        needs it in order to compare all arguments with the method.
        """
        assert not arguments, f"name the arguments of {method.__name__}"
        actor = self._group.get_dp_leader_worker_idx(engine)
        return self._group.run_single_worker_single_data(method.__name__, actor, **named)

    @contextmanager
    def weights_change(self) -> Iterator[None]:
        """Context of an update of the engines' weights, during which no request starts.

        All engines are told when the update ends, because their requests wait for it. They are told even if another engine or
        the update itself has failed.
        """
        try:
            ask_all(self, EngineActorCalls.specrollout_weights_change_begins)
            yield
        finally:
            ask_all(self, EngineActorCalls.specrollout_weights_change_ends)

    def drafter_stats(self) -> list[DrafterStats]:
        """Returns the drafter statistics of the engines that have remote drafters."""
        return [
            DrafterStats(**reply) for reply in self.call(WorkerCalls.specrollout_drafter_stats) if reply is not None
        ]


def failure_text(error: Exception) -> str:
    """Returns the last line of an error's text, without Ray's sentences about possible causes of an actor's exit."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].partition(" Worker exit type")[0]


def answer_of(call: Any) -> Any:
    """Waits for the exchange's answer to `call`, and returns it.

    Raises ExchangeFailed if the actor is gone, has failed, or does not answer within `PATIENCE_S`.
    """
    with ray_errors_as_exchange_failed():
        return ray.get(call, timeout=PATIENCE_S)


@contextmanager
def ray_errors_as_exchange_failed() -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise ExchangeFailed(str(error.cause)) from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ExchangeFailed(f"{type(error).__name__}: {first_line}") from error


ExchangeMethod = Callable[Concatenate[StragglerExchange, int, ...], object]
"""A method of the exchange whose first parameter is the number of an engine."""


@dataclass(frozen=True)
class ExchangeAnswer:
    """The pending answer to a call of the exchange (`turn_engine.Answer`)."""

    call: Any
    """Ray's reference to the answer."""

    def is_there(self) -> bool:
        return bool(ray.wait([self.call], timeout=0)[0])

    def __call__(self) -> Any:
        return answer_of(self.call)


def ask_exchange(actor: Any, engine: int, method: ExchangeMethod, *arguments: Any) -> ExchangeAnswer:
    """Calls a method of the exchange in the name of an engine, without waiting. Returns the pending answer."""
    return ExchangeAnswer(getattr(actor, method.__name__).remote(engine, *arguments))


async def ask_exchange_async(actor: Any, engine: int, method: ExchangeMethod, *arguments: Any) -> Any:
    """Calls a method of the exchange in the name of an engine, and returns the answer.

    Raises ExchangeFailed if the exchange is gone, has failed, or does not answer within `PATIENCE_S`.
    """
    with ray_errors_as_exchange_failed():
        return await asyncio.wait_for(getattr(actor, method.__name__).remote(engine, *arguments), PATIENCE_S)
