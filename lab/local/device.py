# SPDX-License-Identifier: Apache-2.0
"""The device of a local run, which is a CPU or one GPU that trainer and engines share."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lab.local.policy_shape import PolicyShape
from lab.local.run_sections import DEFAULT_MAX_NUM_SEQS, GenerationConfig
from nemo_specrollout.config.strict import ConfigError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
GIB = 1 << 30
ENGINE_SHARE = 0.5
"""Share of the GPU's free memory that all engines together may take. The trainer gets the rest."""
WORK_BYTES = 3 * GIB
"""Bytes of memory that an engine needs besides weights and KV cache, for CUDA's context, activations and CUDA graphs."""
TRAINER_BYTES = 24
"""Most bytes that the trainer needs for each parameter of the policy. They are for the weight, its gradient, two moments of
the optimizer, and a float32 copy. The copy is needed by training in bfloat16, or is on its way to an engine."""
_ROOM = 1.1
"""Factor by which a KV cache must be larger than the tokens in it, because its blocks are seldom full."""
_BYTES = {"float32": 4, "bfloat16": 2}


def run_device(gpus_per_node: int) -> torch.device:
    """Returns the device of a run. Raises ConfigError if `cluster.gpus_per_node` does not fit this machine.

    Call it before anything uses the GPU. It sets the size of cuBLAS's workspace, on which deterministic matrix products
    depend, and cuBLAS reads this size only when it starts.
    """
    path = "cluster.gpus_per_node"
    if torch.cuda.is_available() != bool(gpus_per_node):
        if gpus_per_node:
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for a CPU"
            raise ConfigError(f"{path}: 1, but torch finds no CUDA GPU ({built}); set it to 0")
        raise ConfigError(f"{path}: 0, but vLLM would use the GPU here; set it to 1, or CUDA_VISIBLE_DEVICES to ''")
    if not gpus_per_node:
        return CPU
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return GPU


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Returns a context in which torch uses deterministic kernels on a GPU, so that equal samples lead to equal weights.

    Without it, results may depend on timing. At the end of the context torch's earlier settings return, because an engine in
    the same process needs kernels that are not deterministic. On a CPU the context does nothing, because all kernels there are
    deterministic.
    """
    if device.type == "cpu":
        yield
        return
    settings = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        settings.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def engine_memory(
    generation: GenerationConfig, shape: PolicyShape, free_bytes: int, total_bytes: int, num_engines: int
) -> dict[str, Any]:
    """Returns vLLM's `kv_cache_memory_bytes` and `gpu_memory_utilization` for engines that share a GPU with the trainer.

    The KV cache of an engine has room for all of its requests at their full length, unless all engines together would then
    take more than half of the free memory. In that case it is smaller. vLLM's own default, which is 0.9 of the whole GPU,
    would leave nothing for the trainer. Engines do not sleep while the policy is trained, because with `run_ahead` they work
    then.

    Raises ConfigError if the memory is not enough for one request of each engine and for the trainer.
    """
    cfg = generation.vllm_cfg
    num_parameters = sum(math.prod(size) for size in shape.hf_shapes().values())
    token_bytes = 2 * (shape.num_layers + 1) * shape.num_query_groups * shape.head_dim * _BYTES[cfg.precision]
    request_bytes = int(_ROOM * token_bytes * (cfg.max_model_len + generation.specrollout.num_speculative_tokens + 1))
    fixed_bytes = num_parameters * _BYTES[cfg.precision] + WORK_BYTES
    wanted = request_bytes * int(generation.vllm_kwargs.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS))
    cache_bytes = min(wanted, int(ENGINE_SHARE * free_bytes) // num_engines - fixed_bytes)
    trainer_bytes = TRAINER_BYTES * num_parameters
    if cache_bytes < request_bytes or free_bytes - num_engines * (fixed_bytes + cache_bytes) < trainer_bytes:
        raise ConfigError(
            f"cluster.gpus_per_node: 1, but of the GPU's memory {free_bytes / GIB:.1f} GiB are free; {num_engines} engine(s) "
            f"and a trainer of {num_parameters / 1e6:.0f} million parameters need more: name a smaller policy, or a GPU "
            "that nothing else uses"
        )
    return {
        "kv_cache_memory_bytes": cache_bytes,
        "gpu_memory_utilization": round((fixed_bytes + cache_bytes) / total_bytes, 4),
    }


def sized_engines(kwargs: Mapping[str, Any], memory: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `kwargs`, which are the user's arguments for vLLM, and adds the sizes of `memory` that the user has not set.

    If the user has set `gpu_memory_utilization`, nothing is added, because vLLM ignores that setting beside a size of the KV
    cache.
    """
    if "gpu_memory_utilization" in kwargs:
        return dict(kwargs)
    return {**memory, **kwargs}
