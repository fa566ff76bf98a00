# SPDX-License-Identifier: Apache-2.0
"""What does not go together in a NeMo-RL config, or does and should be known: a table of rules and a few functions.

Much of it NeMo-RL refuses itself, minutes after the start, when all weights are loaded.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.drafter_configs import REMOTE_DRAFTER
from nemo_specrollout.config.model_folder import read_object
from nemo_specrollout.config.strict import ConfigError

Tree = Mapping[str, Any]
GENERATION = "policy.generation"
VLLM_CFG, VLLM_KWARGS = f"{GENERATION}.vllm_cfg", f"{GENERATION}.vllm_kwargs"
SPECULATIVE_CONFIG = f"{VLLM_KWARGS}.speculative_config"


@dataclass(frozen=True)
class Finding:
    """What is to be said about one field, or one package; `kind` is error, warning or note."""

    subject: str
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


def at(tree: Tree, path: str, default: Any = None) -> Any:
    """The value at a dotted path; `default` where it, or a block above it, is absent or null."""
    node: Any = tree
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return default if node is None else node


def size_at(tree: Tree, path: str, default: int = 1, *, low: int = 1) -> int:
    """The integer at a dotted path; `default` where there is none. Raises ConfigError for anything else, or below `low`."""
    parent = path.rpartition(".")[0]
    block, value = at(tree, parent, {}), at(tree, path)
    if not isinstance(block, Mapping):
        raise ConfigError(f"{parent}: expected a block of keys, got {block!r}")
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{path}: {value!r} is out of range; it must be a whole number, at least {low}")
    return value


def generating_gpus(tree: Tree) -> int:
    """All, where generation and training take turns on them; else those of generation alone."""
    nodes, gpus = size_at(tree, "cluster.num_nodes"), size_at(tree, "cluster.gpus_per_node")
    if at(tree, f"{GENERATION}.colocated.enabled", True):
        return nodes * gpus
    resources = f"{GENERATION}.colocated.resources"
    return size_at(tree, f"{resources}.gpus_per_node", gpus, low=0) * (
        size_at(tree, f"{resources}.num_nodes", low=0) if nodes > 1 else 1
    )


def native_drafts(tree: Tree) -> int:
    """Draft tokens a step of vLLM's own drafter; 0 if there is none, or if a zero turns it off, as in NeMo-RL."""
    config = at(tree, SPECULATIVE_CONFIG)
    is_block = isinstance(config, Mapping) and config
    return size_at(tree, f"{SPECULATIVE_CONFIG}.num_speculative_tokens", low=0) if is_block else 0


def all_findings(tree: Tree) -> Iterator[Finding]:
    """Every rule that the tree runs into, then what the functions below see."""
    yield from broken(_RULES, tree)
    for function in (_sampling, _context, _trainer_batches, _draft, _in_flight, _prompt_file):
        yield from function(tree)


@dataclass(frozen=True)
class Rule:
    """The value at `path` must not trip, `when` the rule is one for the tree; `text` says why and what to do."""

    path: str
    trips: Callable[[Any], bool]
    text: str
    kind: str = "error"
    when: Callable[[Tree], bool] = lambda tree: True


def broken(rules: Iterable[Rule], tree: Tree) -> Iterator[Finding]:
    """A finding for each of `rules` that the tree runs into."""
    for rule in rules:
        value = at(tree, rule.path)
        if rule.when(tree) and rule.trips(value):
            yield Finding(rule.path, f"{json.dumps(value, default=str)}; {rule.text}", rule.kind)


def _on(path: str) -> Callable[[Tree], bool]:
    return lambda tree: bool(at(tree, path))


def is_off(value: Any) -> bool:
    """Whether a value is false, zero, empty or absent."""
    return not value


def _is_set(value: Any) -> bool:
    return value is not None


def _placed_by_ray(on_gpu: bool) -> Callable[[Any], bool]:
    """Whether Ray places drafters, on GPUs or on CPUs."""

    def trips(drafters: Any) -> bool:
        ours = (d for d in drafters or () if isinstance(d, Mapping) and d.get("type") == REMOTE_DRAFTER)
        return any(d.get("workers") and bool(d.get("gpus")) is on_gpu for d in ours)

    return trips


def _places_itself(drafter: Any) -> bool:
    return isinstance(drafter, Mapping) and drafter.get("placement") == "auto"


ASYNC_BLOCKS = ("grpo.async_grpo", "ppo.async_ppo")


def asynchronous_block(tree: Tree) -> str | None:
    """The path of the block that has generation and training overlap in NeMo-RL's own loops; None if none is enabled."""
    return next((path for path in ASYNC_BLOCKS if at(tree, f"{path}.enabled")), None)


def stale_kv_field(tree: Tree) -> str | None:
    """The path of the field whose absence leaves running requests with KV of older weights after an update; None if none.

    The SingleController always updates weights while requests run.
    """
    block = "async_rl" if at(tree, "async_rl") is not None else asynchronous_block(tree)
    is_in_flight = block == "async_rl" or (block is not None and at(tree, f"{block}.in_flight_weight_updates"))
    field = f"{block}.recompute_kv_cache_after_weight_updates"
    return field if is_in_flight and not at(tree, field) else None


def _async(tree: Tree) -> bool:
    return asynchronous_block(tree) is not None


_draft_trained = _on("policy.draft.enabled")
_refreshed = _on(f"{BLOCK_PATH}.draft_refresh")


def _has_other_clients(tree: Tree) -> bool:
    """NeMo-Gym's requests bring seeds."""
    return not at(tree, "env.should_use_nemo_gym") and at(tree, f"{BLOCK_PATH}.http_seeds") != "required"


_NOT_ASYNC = "NeMo-RL refuses it in asynchronous training, after its set-up: set it to false"
_UNSEEDED = (
    "a request over HTTP without a seed gets one from its prompt, and from which of the engines it reaches: send `seed`, or "
    f"set {BLOCK_PATH}.http_seeds to required, which refuses the others"
)
_RULES = (
    Rule(f"{GENERATION}.backend", lambda v: v != "vllm", "specrollout works in vLLM alone: set it to vllm"),
    Rule(f"{GENERATION}.quant_cfg", _is_set, "ModelOpt's worker would stand where specrollout's must: set it to null"),
    Rule(f"{VLLM_KWARGS}.worker_cls", _is_set, "specrollout names the worker itself: remove it"),
    Rule(f"{GENERATION}.worker_extension_cls_fqn", _is_set, "NeMo-RL would take that worker and leave specrollout's out: "
          "remove it"),
    Rule(f"{VLLM_KWARGS}.async_scheduling", lambda v: v is False, "the GPU waits while the host prepares each step: 3 to 5 "
          "ms at 256 requests, an estimate by reading", "note"),
    Rule(f"{VLLM_CFG}.async_engine", is_off, "asynchronous training asks it for rows: set it to true", when=_async),
    Rule(f"{GENERATION}.colocated.enabled", bool, "asynchronous training generates on GPUs of its own: set it to false and "
          "name them in colocated.resources", when=_async),
    Rule("loss_fn.use_importance_sampling_correction", is_off, "asynchronous training has samples of an older policy: "
          "set it to true", when=_async),
    *(Rule(path, bool, _NOT_ASYNC, when=_async) for path in (
        "data.use_multiple_dataloader", *(f"{algorithm}.{name}" for algorithm in ("grpo", "ppo") for name in
                                          ("use_dynamic_sampling", "reward_scaling.enabled", "reward_shaping.enabled")))),
    Rule("policy.megatron_cfg.enabled", is_off, "a draft head is trained beside a Megatron policy alone: set it to true, "
          "or policy.draft.enabled to false", when=_draft_trained),
    Rule("policy.sequence_packing.enabled", bool, "NeMo-RL trains no draft head on packed sequences: set it to false",
          when=_draft_trained),
    Rule("policy.draft.aux_layer_indices", bool, "NeMo-RL sizes the head by it and then captures its default layers: set "
          "it to null", "warning", _draft_trained),
    Rule("policy.draft.enabled", bool, f"NeMo-RL trains a draft head of its own and puts it into the engines at each refit, "
          f"over the one that {BLOCK_PATH}.draft_refresh trains: set it to false, or remove that block", when=_refreshed),
    Rule(f"{BLOCK_PATH}.draft_refresh.trainer_gpus", bool, "GPU beside those of `cluster`: until Ray has one free, no head "
          "is trained", "note"),
    Rule(f"{BLOCK_PATH}.drafters", lambda v: any(_places_itself(d) for d in v or ()), "placement: auto: only the local "
          "runner places drafters by itself; ask `nemo-specrollout plan` and write down what it says"),
    Rule(f"{BLOCK_PATH}.drafters", _placed_by_ray(on_gpu=True), "Ray places the drafters on GPUs beside those of `cluster`: "
          "until it has them free, nothing is drafted", "note"),
    Rule(f"{BLOCK_PATH}.drafters", _placed_by_ray(on_gpu=False), "Ray places the drafters on CPU cores, which vLLM's CPU "
          "build alone can use: on a cluster with GPUs set gpus of the remote drafter", "note"),
    Rule(f"{BLOCK_PATH}.verify.requests_per_step", bool, "only the local runner decodes requests again; here it does "
          "nothing", "warning"),
    Rule("policy.router_replay.enabled", bool, "not tried with drafts: vLLM must return the experts of accepted tokens "
          "only", "warning"),
    Rule(f"{VLLM_CFG}.expose_http_server", bool, _UNSEEDED, "note", _has_other_clients),
    Rule(f"{VLLM_CFG}.precision", lambda v: v not in (None, "float32"), "tokens are equal up to near-ties, against which "
          "vLLM has vllm_cfg.env_vars.VLLM_BATCH_INVARIANT: '1'; the log-prob gap is larger than in float32", "note"),
    Rule(SPECULATIVE_CONFIG, lambda v: _is_set(v) and not isinstance(v, Mapping), "expected a block of keys"),
)  # fmt: skip


def _sampling(tree: Tree) -> Iterator[Finding]:
    """NeMo-RL trains at the sampling temperature, on what top-p and top-k leave (distributed/model_utils.py:848)."""
    path = f"{GENERATION}.temperature"
    temperature = at(tree, path, 1.0)
    if not isinstance(temperature, int | float) or isinstance(temperature, bool) or not 0 < temperature <= 2:
        yield Finding(
            path, f"{temperature!r}; vLLM samples at 0 to 2, and NeMo-RL's trainer divides by it: set 1.0", "error"
        )
        return
    altered = [
        f"{name} {value}"
        for name, value, off in (("temperature", temperature, (1,)), *_filters(tree))
        if value not in off
    ]
    mode = at(tree, f"{VLLM_CFG}.logprobs_mode")
    if altered and mode != "processed_logprobs":
        text = (
            f"{mode or 'null'} with {' and '.join(altered)}; the engine's log-probs are not those of NeMo-RL's trainer"
        )
        yield Finding(f"{VLLM_CFG}.logprobs_mode", f"{text}: set it to processed_logprobs", "warning")


def _filters(tree: Tree) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name and value of each filter, and the values at which it is off."""
    yield "top_p", at(tree, f"{GENERATION}.top_p", 1.0), (1,)
    yield "top_k", at(tree, f"{GENERATION}.top_k", -1), (-1,)


def _context(tree: Tree) -> Iterator[Finding]:
    engine, trainer = at(tree, f"{VLLM_CFG}.max_model_len"), at(tree, "policy.max_total_sequence_length")
    if engine != trainer:
        text = f"{engine} differs from policy.max_total_sequence_length {trainer}; set both to the same"
        yield Finding(f"{VLLM_CFG}.max_model_len", text, "warning")
    num_drafts = native_drafts(tree)
    if num_drafts:
        text = (
            f"NeMo-RL ends every request {num_drafts + 1} tokens before max_model_len, which it does not do without it"
        )
        yield Finding(SPECULATIVE_CONFIG, text, "note")


def _trainer_batches(tree: Tree) -> Iterator[Finding]:
    """lm_policy.py:210, whose assertion comes when the policy is built."""
    megatron = "megatron_cfg.tensor_model_parallel_size" if at(tree, "policy.megatron_cfg.enabled") else None
    ranks = size_at(tree, f"policy.{megatron or 'dtensor_cfg.tensor_parallel_size'}")
    train, logprob = at(tree, "policy.train_micro_batch_size"), at(tree, "policy.logprob_batch_size")
    if ranks >= 4 and logprob not in {None, train} and not at(tree, "loss_fn.force_on_policy_ratio"):
        text = f"{logprob} differs from train_micro_batch_size {train}; NeMo-RL refuses that at tensor parallel {ranks}"
        yield Finding("policy.logprob_batch_size", f"{text}, unless NRL_IGNORE_TP_ACCURACY_CHECK=1 is set", "warning")


def _draft(tree: Tree) -> Iterator[Finding]:
    if not _draft_trained(tree):
        return
    method = at(tree, f"{SPECULATIVE_CONFIG}.method")
    if not native_drafts(tree) or method not in {"eagle", "eagle3"}:
        text = f"a head is trained, but no engine drafts with it: set {SPECULATIVE_CONFIG} with method eagle3"
        yield Finding("policy.draft.enabled", f"{text}, or policy.draft.enabled to false", "warning")
    model = model_config(tree)
    num_layers = None if model is None else model.get("num_hidden_layers")
    if isinstance(num_layers, int) and len(_captured_layers(num_layers)) < 3:
        text = (
            f"of a policy of {num_layers} layers NeMo-RL captures the states of layers {_captured_layers(num_layers)}"
        )
        yield Finding("policy.draft.enabled", f"{text} for the head, not of three; take a deeper policy", "warning")


def _captured_layers(num_layers: int) -> list[int]:
    """NeMo-RL's choice (models/megatron/draft/hidden_capture.py:28), which no option changes."""
    return sorted({1, max(0, num_layers // 2 - 1), max(1, num_layers - 4)})


def model_config(tree: Tree) -> dict[str, Any] | None:
    """`config.json` of the policy if it is a folder here; None if it is a name on the Hugging Face Hub, or unreadable."""
    try:
        return read_object(Path(str(at(tree, "policy.model_name", ""))) / "config.json")
    except ValueError:
        return None


def _in_flight(tree: Tree) -> Iterator[Finding]:
    path = asynchronous_block(tree)
    block = {} if path is None else at(tree, path)
    if at(block, "in_flight_weight_updates") and not at(block, "recompute_kv_cache_after_weight_updates"):
        text = (
            "true; requests under way keep KV of older weights, unless recompute_kv_cache_after_weight_updates is true"
        )
        yield Finding(f"{path}.in_flight_weight_updates", f"{text}. That is NeMo-RL's own choice", "note")


def _prompt_file(tree: Tree) -> Iterator[Finding]:
    name = at(tree, "data.default.prompt_file")
    if name is not None and not Path(str(name)).is_file():
        text = f"{name} is not here; NeMo-RL looks for it in the folder in which the run is started"
        yield Finding("data.default.prompt_file", text, "note")
