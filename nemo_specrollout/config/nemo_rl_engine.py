# SPDX-License-Identifier: Apache-2.0
"""What vLLM's V2 model runner, and ours on it, cannot do with the engine that a NeMo-RL config asks for."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.config.nemo_rl_traps import (
    SPECULATIVE_CONFIG,
    VLLM_CFG,
    VLLM_KWARGS,
    Finding,
    Tree,
    at,
    native_drafts,
    size_at,
)

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_V1_METHODS = ("suffix", "custom_class", "medusa", "mlp_speculator")
# These draft all positions in one pass by nature, and the V2 model runner has speculators for them.
_PARALLEL_METHODS = ("dflash", "dspark")
_V1_OPTIONS = ("parallel_drafting", "disable_padded_drafter_batch", "use_heterogeneous_vocab")
# Passed to vLLM by NeMo-RL itself, vllm_worker.py:586; a second one of the same name is a TypeError there.
_NEMO_RL_PASSES = {
    "model", "served_model_name", "load_format", "skip_tokenizer_init", "tensor_parallel_size", "pipeline_parallel_size",
    "enable_expert_parallel", "gpu_memory_utilization", "enable_prefix_caching", "dtype", "seed", "enforce_eager",
    "max_model_len", "trust_remote_code", "worker_extension_cls", "enable_sleep_mode", "disable_log_stats",
}  # fmt: skip


def block_is_on(tree: Tree) -> bool:
    """Whether there is a block that is not switched off."""
    return at(tree, BLOCK_PATH) is not None and at(tree, f"{BLOCK_PATH}.enabled", True) is not False


def drafter_types(tree: Tree) -> list[str]:
    """Of the drafters in effect: vLLM's own, else those of our block, else its defaults."""
    if native_drafts(tree):
        return [str(at(tree, f"{SPECULATIVE_CONFIG}.method"))]
    drafters = at(tree, f"{BLOCK_PATH}.drafters", [{"type": d.type} for d in SpecrolloutConfig().drafters])
    named = drafters if block_is_on(tree) and isinstance(drafters, list | tuple) else []
    return [str(d.get("type")) for d in named if isinstance(d, Mapping)]


def engine_findings(tree: Tree) -> Iterator[Finding]:
    """Every error and note about the engines."""
    for function in (_arguments_of_nemo_rl, runner_findings, _pipeline, _experts, _sizes):
        yield from function(tree)


def runner_findings(tree: Tree) -> Iterator[Finding]:
    """Those about the model runner, which are the same of a local run."""
    yield from _model_runner(tree)
    yield from _speculative_config(tree)


def _arguments_of_nemo_rl(tree: Tree) -> Iterator[Finding]:
    for name in sorted(_NEMO_RL_PASSES & set(at(tree, VLLM_KWARGS, {}))):
        yield Finding(f"{VLLM_KWARGS}.{name}", f"NeMo-RL passes it itself: remove it, see {VLLM_CFG}", "error")


def _model_runner(tree: Tree) -> Iterator[Finding]:
    """NeMo-RL hands the environment in which it is started on to the engines."""
    path = f"{VLLM_CFG}.env_vars.{RUNNER_VARIABLE}"
    in_config = at(tree, path)
    subject, value = (RUNNER_VARIABLE, os.environ.get(RUNNER_VARIABLE)) if in_config is None else (path, in_config)
    if value is not None and str(value).lower() in {"0", "false"}:
        where = "" if in_config is not None else " in the environment"
        text = f"{json.dumps(value)}{where}; specrollout works on vLLM's V2 model runner alone: remove it"
        yield Finding(subject, text, "error")


def _speculative_config(tree: Tree) -> Iterator[Finding]:
    if not native_drafts(tree):
        return
    method = at(tree, f"{SPECULATIVE_CONFIG}.method")
    if method in _V1_METHODS:
        fix = f"remove the block, and name drafters in {BLOCK_PATH}"
        yield _unknown_to_v2("method", method, fix if method == "suffix" else "use eagle3, mtp or draft_model")
    for name in _V1_OPTIONS:
        value = at(tree, f"{SPECULATIVE_CONFIG}.{name}")
        if value and not (name == "parallel_drafting" and method in _PARALLEL_METHODS):
            yield _unknown_to_v2(name, value, "remove it")


def _unknown_to_v2(name: str, value: Any, fix: str) -> Finding:
    text = f"{json.dumps(value)}; vLLM's V2 model runner does not have it: {fix}"
    return Finding(f"{SPECULATIVE_CONFIG}.{name}", text, "error")


def _pipeline(tree: Tree) -> Iterator[Finding]:
    path = f"{VLLM_CFG}.pipeline_parallel_size"
    stages, types = size_at(tree, path), drafter_types(tree)
    if stages > 1 and types:
        text = f"{stages} with drafters ({', '.join(types)}); specrollout drafts in engines of one stage: set it to 1"
        yield Finding(path, f"{text}, or draft with none", "error")
    elif stages > 1 and not at(tree, f"{VLLM_CFG}.async_engine"):
        yield Finding(path, f"{stages}; NeMo-RL needs async_engine: true for it", "error")


def _experts(tree: Tree) -> Iterator[Finding]:
    path = f"{VLLM_CFG}.expert_parallel_size"
    tensor, expert = size_at(tree, f"{VLLM_CFG}.tensor_parallel_size"), size_at(tree, path)
    if expert > 1 and expert % tensor:
        yield Finding(path, f"{expert} is no multiple of tensor_parallel_size {tensor}, as NeMo-RL demands", "error")
    with_weights = [] if native_drafts(tree) else [t for t in drafter_types(tree) if t in MODEL_DRAFTERS]
    if expert > tensor and with_weights:
        text = (
            f"{expert} with tensor_parallel_size {tensor} and a drafter with weights ({with_weights[0]}); vLLM steps such "
            "engines all together, and one that does not ask its drafter would hold up the others: use drafters without "
            "weights"
        )
        yield Finding(path, text, "error")


def _sizes(tree: Tree) -> Iterator[Finding]:
    kinds = ("tensor", "pipeline", "expert")
    tensor, pipeline, expert = (size_at(tree, f"{VLLM_CFG}.{kind}_parallel_size") for kind in kinds)
    for kind, is_used in zip(kinds, (tensor > 1, pipeline > 1, expert > tensor), strict=True):
        if is_used:
            extent = "run only on a CPU" if kind == "tensor" else "not run"
            text = f"an engine of several GPUs was {extent} with specrollout"
            yield Finding(f"{VLLM_CFG}.{kind}_parallel_size", text, "note")
