# SPDX-License-Identifier: Apache-2.0
"""All that differs between vLLM versions, and what of vLLM's inside is relied upon. Tested on 0.25.1, 0.28.0, 0.32.0.

Whoever supports another version changes this file and nothing else. Every accessor names the attribute that it needs;
`verify_model_runner` fails with a sentence when one is missing, before the engine serves a request.
"""

import functools
import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nemo_specrollout.config.strict import ConfigError, nearest
from nemo_specrollout.config.versions import unsupported_version

VLLM_VERSION = vllm.__version__
RUNNER_ATTRIBUTES = (
    "_calc_spec_decode_metadata",
    "_sample",
    "input_batch",
    "max_num_reqs",
    "positions",
    "query_start_loc",
    "requests",
    "sampler",
    "seq_lens",
    "speculative_config",
)


class RolloutSamplingParams(SamplingParams):
    """Sampling parameters for an engine with our sampler, which applies min-p and logit bias to draft rows too."""

    def _validate_spec_decode(self, speculative_config: Any) -> None:
        """vLLM's own rejection sampler cannot do that, so vLLM would refuse the request here."""


def check_version() -> None:
    """Raises ConfigError for a version of vLLM outside the range that is supported."""
    message = unsupported_version(VLLM_VERSION)
    if message is not None:
        raise ConfigError(message)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that vllm.LLM does not have."""
    known = {field.name for field in fields(EngineArgs)} | set(inspect.signature(LLM.__init__).parameters)
    for name in arguments:
        if name not in known:
            raise ConfigError(f"vllm_kwargs.{name}: vLLM {VLLM_VERSION} has no such argument{nearest(name, known)}")


def verify_model_runner(runner: Any) -> None:
    """Raises RuntimeError unless `runner` is vLLM's V1 model runner with everything that is bound to it here."""
    if not isinstance(runner, GPUModelRunner):
        raise RuntimeError(
            f"specrollout binds to vLLM's V1 model runner, but vLLM {VLLM_VERSION} built {type(runner).__module__}."
            f"{type(runner).__name__}; set VLLM_USE_V2_MODEL_RUNNER=0 in the engine's environment"
        )
    missing = [name for name in RUNNER_ATTRIBUTES if not hasattr(runner, name)]
    if missing:
        raise RuntimeError(
            f"vLLM {VLLM_VERSION}: the model runner has no {', '.join(missing)}; this version is not supported"
        )
    if runner.use_async_scheduling:
        raise RuntimeError("specrollout chooses drafts on the host, which needs vllm_kwargs.async_scheduling: false")


def device_type() -> str:
    """`cuda` or `cpu`: what vLLM runs on in this process."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def is_output_rank() -> bool:
    """Whether vLLM takes this rank's drafts and outputs: the first tensor-parallel rank of the last pipeline stage."""
    return get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0


def may_draft() -> bool:
    """Whether vLLM builds a drafter on this rank."""
    return get_pp_group().is_last_rank


def continues_requests(scheduler_output: Any) -> bool:
    """Whether the step goes on with a request that ran before."""
    return bool(scheduler_output.scheduled_cached_reqs.req_ids)


def output_positions(runner: Any, logits_indices_R: torch.Tensor) -> torch.Tensor:
    """Index in its sequence of the token that each logits row samples, int64 [R], on the device."""
    positions = getattr(runner.positions, "gpu", runner.positions)
    return positions[logits_indices_R] + 1


def next_positions(runner: Any, num_reqs: int) -> torch.Tensor:
    """Index in its sequence of the token that follows all that is scheduled of each request, int64 [B], on the device."""
    return runner.seq_lens[:num_reqs].to(torch.int64)


def num_scheduled_tokens(runner: Any, num_reqs: int) -> int:
    """Rows that the step's forward pass computes, prompt tokens included."""
    return int(runner.query_start_loc.np[num_reqs])


def skip_empty_draft_metadata(runner: Any) -> None:
    """Spares a step without drafts vLLM's index tensors for drafts, a tenth of a millisecond on a slow host.

    In an engine whose drafter runs no model, vLLM itself reads one field of such a step, and our sampler none.
    """
    calculate = runner._calc_spec_decode_metadata

    def calculate_unless_empty(num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray) -> Any:
        if num_draft_tokens.any():
            return calculate(num_draft_tokens, cu_num_scheduled_tokens)
        indices = torch.from_numpy(cu_num_scheduled_tokens - 1).to(runner.device, non_blocking=True)
        return SimpleNamespace(logits_indices=indices)

    runner._calc_spec_decode_metadata = calculate_unless_empty


def enable_all_logits_processors(runner: Any) -> None:
    """Gives a speculating engine the processors (min-p, logit bias) that vLLM leaves out there.

    vLLM's own rejection sampler cannot apply them to draft rows; ours can.
    """
    batch = runner.input_batch
    classes = {type(processor) for processor in batch.logitsprocs.all}
    missing = [cls for cls in BUILTIN_LOGITS_PROCESSORS if cls not in classes]
    if missing:
        added = [cls(runner.vllm_config, runner.device, runner.device.type != "cpu") for cls in missing]
        batch.logitsprocs = LogitsProcessors([*batch.logitsprocs.all, *added])


def is_idle(processor: Any) -> bool:
    """Whether a logits processor would leave every row of the batch as it is."""
    if isinstance(processor, MinPLogitsProcessor):
        return processor.min_p_count == 0
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return False


def apply_top_k_top_p(
    logits_RV: torch.Tensor, top_k_R: torch.Tensor | None, top_p_R: torch.Tensor | None
) -> torch.Tensor:
    """vLLM's top-k and top-p masks by one kernel, whatever the number of rows; may write into `logits_RV`.

    On a GPU 0.25.1 and 0.28.0 sort fewer than 8 rows and take a Triton kernel for more. The two cut ties at the k-th logit
    in another way, so tokens would depend on how many drafts are verified.
    """
    triton = getattr(topk_topp_sampler, "apply_top_k_top_p_triton", None) if logits_RV.is_cuda else None
    return (triton or topk_topp_sampler.apply_top_k_top_p)(logits_RV, top_k_R, top_p_R)


class _MinTokensAtDepth:
    """`min_tokens` for rows that follow some drafts, of which vLLM's own `apply` knows nothing."""

    def __init__(self, processor: Any, num_drafts_before: int) -> None:
        self.min_toks = processor.min_toks
        self.num_drafts_before = num_drafts_before

    def apply(self, logits_BV: torch.Tensor) -> torch.Tensor:
        for row, (min_tokens, output_token_ids, stop_token_ids, *_) in self.min_toks.items():
            if len(output_token_ids) + self.num_drafts_before < min_tokens:
                logits_BV[row, list(stop_token_ids)] = -float("inf")
        return logits_BV


def metadata_at_depth(metadata: Any, output_token_ids: list[list[int]], num_drafts_before: int) -> Any:
    """Sampling metadata as plain decoding would have it after `num_drafts_before` of each request's drafts."""
    if num_drafts_before == 0:
        return metadata
    processors = [
        _MinTokensAtDepth(p, num_drafts_before) if isinstance(p, MinTokensLogitsProcessor) else p
        for p in metadata.logitsprocs.non_argmax_invariant
    ]
    logitsprocs = SimpleNamespace(
        non_argmax_invariant=processors, argmax_invariant=metadata.logitsprocs.argmax_invariant
    )
    return replace(metadata, output_token_ids=output_token_ids, logitsprocs=logitsprocs)


def unsupported_sampling(metadata: Any) -> str | None:
    """The name of a requested feature that this sampler does not have, or None."""
    if metadata.max_num_logprobs == -1:
        return "logprobs=-1 (the whole vocabulary)"
    if getattr(metadata, "logprob_token_ids", None):
        return "logprob_token_ids"
    holder = getattr(metadata, "thinking_budget_state_holder", None)
    if holder is not None and holder.has_tracked_requests():
        return "a thinking token budget"
    return None


def num_drafts_array(spec_decode_metadata: Any) -> np.ndarray:
    return np.asarray(spec_decode_metadata.num_draft_tokens, dtype=np.int64)


def allow_several_engines() -> None:
    """Lets one process build several CPU engines, and import numba before the first.

    vLLM 0.32 registers its CPU kernels anew with each worker by scanning every loaded module, and fails on the second
    scan and on llvmlite's foreign-function objects. Registering once, with llvmlite out of sight, is all that it needs.
    """
    from vllm.platforms.cpu import CpuPlatform

    register = getattr(CpuPlatform, "register_triton_kernel_overrides", None)
    if register is None or hasattr(register, "runs_once"):
        return

    @functools.cache
    def register_once() -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "llvmlite"}
        try:
            register()
        finally:
            sys.modules.update(hidden)

    def run_once() -> None:
        register_once()

    run_once.runs_once = True  # type: ignore[attr-defined]
    CpuPlatform.register_triton_kernel_overrides = staticmethod(run_once)  # type: ignore[method-assign]
