# SPDX-License-Identifier: Apache-2.0
"""Ray helpers: our own actors beside NeMo-RL's, calls of engines, and the text of a failure."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray

from nemo_specrollout.generation.worker_client import WorkerClient
from nemo_specrollout.racing.turns import ExchangeFailed

ENGINE_ACTOR = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
"""NeMo-RL's actor whose Python environment our actors share. It has vLLM, and with it what `speculators` needs."""
PATIENCE_S = 300.0
"""Seconds after which a call of the exchange without an answer counts as failed."""
_NO_GPU_MASK = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Variable with which an actor sees all GPUs, not only its own. NeMo-RL's `init_ray` does not pass it on either."""


def engine_environment() -> dict[str, Any]:
    """Returns the Ray runtime environment of an engine, in which NeMo-RL also starts actors without a worker group."""
    from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env
    from nemo_rl.utils.venvs import create_local_venv_on_each_node

    python = get_actor_python_env(ENGINE_ACTOR)
    if python.startswith("uv"):
        python = create_local_venv_on_each_node(python, ENGINE_ACTOR)
    venv = os.path.dirname(os.path.dirname(python))
    inherited = {name: value for name, value in os.environ.items() if name != _NO_GPU_MASK}
    return {
        "py_executable": python,
        "env_vars": {**inherited, "VIRTUAL_ENV": venv, "UV_PROJECT_ENVIRONMENT": venv},
    }


class ActorFailed(Exception):
    """An actor is gone, or its last call raised an error. The message is the reason."""


class ActorLink:
    """The driver's connection to an actor. Owns the actor, which dies with the driver, and the pending call."""

    def __init__(self, actor: Any, *arguments: Any, first_call: str, **options: Any) -> None:
        """Starts an actor of the Ray class `actor` where engines run, with Ray's `options`, and calls its `first_call`."""
        self._actor = actor.options(**options, runtime_env=engine_environment()).remote(*arguments)
        self.call(first_call)

    @property
    def is_idle(self) -> bool:
        """Whether no call is pending."""
        return self._call is None

    def call(self, method: str, *arguments: Any) -> None:
        """Calls a method of the actor. The link must be idle."""
        self._call = getattr(self._actor, method).remote(*arguments)

    def answer(self) -> Any:
        """Returns the answer to the pending call, or None if it has not arrived. Raises ActorFailed."""
        if self._call is None or not ray.wait([self._call], timeout=0)[0]:
            return None
        call, self._call = self._call, None
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            raise ActorFailed(failure_text(error)) from error

    def close(self) -> None:
        """Ends the actor for good, whatever it is doing."""
        ray.kill(self._actor)


def failure_text(error: Exception) -> str:
    """Returns the last line of an error's text, without the guesses that Ray appends about an actor's exit."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].partition(" Worker exit type")[0]


def worker_client(worker_group: Any) -> WorkerClient:
    """Returns a client of our vLLM workers in the engines of NeMo-RL's `worker_group`."""
    return WorkerClient(partial(_call_engines, worker_group), worker_group.dp_size)


def _call_engines(worker_group: Any, method: str, arguments: Sequence[Sequence[Any] | None]) -> list[Any]:
    call, leader = worker_group.run_single_worker_single_data, worker_group.get_dp_leader_worker_idx
    called = [(leader(engine), list(args)) for engine, args in enumerate(arguments) if args is not None]
    return ray.get([call("specrollout_call", worker, method=method, arguments=args) for worker, args in called])


def answer_of(call: Any) -> Any:
    """Waits for the exchange's answer to `call`. Raises ExchangeFailed if the actor is gone, failed or does not answer."""
    with ray_errors_as_exchange_failed():
        return ray.get(call, timeout=PATIENCE_S)


@contextmanager
def ray_errors_as_exchange_failed() -> Iterator[None]:
    """Raises errors of Ray as ExchangeFailed."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise ExchangeFailed(str(error.cause)) from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ExchangeFailed(f"{type(error).__name__}: {first_line}") from error
