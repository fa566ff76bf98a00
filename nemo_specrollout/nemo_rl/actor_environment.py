# SPDX-License-Identifier: Apache-2.0
"""Where our own Ray actors run: in the environment of the engines."""

import os
from typing import Any

from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env
from nemo_rl.utils.venvs import create_local_venv_on_each_node

# With vLLM comes what `speculators` needs.
ENVIRONMENT_OF = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
# With it an actor would see more GPUs than Ray gave it; NeMo-RL's `init_ray` leaves it out likewise.
_SEES_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def engine_environment() -> dict[str, Any]:
    """A Ray runtime environment, as NeMo-RL starts its own actors that are of no worker group."""
    python = get_actor_python_env(ENVIRONMENT_OF)
    if python.startswith("uv"):
        python = create_local_venv_on_each_node(python, ENVIRONMENT_OF)
    venv = os.path.dirname(os.path.dirname(python))
    inherited = {name: value for name, value in os.environ.items() if name != _SEES_ALL_GPUS}
    return {
        "py_executable": python,
        "env_vars": {**inherited, "VIRTUAL_ENV": venv, "UV_PROJECT_ENVIRONMENT": venv},
    }
