# SPDX-License-Identifier: Apache-2.0
"""Rules about combinations of options in a NeMo-RL config: sampling, asynchrony, the SingleController, draft heads.

NeMo-RL itself refuses many of these combinations, but minutes after the start, when all weights are loaded.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.drafter_configs import REMOTE_DRAFTER
from nemo_specrollout.config.nemo_rl_tree import (
    GENERATION,
    SPECULATIVE_CONFIG,
    VLLM_CFG,
    Finding,
    Rule,
    Tree,
    asynchronous_block,
    at,
    broken,
    is_off,
    is_on,
    is_set,
    model_config,
    native_drafts,
    size_at,
    stale_kv_field,
)


def combination_findings(tree: Tree) -> Iterator[Finding]:
    """Yields the findings about options that do not go together, or whose effect the user should know."""
    if asynchronous_block(tree) is not None:
        yield from broken(_ASYNCHRONOUS, tree)
    if _is_controlled(tree):
        yield from broken(_CONTROLLER, tree)
        yield from _controller_batch(tree)
    if at(tree, "policy.draft.enabled"):
        yield from broken(_DRAFT_TRAINING, tree)
        yield from _draft_training(tree)
    yield from broken(_OTHERS, tree)
    for function in (_data_plane, _sampling, _context, _trainer_batches, _stale_kv, _prompt_file):
        yield from function(tree)


def _is_controlled(tree: Tree) -> bool:
    return at(tree, "async_rl") is not None


def _has_unseeded_clients(tree: Tree) -> bool:
    """Returns whether the HTTP server may get requests without a seed. NeMo-Gym's requests have seeds."""
    return not at(tree, "env.should_use_nemo_gym") and at(tree, f"{BLOCK_PATH}.http_seeds") != "required"


def _placed_by_ray(*, on_gpu: bool) -> Callable[[Any], bool]:
    """Returns a function that tells whether Ray places drafters of the list on GPUs, or on CPUs."""

    def trips(drafters: Any) -> bool:
        remote = (d for d in drafters or () if isinstance(d, Mapping) and d.get("type") == REMOTE_DRAFTER)
        return any(d.get("workers") and bool(d.get("gpus")) is on_gpu for d in remote)

    return trips


def _places_itself(drafters: Any) -> bool:
    return any(isinstance(d, Mapping) and d.get("placement") == "auto" for d in drafters or ())


_REFUSED = (
    "data.use_multiple_dataloader", "grpo.use_dynamic_sampling", "grpo.reward_scaling.enabled", "grpo.reward_shaping.enabled",
    "ppo.use_dynamic_sampling", "ppo.reward_scaling.enabled", "ppo.reward_shaping.enabled",
)  # fmt: skip
"""Options that NeMo-RL refuses in asynchronous training."""
_ASYNCHRONOUS = (
    Rule(f"{VLLM_CFG}.async_engine", is_off, "asynchronous training needs it: set it to true"),
    Rule(f"{GENERATION}.colocated.enabled", bool, "asynchronous training generates on its own GPUs: set it to false and "
         "list them in colocated.resources"),
    Rule("loss_fn.use_importance_sampling_correction", is_off, "asynchronous training has samples of an older policy: "
         "set it to true"),
    *(Rule(path, bool, "NeMo-RL refuses it in asynchronous training, after its set-up: set it to false")
      for path in _REFUSED),
)  # fmt: skip
_NO_VALIDATION = "the SingleController has no validation"
_CONTROLLER = (
    Rule("grpo.async_grpo", is_set, "the SingleController reads only async_rl: set it to null"),
    Rule("data_plane.enabled", is_off, "the SingleController keeps rollouts in the data plane: set it to true"),
    Rule(f"{VLLM_CFG}.async_engine", is_off, "the SingleController requests rollouts one at a time: set it to true"),
    Rule(f"{GENERATION}.colocated.enabled", lambda v: v is None or v, "the SingleController generates while it trains: "
         "set it to false and list GPUs in colocated.resources"),
    *(Rule(path, bool, f"{_NO_VALIDATION}: set it to 0 or false")
      for path in ("grpo.val_period", "grpo.val_at_start", "grpo.val_at_end")),
    Rule("checkpointing.metric_name", lambda v: is_set(v) and not str(v).startswith("train:"), f"{_NO_VALIDATION}: name a "
         "metric of training, e.g. train:loss, or set it to null", when=is_on("checkpointing.enabled")),
)  # fmt: skip
_DRAFT_TRAINING = (
    Rule("policy.megatron_cfg.enabled", is_off, "NeMo-RL trains a draft head only beside a Megatron policy: set it to true, "
         "or policy.draft.enabled to false"),
    Rule("policy.sequence_packing.enabled", bool, "NeMo-RL trains no draft head on packed sequences: set it to false"),
    Rule("policy.draft.aux_layer_indices", bool, "NeMo-RL sizes the head by it, and then captures its default layers: set "
         "it to null", "warning"),
    Rule("policy.draft.enabled", bool, "NeMo-RL trains a draft head of its own, and each refit overwrites the head that "
         f"{BLOCK_PATH}.draft_refresh trains: set it to false, or remove that block",
         when=is_on(f"{BLOCK_PATH}.draft_refresh")),
)  # fmt: skip
_OTHERS = (
    Rule(f"{BLOCK_PATH}.draft_refresh.trainer_gpus", bool, "GPU in addition to the GPUs of `cluster`: no head is trained "
         "until Ray has one free", "note"),
    Rule(f"{BLOCK_PATH}.drafters", _places_itself, "placement: auto works only in the local runner; run "
         "`nemo-specrollout plan` and write its answer into the config"),
    Rule(f"{BLOCK_PATH}.drafters", _placed_by_ray(on_gpu=True), "Ray places the drafters on GPUs in addition to the GPUs of "
         "`cluster`: nothing is drafted until they are free", "note"),
    Rule(f"{BLOCK_PATH}.drafters", _placed_by_ray(on_gpu=False), "Ray places the drafters on CPU cores, which only vLLM's "
         "CPU build can use: on a cluster with GPUs set gpus of the remote drafter", "note"),
    Rule(f"{BLOCK_PATH}.verify.requests_per_step", bool, "without effect: only the local runner decodes requests again",
         "warning"),
    Rule("policy.router_replay.enabled", bool, "not tested with drafts: vLLM must return the experts of accepted tokens "
         "only", "warning"),
    Rule(f"{VLLM_CFG}.expose_http_server", bool, "a request over HTTP without a seed gets one from its prompt and the engine "
         f"that it reaches: send `seed`, or set {BLOCK_PATH}.http_seeds to required, which refuses such requests", "note",
         _has_unseeded_clients),
    Rule(f"{VLLM_CFG}.precision", lambda v: v not in (None, "float32"), "tokens are equal up to near-ties; against those, set "
         "vllm_cfg.env_vars.VLLM_BATCH_INVARIANT: '1'. The log-prob gap is larger than in float32", "note"),
)  # fmt: skip


def _controller_batch(tree: Tree) -> Iterator[Finding]:
    """Checks that a step of the SingleController is one optimizer step."""
    rows = size_at(tree, "grpo.num_prompts_per_step") * size_at(tree, "grpo.num_generations_per_prompt")
    text = f"a step has {rows} rows (num_prompts_per_step times num_generations_per_prompt): set it to {rows}"
    yield from broken([Rule("policy.train_global_batch_size", lambda v: v != rows, text)], tree)


def _data_plane(tree: Tree) -> Iterator[Finding]:
    if _is_controlled(tree) or not at(tree, "data_plane.enabled") or at(tree, f"{VLLM_CFG}.async_engine"):
        return
    fastest = at(tree, f"{BLOCK_PATH}.fastest_of_n")
    if isinstance(fastest, Mapping) and fastest.get("enabled", True):
        text = (
            "with data_plane.enabled, another process requests rollouts: set async_engine to true, or remove the block"
        )
        yield Finding(f"{BLOCK_PATH}.fastest_of_n", text, "error")


def _sampling(tree: Tree) -> Iterator[Finding]:
    """Checks the log-probs: NeMo-RL trains on those after temperature, top-p and top-k (distributed/model_utils.py:848)."""
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


def _context(tree: Tree) -> Iterator[Finding]:
    engine, trainer = at(tree, f"{VLLM_CFG}.max_model_len"), at(tree, "policy.max_total_sequence_length")
    if engine != trainer:
        text = f"{engine} differs from policy.max_total_sequence_length {trainer}; set both to the same"
        yield Finding(f"{VLLM_CFG}.max_model_len", text, "warning")
    if num_drafts := native_drafts(tree):
        text = f"because of it, NeMo-RL ends every request {num_drafts + 1} tokens before max_model_len"
        yield Finding(SPECULATIVE_CONFIG, text, "note")


def _trainer_batches(tree: Tree) -> Iterator[Finding]:
    """Warns of an assertion that NeMo-RL makes when it builds the policy (lm_policy.py:210)."""
    megatron = "megatron_cfg.tensor_model_parallel_size" if at(tree, "policy.megatron_cfg.enabled") else None
    ranks = size_at(tree, f"policy.{megatron or 'dtensor_cfg.tensor_parallel_size'}")
    train, logprob = at(tree, "policy.train_micro_batch_size"), at(tree, "policy.logprob_batch_size")
    if ranks >= 4 and logprob not in {None, train} and not at(tree, "loss_fn.force_on_policy_ratio"):
        text = f"{logprob} differs from train_micro_batch_size {train}; NeMo-RL refuses that at tensor parallel {ranks}"
        yield Finding("policy.logprob_batch_size", f"{text}, unless NRL_IGNORE_TP_ACCURACY_CHECK=1 is set", "warning")


def _draft_training(tree: Tree) -> Iterator[Finding]:
    if not native_drafts(tree) or at(tree, f"{SPECULATIVE_CONFIG}.method") not in {"eagle", "eagle3"}:
        text = f"a head is trained, but no engine drafts with it: set {SPECULATIVE_CONFIG} with method eagle3"
        yield Finding("policy.draft.enabled", f"{text}, or policy.draft.enabled to false", "warning")
    num_layers = (model_config(tree) or {}).get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return
    # NeMo-RL's choice (models/megatron/draft/hidden_capture.py:28), which no option changes.
    captured = sorted({1, max(0, num_layers // 2 - 1), max(1, num_layers - 4)})
    if len(captured) < 3:
        text = f"a policy of {num_layers} layers: NeMo-RL captures the states of layers {captured} for the head, not of three"
        yield Finding("policy.draft.enabled", f"{text}; take a deeper policy", "warning")


def _stale_kv(tree: Tree) -> Iterator[Finding]:
    block = asynchronous_block(tree)
    if block is not None and not _is_controlled(tree) and stale_kv_field(tree) is not None:
        text = "true; running requests keep KV of older weights unless recompute_kv_cache_after_weight_updates is true"
        yield Finding(f"{block}.in_flight_weight_updates", f"{text}. That is NeMo-RL's own default", "note")


def _prompt_file(tree: Tree) -> Iterator[Finding]:
    name = at(tree, "data.default.prompt_file")
    if name is not None and not Path(str(name)).is_file():
        text = f"{name} does not exist here; NeMo-RL looks for it in the folder in which the run is started"
        yield Finding("data.default.prompt_file", text, "note")
