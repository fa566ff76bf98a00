# SPDX-License-Identifier: Apache-2.0
"""Ray helpers: the environment of our own actors, calls of engines, and the text of a failure."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray

from nemo_specrollout.generation.worker_client import WorkerClient

ENGINE_ACTOR = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
"""NeMo-RL's actor whose Python environment our actors share. It has vLLM, and with it what `speculators` needs."""
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


def worker_client(worker_group: Any) -> WorkerClient:
    """Returns a client of our vLLM workers in the engines of NeMo-RL's `worker_group`."""
    return WorkerClient(partial(_call_engines, worker_group), worker_group.dp_size)


def failure_text(error: Exception) -> str:
    """Returns the last line of an error's text, without the guesses that Ray appends about an actor's exit."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].partition(" Worker exit type")[0]


def _call_engines(worker_group: Any, method: str, arguments: Sequence[Sequence[Any] | None]) -> list[Any]:
    """Calls `method` of our vLLM worker in each engine of NeMo-RL's `worker_group`, and returns the replies.

    `arguments` has one entry for each engine; an engine whose entry is None is not called and has no reply.
    """
    call, leader = worker_group.run_single_worker_single_data, worker_group.get_dp_leader_worker_idx
    called = [(leader(engine), list(args)) for engine, args in enumerate(arguments) if args is not None]
    return ray.get([call("specrollout_call", worker, method=method, arguments=args) for worker, args in called])
