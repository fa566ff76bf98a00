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
"""Share of the free memory that all engines together may take. The trainer has the rest."""
WORK_BYTES = 3 * GIB
"""Bytes of an engine's memory in addition to weights and KV cache, for CUDA's context, activations and CUDA graphs."""
TRAINER_BYTES = 24
"""Most bytes per parameter in the trainer, for weight, gradient, two moments, and the float32 copies that bfloat16 needs or
that are on their way to an engine."""
_ROOM = 1.1
"""Factor on the size of the KV cache, because its blocks are seldom full."""
_BYTES = {"float32": 4, "bfloat16": 2}


def run_device(gpus_per_node: int) -> torch.device:
    """Returns the device of a run. Raises ConfigError if `cluster.gpus_per_node` does not fit this machine.

    Call it before anything uses the GPU, because cuBLAS reads the size of its workspace, on which deterministic products
    depend, when it starts.
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
    """Makes torch choose kernels on a GPU whose results do not depend on timing, so that equal rows train equal weights.

    The choice ends with the context, because an engine in the same process needs kernels that torch would refuse in it.
    Kernels on a CPU are deterministic anyway.
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
    """Returns `kv_cache_memory_bytes` and `gpu_memory_utilization` of each engine on a GPU that the trainer shares.

    An engine gets the KV cache that its requests need at their full length, or what half of the free memory leaves. vLLM's own
    default, 0.9 of the whole GPU, would leave nothing for the trainer. Engines are not put to sleep instead, because with
    `run_ahead` they work while the policy is trained.

    Raises ConfigError if there is not enough memory for one request, or for the trainer.
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
    """Returns vLLM's arguments with the sizes of `memory`, unless the user gives some.

    If the user gives a share of the GPU, no size is set for the KV cache, because vLLM would then ignore the share.
    """
    if "gpu_memory_utilization" in kwargs:
        return dict(kwargs)
    return {**memory, **kwargs}
