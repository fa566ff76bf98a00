# SPDX-License-Identifier: Apache-2.0
"""Setup that lets Megatron-Core run in this process on a CPU.

Megatron-Core asks `torch.cuda.current_device()` where to put its rotary table and the results of its collectives. On a
machine without CUDA, `install` makes the CPU device the answer. Nothing else needs replacing, as long as dropout is off and
the attention core is ours (`megatron_model.CausalAttention`).

vLLM in the same process may share the process group: the first of both creates it. A vLLM engine that shuts down destroys
it. So `install` is cheap, and callers repeat it before they use a model.
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state

_world: dist.ProcessGroup | None = None
"""Default process group of Megatron's groups. If torch has another one now, they are stale."""


def install(tensor_model_parallel_size: int = 1) -> None:
    """Sets up device, process group (gloo) and tensor-parallel groups. Idempotent.

    One rank needs no environment. More ranks read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        RuntimeError: CUDA is available. Part of the local policy would end up on the GPU.
        ValueError: The number of ranks, or an earlier call, disagrees with `tensor_model_parallel_size`.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the local policy runs on the CPU: hide the GPUs with CUDA_VISIBLE_DEVICES=''")
    torch.cuda.current_device = _cpu_device  # type: ignore[assignment]
    if not dist.is_initialized():
        _init_process_group(tensor_model_parallel_size)
    _check_world_size(tensor_model_parallel_size)
    _ensure_model_parallel(tensor_model_parallel_size)


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _init_process_group(world_size: int) -> None:
    if world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        raise ValueError(
            f"tensor_model_parallel_size={world_size} needs {world_size} processes: start them with torchrun, "
            "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each"
        )


def _check_world_size(tensor_model_parallel_size: int) -> None:
    if (ranks := dist.get_world_size()) != tensor_model_parallel_size:
        raise ValueError(
            f"tensor_model_parallel_size={tensor_model_parallel_size} but there are {ranks} ranks: "
            "the local policy has no data parallelism, so make the two equal"
        )


def _ensure_model_parallel(tensor_model_parallel_size: int) -> None:
    global _world  # noqa: PLW0603
    if parallel_state.model_parallel_is_initialized() and _world is not dist.group.WORLD:
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size)
        _world = dist.group.WORLD
