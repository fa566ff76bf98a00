# SPDX-License-Identifier: Apache-2.0
"""Rules about the engines of a NeMo-RL config: vLLM's V2 model runner, parallel sizes, and `fastest_of_n`."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.config.nemo_rl_tree import (
    GENERATION,
    SPECULATIVE_CONFIG,
    VLLM_CFG,
    VLLM_KWARGS,
    Finding,
    Rule,
    Tree,
    at,
    broken,
    drafter_types,
    is_set,
    native_drafts,
    num_engines,
    parallel_sizes,
    stale_kv_field,
)

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_V1_METHODS = ("suffix", "custom_class", "medusa", "mlp_speculator")
"""Draft methods that only vLLM's V1 model runner has."""
_V1_OPTIONS = ("parallel_drafting", "disable_padded_drafter_batch", "use_heterogeneous_vocab")
"""Options of `speculative_config` that only vLLM's V1 model runner has."""
_PARALLEL_METHODS = ("dflash", "dspark")
"""Methods that draft all positions in one pass by nature, with speculators of the V2 model runner."""
_NEMO_RL_PASSES = {
    "dtype", "enable_expert_parallel", "enable_prefix_caching", "enable_sleep_mode", "enforce_eager", "gpu_memory_utilization",
    "disable_log_stats", "load_format", "max_model_len", "model", "pipeline_parallel_size", "seed", "served_model_name",
    "skip_tokenizer_init", "tensor_parallel_size", "trust_remote_code", "worker_extension_cls",
}  # fmt: skip
"""Arguments that NeMo-RL itself passes to vLLM (vllm_worker.py:586); a second one of the same name is a TypeError."""
_STOP_AT_STRINGS = ("sliding_puzzle_game", "code", "retriever")
"""NeMo-RL's environments that end each turn at a string, by their names in `env`."""
_RULES = (
    Rule(f"{GENERATION}.backend", lambda v: v != "vllm", "specrollout works only in vLLM: set it to vllm"),
    Rule(f"{GENERATION}.quant_cfg", is_set, "ModelOpt's worker would replace the worker of specrollout: set it to null"),
    Rule(f"{VLLM_KWARGS}.worker_cls", is_set, "specrollout sets the worker itself: remove it"),
    Rule(f"{GENERATION}.worker_extension_cls_fqn", is_set, "NeMo-RL would use this worker instead of the one of specrollout: "
         "remove it"),
    Rule(f"{VLLM_KWARGS}.async_scheduling", lambda v: v is False, "the GPU waits while the host prepares each step: "
         "an estimated 3 to 5 ms at 256 requests", "note"),
    Rule(SPECULATIVE_CONFIG, lambda v: is_set(v) and not isinstance(v, Mapping), "expected a block of keys"),
)  # fmt: skip


def engine_findings(tree: Tree) -> Iterator[Finding]:
    """Yields the findings about the engines."""
    yield from broken(_RULES, tree)
    for name in sorted(_NEMO_RL_PASSES.intersection(at(tree, VLLM_KWARGS, {}))):
        yield Finding(f"{VLLM_KWARGS}.{name}", f"NeMo-RL passes it itself: remove it, see {VLLM_CFG}", "error")
    yield from runner_findings(tree)
    yield from _parallelism(tree)


def runner_findings(tree: Tree) -> Iterator[Finding]:
    """Yields the findings about vLLM's model runner, which also apply to a local run."""
    # NeMo-RL passes its own environment on to the engines.
    path = f"{VLLM_CFG}.env_vars.{RUNNER_VARIABLE}"
    configured, in_environment = at(tree, path), os.environ.get(RUNNER_VARIABLE)
    value = in_environment if configured is None else configured
    if value is not None and str(value).lower() in {"0", "false"}:
        subject, where = (path, "") if configured is not None else (RUNNER_VARIABLE, " in the environment")
        text = f"{json.dumps(value)}{where}; specrollout works only on vLLM's V2 model runner: remove it"
        yield Finding(subject, text, "error")
    if native_drafts(tree):
        yield from _speculative_config(tree)


def _speculative_config(tree: Tree) -> Iterator[Finding]:
    method = at(tree, f"{SPECULATIVE_CONFIG}.method")
    if method in _V1_METHODS:
        fix = f"remove the block, and name drafters in {BLOCK_PATH}"
        yield _missing_in_v2("method", method, fix if method == "suffix" else "use eagle3, mtp or draft_model")
    for name in _V1_OPTIONS:
        value = at(tree, f"{SPECULATIVE_CONFIG}.{name}")
        if value and not (name == "parallel_drafting" and method in _PARALLEL_METHODS):
            yield _missing_in_v2(name, value, "remove it")


def _missing_in_v2(name: str, value: Any, fix: str) -> Finding:
    text = f"{json.dumps(value)}; vLLM's V2 model runner does not have it: {fix}"
    return Finding(f"{SPECULATIVE_CONFIG}.{name}", text, "error")


def _parallelism(tree: Tree) -> Iterator[Finding]:
    (tensor, pipeline, expert), types = parallel_sizes(tree), drafter_types(tree)
    path = f"{VLLM_CFG}.pipeline_parallel_size"
    if pipeline > 1 and types:
        text = (
            f"{pipeline} with drafters ({', '.join(types)}); specrollout drafts only in engines of one pipeline stage"
        )
        yield Finding(path, f"{text}: set it to 1, or set drafters to []", "error")
    elif pipeline > 1 and not at(tree, f"{VLLM_CFG}.async_engine"):
        yield Finding(path, f"{pipeline}; NeMo-RL needs async_engine: true for it", "error")
    path = f"{VLLM_CFG}.expert_parallel_size"
    if expert > 1 and expert % tensor:
        yield Finding(path, f"{expert} is not a multiple of tensor_parallel_size {tensor}, as NeMo-RL demands", "error")
    with_weights = [] if native_drafts(tree) else [t for t in types if t in MODEL_DRAFTERS]
    if expert > tensor and with_weights:
        yield _lockstep(tensor, expert, f"a drafter with weights ({with_weights[0]})", "use drafters without weights")
    for kind, is_used in (("tensor", tensor > 1), ("pipeline", pipeline > 1), ("expert", expert > tensor)):
        if is_used:
            tested = "only on a CPU" if kind == "tensor" else "not at all"
            text = f"engines of several GPUs were tested {tested} with specrollout"
            yield Finding(f"{VLLM_CFG}.{kind}_parallel_size", text, "note")


def _lockstep(tensor: int, expert: int, feature: str, fix: str) -> Finding:
    """Returns the error about a feature that engines do not all use in the same step."""
    text = (
        f"{expert} with tensor_parallel_size {tensor} and {feature}; vLLM steps such engines in lockstep, so an engine that "
        f"pauses would hold up the others: {fix}"
    )
    return Finding(f"{VLLM_CFG}.expert_parallel_size", text, "error")


def fastest_of_n_findings(tree: Tree, fastest: FastestOfNConfig | None) -> Iterator[Finding]:
    """Yields the findings about the block `fastest_of_n`."""
    if fastest is None or not fastest.enabled:
        return
    if at(tree, "cluster") is not None:
        yield from _number_of_engines(fastest, num_engines(tree))
    tensor, _, expert = parallel_sizes(tree)
    if expert > tensor:
        yield _lockstep(tensor, expert, "fastest_of_n", "remove the block fastest_of_n")
    if (field := stale_kv_field(tree)) is not None:
        text = (
            "false with in-flight weight updates and fastest_of_n; after an update, a request that moved would continue "
            "from another KV cache than one that stayed: set it to true"
        )
        yield Finding(field, text, "error")
    for path in (
        f"{GENERATION}.stop_strings",
        f"{GENERATION}.bad_words",
        f"{VLLM_KWARGS}.enable_return_routed_experts",
    ):
        if value := at(tree, path):
            text = f"{json.dumps(value)} with fastest_of_n; requests with it stay in their engine, so none moves"
            yield Finding(path, text, "warning")
    for name in _STOP_AT_STRINGS:
        if at(tree, f"env.{name}") is not None and _is_used(tree, name):
            text = "its turns end at a string; with fastest_of_n such requests stay in their engine, so none moves"
            yield Finding(f"env.{name}", text, "warning")
    if at(tree, f"{VLLM_CFG}.expose_http_server"):
        text = "true with fastest_of_n; requests that come through the server stay in their engine"
        yield Finding(f"{VLLM_CFG}.expose_http_server", text, "warning")


def _number_of_engines(fastest: FastestOfNConfig, engines: int) -> Iterator[Finding]:
    path = f"{BLOCK_PATH}.fastest_of_n"
    if engines < 2:
        text = "without effect: by the sizes of the cluster there is one engine, so requests cannot move"
        yield Finding(path, text, "warning")
    elif fastest.max_racers > engines:
        text = f"{fastest.max_racers} racers for {engines} engines; lower it to at most the number of engines"
        yield Finding(f"{path}.max_racers", text, "error")
    elif len(fastest.methods) > engines:
        text = f"{len(fastest.methods)} entries for {engines} engines; the last would never draft: list at most one per engine"
        yield Finding(f"{path}.methods", text, "error")


def _is_used(tree: Tree, environment: str) -> bool:
    """Returns whether the data name an environment. NeMo-RL's base configs describe environments that no data use."""
    named = [at(tree, f"data.{block}.env_name") for block in ("train", "default", "validation")]
    return environment in named or not any(named)
