# SPDX-License-Identifier: Apache-2.0
"""The block, as arguments of `vllm.LLM`: worker class, speculative config, additional config. No import of vllm."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import Eagle3DrafterConfig, FolderDrafterConfig, ModelDrafterConfig
from vllm_v2_cpu.plugin import V2_ON_CPU

WORKER_CLASSES = {
    "cpu": "nemo_specrollout.generation.cpu_worker.SpecrolloutCPUWorker",
    "cuda": "nemo_specrollout.generation.gpu_worker.SpecrolloutGPUWorker",
}
SCHEDULER = "nemo_specrollout.generation.resting_scheduler.build_scheduler"
TEXT_METHOD = "ngram_gpu"
"""vLLM's method for drafters without weights: it asks for nothing, and goes with asynchronous scheduling. Ours draft in the
place of its own."""
BFLOAT16_HEAD = "specrollout_bfloat16"
"""vLLM's name for the method of `bfloat16_head.py`."""
# What keeps a CPU engine inside this process, on vLLM's V2 model runner, quick to start and quiet. A variable that is set
# already stays.
_PROCESS_ENVIRONMENT = {
    V2_ON_CPU: "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# vLLM's defaults of `max_num_batched_tokens`, by device and use.
SMALLEST_DEFAULT, USUAL_DEFAULT = 2048, 8192
QUIET_START = {
    "use_tqdm_on_load": False,
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
    "distributed_executor_backend": "uni",
}


# torch.compile takes minutes on a CPU; on a GPU vLLM's graphs of parts of the model need it.
_CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


def set_process_environment() -> None:
    """For an engine in this process, before vllm is imported."""
    import torch

    environment = _PROCESS_ENVIRONMENT if torch.version.cuda else _PROCESS_ENVIRONMENT | _CPU_ENVIRONMENT
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def with_specrollout(
    vllm_kwargs: Mapping[str, Any],
    block: SpecrolloutConfig,
    device: str,
    *,
    chooses_on_device: bool = True,
    keeps_last_block: bool = True,
    multiplies_bfloat16: bool = False,
) -> dict[str, Any]:
    """`vllm_kwargs` with the block put into effect; unchanged if it is disabled.

    With no drafters, or with a `speculative_config` of the user's own, only the sampler is ours. `chooses_on_device`: whether
    this vLLM can choose there which drafts a step verifies. `keeps_last_block`: whether it can take the last block of a cached
    prompt as it is where a head drafts. `multiplies_bfloat16`: whether this CPU has instructions for it.

    Raises ValueError where the user's arguments contradict the block.
    """
    result = dict(vllm_kwargs)
    if not block.enabled:
        return result
    _refuse(result, "worker_cls", "specrollout names the worker itself; remove it")
    result["worker_cls"] = WORKER_CLASSES[device]
    additional = dict(result.get("additional_config") or {})
    block_dict = dataclasses.asdict(block)
    block_dict["drafters"] = list(block_dict["drafters"])
    if result.get("speculative_config") is not None:
        if block.drafters:
            raise ValueError(
                "vllm_kwargs.speculative_config is set beside policy.generation.specrollout.drafters; remove one of them"
            )
    elif block.drafters and block.most_drafts:
        _refuse_other_noise(result, block)
        adapts = chooses_on_device and device == "cuda" and not result.get("enforce_eager")
        in_bfloat16 = multiplies_bfloat16 and result.get("dtype") == "float32"
        result["speculative_config"] = _speculative_config(block, adapts, keeps_last_block, in_bfloat16)
        _make_room_for_drafts(result, block.most_drafts)
        result.setdefault("scheduler_cls", SCHEDULER)
    result["additional_config"] = {**additional, "specrollout": block_dict}
    return result


def _speculative_config(
    block: SpecrolloutConfig, adapts: bool, keeps_last_block: bool, in_bfloat16: bool
) -> dict[str, Any]:
    """vLLM's own method for a drafter with weights, else one that needs none. `adapts`: vLLM prepares CUDA graphs and
    attention for drafts that are chosen on the device. `in_bfloat16`: an EAGLE-3 head multiplies so, whatever the policy does.

    By default vLLM computes the last block of a cached prompt again for each sample, because the head's entry there depends
    on the token that follows. The samples of a prompt share that token, and the policy's own entries never depend on it.
    """
    drafter, count = block.model_drafter, block.most_drafts
    method = {"method": TEXT_METHOD} if drafter is None else native_config(drafter, count)
    adaptive = {"enable_adaptive_verification": True} if adapts else {}
    reuse = {"disable_eagle_block_drop": True} if drafter is not None and keeps_last_block else {}
    is_eagle = isinstance(drafter, Eagle3DrafterConfig)
    precision = {"quantization": BFLOAT16_HEAD} if is_eagle and in_bfloat16 else {}
    return {**method, "num_speculative_tokens": count, **adaptive, **reuse, **precision}


def _make_room_for_drafts(arguments: dict[str, Any], most_drafts: int) -> None:
    """Raises `max_num_batched_tokens` where a step would not hold all requests with their drafts.

    vLLM schedules a row for each draft that a request may have, before the drafts that do not pay are dropped.
    """
    rows = (1 + most_drafts) * int(arguments.get("max_num_seqs") or 0)
    given = arguments.get("max_num_batched_tokens")
    if given is None and rows > SMALLEST_DEFAULT:
        arguments["max_num_batched_tokens"] = max(rows, USUAL_DEFAULT)
    elif given is not None and rows > given:
        raise ValueError(
            f"vllm_kwargs.max_num_batched_tokens: {given}; {arguments['max_num_seqs']} requests with {most_drafts} drafts "
            f"each need {rows}: raise it, or lower max_num_seqs or num_speculative_tokens"
        )


def native_config(drafter: ModelDrafterConfig, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for a drafter with weights."""
    weights = {"model": drafter.model} if isinstance(drafter, FolderDrafterConfig) else {}
    return {"method": drafter.type, **weights, "num_speculative_tokens": num_speculative_tokens}


def _refuse_other_noise(arguments: Mapping[str, Any], block: SpecrolloutConfig) -> None:
    """Raises ValueError where the policy draws float64 noise and its drafter float32 noise: few drafts would come true."""
    drafter = block.model_drafter
    if arguments.get("use_fp64_gumbel") and drafter is not None and drafter.sampling == "shared_noise":
        raise ValueError(
            f"vllm_kwargs.use_fp64_gumbel: true; the {drafter.type} drafter samples with float32 noise: remove it, or give "
            "the drafter `sampling: greedy`"
        )


def _refuse(arguments: Mapping[str, Any], name: str, fix: str) -> None:
    if name in arguments:
        raise ValueError(f"vllm_kwargs.{name}: {arguments[name]!r}; {fix}")
