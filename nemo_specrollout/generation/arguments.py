# SPDX-License-Identifier: Apache-2.0
"""The block, as arguments of `vllm.LLM`: worker class, speculative config, additional config. No import of vllm."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from nemo_specrollout.config.block import DrafterConfig, SpecrolloutConfig

WORKER_CLASSES = {
    "cpu": "nemo_specrollout.generation.worker.SpecrolloutCPUWorker",
    "cuda": "nemo_specrollout.generation.worker.SpecrolloutGPUWorker",
}
ROUTER_CLASS = "nemo_specrollout.generation.router.Router"
# vLLM's V2 model runner samples in another place; see docs/exactness.md.
ENGINE_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
# What keeps a CPU engine inside this process, quick to start and quiet. Whoever sets a variable keeps it.
_PROCESS_ENVIRONMENT = {
    **ENGINE_ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
QUIET_START = {
    "use_tqdm_on_load": False,
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
    "distributed_executor_backend": "uni",
}


def set_process_environment() -> None:
    """For an engine in this process, before vllm is imported."""
    for name, value in _PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def with_specrollout(vllm_kwargs: Mapping[str, Any], block: SpecrolloutConfig, device: str) -> dict[str, Any]:
    """`vllm_kwargs` with the block put into effect; unchanged if it is disabled.

    With no drafters, or with a `speculative_config` of the user's own, only the sampler is ours. Raises ValueError where
    the user's arguments contradict the block.
    """
    result = dict(vllm_kwargs)
    if not block.enabled:
        return result
    _refuse(result, "worker_cls", "specrollout names the worker itself; remove it")
    if result.get("async_scheduling"):
        raise ValueError("vllm_kwargs.async_scheduling: true; drafts are chosen on the host: set it to false")
    result["worker_cls"] = WORKER_CLASSES[device]
    result["async_scheduling"] = False
    additional = dict(result.get("additional_config") or {})
    block_dict = dataclasses.asdict(block)
    block_dict["drafters"] = list(block_dict["drafters"])
    if result.get("speculative_config") is not None:
        if block.drafters:
            raise ValueError(
                "vllm_kwargs.speculative_config is set beside policy.generation.specrollout.drafters; remove one of them"
            )
    elif block.drafters:
        result["speculative_config"] = _speculative_config(block)
    result["additional_config"] = {**additional, "specrollout": block_dict}
    return result


def _speculative_config(block: SpecrolloutConfig) -> dict[str, Any]:
    """vLLM's own method for a drafter with weights, else our router as its proposer."""
    drafter, count = block.model_drafter, block.num_speculative_tokens
    if drafter is None:
        return {"method": "custom_class", "model": ROUTER_CLASS, "num_speculative_tokens": count}
    return native_config(drafter, count)


def native_config(drafter: DrafterConfig, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for a drafter with weights."""
    weights = {} if drafter.model is None else {"model": drafter.model}
    return {"method": drafter.type, **weights, "num_speculative_tokens": num_speculative_tokens}


def _refuse(arguments: Mapping[str, Any], name: str, fix: str) -> None:
    if name in arguments:
        raise ValueError(f"vllm_kwargs.{name}: {arguments[name]!r}; {fix}")
