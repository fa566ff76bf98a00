# SPDX-License-Identifier: Apache-2.0
"""Checks NeMo-RL configs for settings that do not fit this package, in sampling, draft heads, engines and overrides."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, FastestOfNConfig
from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS, REMOTE_DRAFTER
from nemo_specrollout.config.load import NEMO_RL_DIR, new_keys
from nemo_specrollout.config.model_rules import model_findings
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
    findings,
    is_on,
    is_set,
    named_drafters,
    native_drafts,
    nemo_rl_checkout,
    num_engines,
    parallel_sizes,
    stale_kv_field,
    strings_at,
)
from nemo_specrollout.config.staying_requests import staying_findings
from nemo_specrollout.config.strict import nearest


def trainer_findings(tree: Tree) -> Iterator[Finding]:
    """Yields findings about the draft head that NeMo-RL trains, and about prompt files."""
    layers = at(tree, "policy.draft.aux_layer_indices")
    if at(tree, "policy.draft.enabled") and layers:
        text = f"{layers}; NeMo-RL sizes the head by it, and then captures its default layers: set it to null"
        yield Finding("policy.draft.aux_layer_indices", text, "warning")
    yield from _prompt_files(tree)


def _has_unseeded_clients(tree: Tree) -> bool:
    """Tells whether an engine's HTTP server may get requests without a seed and would accept them.

    With NeMo-Gym the answer is False, because its requests have seeds.
    """
    return not at(tree, "env.should_use_nemo_gym") and at(tree, f"{BLOCK_PATH}.http_seeds") != "required"


def _no_size(low: int, *others: int) -> Callable[[Any], bool]:
    """Returns a function that returns True for a value that is not allowed for a size.

    The allowed values are integers from `low` on, the numbers in `others`, and None, which means that the size is not set.
    """

    def trips(value: Any) -> bool:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return value is not None and not (is_whole and (value >= low or value in others))

    return trips


def _no_share(value: Any) -> bool:
    """Returns True for a value that is not allowed for a share.

    The allowed values are numbers above 0 and up to 1, and None, which means that the share is not set.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is not None and not (is_number and 0 < value <= 1)


_RULES = (
    Rule(
        "policy.draft.enabled",
        bool,
        "NeMo-RL trains a draft head of its own, and each refit overwrites the head that "
        f"{BLOCK_PATH}.draft_refresh trains: set it to false, or remove that block",
        when=is_on(f"{BLOCK_PATH}.draft_refresh"),
    ),
    Rule(
        f"{BLOCK_PATH}.draft_refresh.trainer_gpus",
        bool,
        "GPU in addition to the GPUs of `cluster`: no head is trained until Ray has one free",
        "note",
    ),
    Rule(
        f"{BLOCK_PATH}.verify.requests_per_step",
        bool,
        "without effect: only the local runner decodes requests again",
        "warning",
    ),
    Rule(
        f"{VLLM_CFG}.expose_http_server",
        bool,
        "a request over HTTP without a seed gets one from its prompt and the engine "
        f"that it reaches: send `seed`, or set {BLOCK_PATH}.http_seeds to required, which refuses such requests",
        "note",
        _has_unseeded_clients,
    ),
    Rule(
        f"{VLLM_CFG}.precision",
        lambda v: v not in (None, "float32"),
        "tokens are equal up to near-ties; against those, set "
        "vllm_cfg.env_vars.VLLM_BATCH_INVARIANT: '1'. The log-prob gap is larger than in float32",
        "note",
    ),
    Rule(
        f"{GENERATION}.quant_cfg", is_set, "ModelOpt's worker would replace the worker of specrollout: set it to null"
    ),
    Rule(f"{VLLM_KWARGS}.worker_cls", is_set, "specrollout sets the worker itself: remove it"),
    Rule(
        f"{GENERATION}.worker_extension_cls_fqn",
        is_set,
        "NeMo-RL would use this worker instead of the one of specrollout: remove it",
    ),
    Rule(SPECULATIVE_CONFIG, lambda v: is_set(v) and not isinstance(v, Mapping), "expected a block of keys"),
    Rule(
        "policy.model_name",
        lambda v: not (isinstance(v, str) and v),
        "name the policy: a folder, or a model of the Hub",
    ),
    Rule(VLLM_CFG, lambda v: not v, "NeMo-RL needs it for vLLM: inherit one of NeMo-RL's configs, or write the block"),
    # vLLM refuses these sampling parameters with the first request, after all models are loaded.
    Rule(f"{GENERATION}.top_p", _no_share, "it must be above 0 and at most 1; 1.0 turns it off"),
    Rule(f"{GENERATION}.top_k", _no_size(1, -1), "it must be a whole number, at least 1; null or -1 turns it off"),
    Rule(f"{GENERATION}.max_new_tokens", _no_size(1), "it must be a whole number, at least 1"),
)


def _remote_drafters(tree: Tree) -> Iterator[Finding]:
    path = f"{BLOCK_PATH}.drafters"
    for drafter in named_drafters(tree):
        if drafter.get("placement") == "auto":
            text = "placement: auto works only in the local runner; run `specrollout-lab explain`"
            yield Finding(path, f"{text} and write its answer into the config", "error")
        if drafter.get("type") == REMOTE_DRAFTER and drafter.get("workers"):
            on_gpu = "GPUs in addition to the GPUs of `cluster`: nothing is drafted until they are free"
            on_cpu = "CPU cores, which only vLLM's CPU build can use: on a cluster with GPUs set the drafter's gpus"
            yield Finding(path, f"Ray places the drafters on {on_gpu if drafter.get('gpus') else on_cpu}", "note")


def _data_plane(tree: Tree) -> Iterator[Finding]:
    path = f"{BLOCK_PATH}.fastest_of_n"
    is_here = at(tree, "async_rl") is not None or at(tree, f"{VLLM_CFG}.async_engine")
    is_on_there = at(tree, "data_plane.enabled") and not is_here
    if is_on_there and isinstance(at(tree, path), Mapping) and at(tree, f"{path}.enabled", True):
        text = "with data_plane.enabled, another process requests rollouts"
        yield Finding(path, f"{text}: set async_engine to true, or remove the block", "error")


def _sampling(tree: Tree) -> Iterator[Finding]:
    """Yields findings if the temperature is out of range, or if the engine's log-probs differ in kind from the trainer's.

    NeMo-RL trains on log-probs after temperature, top-p and top-k (distributed/model_utils.py:848). So the engine must return
    such log-probs too.
    """
    path = f"{GENERATION}.temperature"
    temperature = at(tree, path, 1.0)
    if not isinstance(temperature, int | float) or isinstance(temperature, bool) or not 0 < temperature <= 2:
        text = f"{temperature!r}; vLLM samples at 0 to 2, and NeMo-RL's trainer divides by it: set 1.0"
        yield Finding(path, text, "error")
        return
    neutral = {"temperature": 1, "top_p": 1, "top_k": -1}
    values = {name: at(tree, f"{GENERATION}.{name}", value) for name, value in neutral.items()}
    altered = [f"{name} {value}" for name, value in values.items() if value != neutral[name]]
    mode = at(tree, f"{VLLM_CFG}.logprobs_mode")
    if altered and mode != "processed_logprobs":
        text = f"{mode or 'null'} with {' and '.join(altered)}; the engine's log-probs differ from the trainer's"
        yield Finding(f"{VLLM_CFG}.logprobs_mode", f"{text}: set it to processed_logprobs", "warning")


def _native_drafts(tree: Tree) -> Iterator[Finding]:
    method = None
    if num_drafts := native_drafts(tree):
        method = at(tree, f"{SPECULATIVE_CONFIG}.method")
        text = f"because of it, NeMo-RL ends every request {num_drafts + 1} tokens before max_model_len"
        yield Finding(SPECULATIVE_CONFIG, text, "note")
    if at(tree, "policy.draft.enabled") and method not in {"eagle", "eagle3"}:
        text = f"a head is trained, but no engine drafts with it: set {SPECULATIVE_CONFIG} with method eagle3"
        yield Finding("policy.draft.enabled", f"{text}, or policy.draft.enabled to false", "warning")


def _prompt_files(tree: Tree) -> Iterator[Finding]:
    """Yields a note for each prompt file that a run would not find.

    A run looks for a prompt file in the folder where the run is started, and then in NeMo-RL's checkout.
    """
    checkout = nemo_rl_checkout()
    for path, name in strings_at(tree, PROMPT_FILES):
        if Path(name).is_file() or (checkout is not None and (checkout / name).is_file()):
            continue
        if checkout is None:
            text = (
                f"is not in this folder; a run looks next in NeMo-RL's checkout, which was not found: set {NEMO_RL_DIR}"
            )
        else:
            text = f"is neither in this folder nor in NeMo-RL's checkout {checkout}; a run looks nowhere else"
        yield Finding(path, f"{name} {text}", "note")


PROMPT_FILES = ("prompt_file", "system_prompt_file")
"""Keys of NeMo-RL's configs that name prompt files. The names are relative to NeMo-RL's checkout."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_V1_METHODS = ("suffix", "custom_class", "medusa", "mlp_speculator")
"""Draft methods that only vLLM's V1 model runner has."""
_V1_OPTIONS = ("parallel_drafting", "disable_padded_drafter_batch", "use_heterogeneous_vocab")
"""Options of `speculative_config` that only vLLM's V1 model runner has."""
_PARALLEL_METHODS = ("dflash", "dspark")
"""Draft methods for which vLLM's V2 model runner accepts `parallel_drafting`, because they draft all positions in one pass."""


def backend_findings(tree: Tree) -> Iterator[Finding]:
    """Yields an error if the generation backend is not vLLM. In this case no other rule about engines can be checked."""
    if (backend := at(tree, f"{GENERATION}.backend")) != "vllm":
        text = f"{json.dumps(backend)}; specrollout works only in vLLM: set it to vllm"
        yield Finding(f"{GENERATION}.backend", text, "error")


def engine_findings(tree: Tree) -> Iterator[Finding]:
    """Yields findings about those settings of vLLM's engines and models with which this package cannot work as expected."""
    yield from broken(_RULES, tree)
    for function in (
        _remote_drafters,
        _native_drafts,
        _data_plane,
        _sampling,
        runner_findings,
        _parallelism,
        model_findings,
    ):
        yield from function(tree)


def runner_findings(tree: Tree) -> Iterator[Finding]:
    """Yields findings about settings that vLLM's V2 model runner cannot have. They also apply to local runs."""
    # NeMo-RL passes its own environment on to the engines.
    path = f"{VLLM_CFG}.env_vars.{RUNNER_VARIABLE}"
    configured = at(tree, path)
    in_environment = os.environ.get(RUNNER_VARIABLE)
    value = in_environment if configured is None else configured
    if value is not None and str(value).lower() in {"0", "false"}:
        subject, where = (path, "") if configured is not None else (RUNNER_VARIABLE, " in the environment")
        text = f"{json.dumps(value)}{where}; specrollout works only on vLLM's V2 model runner: remove it"
        yield Finding(subject, text, "error")
    if native_drafts(tree):
        yield from _speculative_config(tree)
    top_k, temperature = (at(tree, f"{GENERATION}.{name}") for name in ("top_k", "temperature"))
    if at(tree, f"{VLLM_KWARGS}.return_sampling_mask") and (
        temperature == 0 or not isinstance(top_k, int) or top_k < 1
    ):
        text = (
            f"{top_k} at temperature {temperature}; vLLM returns sampling masks only with top_k and temperature above 0"
        )
        yield Finding(f"{GENERATION}.top_k", f"{text}: set both, or remove vllm_kwargs.return_sampling_mask", "error")


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
    (tensor, pipeline, expert) = parallel_sizes(tree)
    types = drafter_types(tree)
    stages = f"{VLLM_CFG}.pipeline_parallel_size"
    experts = f"{VLLM_CFG}.expert_parallel_size"
    if pipeline > 1 and types:
        text = (
            f"{pipeline} with drafters ({', '.join(types)}); specrollout drafts only in engines of one pipeline stage"
        )
        yield Finding(stages, f"{text}: set it to 1, or set drafters to []", "error")
    with_weights = [] if native_drafts(tree) else [t for t in types if t in MODEL_DRAFTERS]
    if expert > tensor and with_weights:
        yield _lockstep(tensor, expert, f"a drafter with weights ({with_weights[0]})", "use drafters without weights")
    text = "engines of several GPUs were tested {} with specrollout"
    yield from findings(
        (tensor > 1, f"{VLLM_CFG}.tensor_parallel_size", text.format("only on a CPU"), "note"),
        (pipeline > 1, stages, text.format("not at all"), "note"),
        (expert > tensor, experts, text.format("not at all"), "note"),
    )


def _lockstep(tensor: int, expert: int, feature: str, fix: str) -> Finding:
    """Returns the error about a `feature` that lets an engine pause, which expert parallelism forbids.

    vLLM steps engines with expert parallelism in lockstep, so an engine that pauses would hold up the others. `tensor` and
    `expert` are the parallel sizes.
    """
    text = (
        f"{expert} with tensor_parallel_size {tensor} and {feature}; vLLM steps such engines in lockstep, so an engine that "
        f"pauses would hold up the others: {fix}"
    )
    return Finding(f"{VLLM_CFG}.expert_parallel_size", text, "error")


def fastest_of_n_findings(tree: Tree, fastest: FastestOfNConfig | None) -> Iterator[Finding]:
    """Yields findings about settings with which `fastest_of_n` cannot work, or works only for some requests."""
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
    yield from staying_findings(tree)


def _number_of_engines(fastest: FastestOfNConfig, engines: int) -> Iterator[Finding]:
    path = f"{BLOCK_PATH}.fastest_of_n"
    racers = fastest.max_racers
    entries = len(fastest.methods)
    if engines < 2:
        yield Finding(
            path, "without effect: by the sizes of the cluster there is one engine, so requests cannot move", "warning"
        )
        return
    yield from findings(
        (
            racers > engines,
            f"{path}.max_racers",
            f"{racers} racers for {engines} engines; lower it to at most the number of engines",
            "error",
        ),
        (
            entries > engines,
            f"{path}.methods",
            f"{entries} entries for {engines} engines; the last would never draft: list at most one per engine",
            "error",
        ),
    )


_FREE = (BLOCK_PATH, VLLM_KWARGS, "env", "runtime")
"""Blocks and keys that an override may add without a warning, because NeMo-RL's configs need not have them."""
_FREE_ENDINGS = ("env_vars", "kwargs", "overrides")
"""Endings of the names of blocks that may have any key."""


def unknown_overrides(path: Path, overrides: Sequence[str]) -> Iterator[Finding]:
    """Yields a finding for each override that sets a key which the config at `path` does not have.

    It is a warning if the key resembles a key of the config, and otherwise a note.
    """
    for override, name, known in new_keys(path, overrides):
        if _is_free(override):
            continue
        likely = nearest(name, known, most_listed=0)
        text = f"not a key of the config; it is without effect unless NeMo-RL knows it{likely or '; then write +key=value'}"
        yield Finding(override.partition("=")[0], text, "warning" if likely else "note")


def _is_free(override: str) -> bool:
    key = override.partition("=")[0]
    blocks = key.split(".")[:-1]
    is_below = any(key == free or key.startswith(f"{free}.") for free in _FREE)
    return override.startswith("+") or is_below or any(name.endswith(_FREE_ENDINGS) for name in blocks)
