# SPDX-License-Identifier: Apache-2.0
"""Rules about values of NeMo-RL configs that NeMo-RL or vLLM refuses only when it starts: sampling, sizes, GPUs.

Also the findings about names: keys that a config lacks, and folders of draft heads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.load import new_keys
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
    findings,
    generating_gpus,
    native_drafts,
    parallel_sizes,
    size_at,
)
from nemo_specrollout.config.strict import nearest


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _no_size(low: int, *others: int) -> Callable[[Any], bool]:
    """Returns a function that tells whether a value is set, but is no whole number from `low` on and none of `others`."""

    def trips(value: Any) -> bool:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return value is not None and not (is_whole and (value >= low or value in others))

    return trips


def _no_steps(value: Any) -> bool:
    """Returns whether a value is set, but is no whole number from 0 on. NeMo-RL also takes 1e6."""
    return value is not None and not (_is_number(value) and value >= 0 and value % 1 == 0)


def _no_share(value: Any) -> bool:
    """Returns whether a value is set, but is no number above 0 and up to 1."""
    return value is not None and not (_is_number(value) and 0 < value <= 1)


_PRECISIONS = ("auto", "half", "float16", "bfloat16", "float", "float32", "fp8")
"""vLLM's names of number formats, and `fp8`, which NeMo-RL replaces by a quantization of its own (vllm_worker.py:478)."""
_AT_LEAST_1 = "it must be a whole number, at least 1"
_OF_A_RUN = (
    Rule("policy.model_name", lambda v: not (isinstance(v, str) and v), "name the policy: a folder, or a model of the Hub"),
    *(Rule(f"policy.{name}", _no_size(1), _AT_LEAST_1) for name in (
        "max_total_sequence_length", "train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")),
    *(Rule(f"{algorithm}.{name}", _no_size(1), _AT_LEAST_1) for algorithm in ("grpo", "ppo", "distillation") for name in (
        "num_prompts_per_step", "num_generations_per_prompt")),
    *(Rule(f"{algorithm}.max_num_steps", _no_steps, "write a whole number, at least 0; a negative one trains no step")
      for algorithm in ("grpo", "ppo", "distillation")),
)  # fmt: skip
"""Rules that hold whatever engine generates."""
_OF_VLLM = (
    Rule(VLLM_CFG, lambda v: not v, "NeMo-RL needs it for vLLM: inherit one of NeMo-RL's configs, or write the block"),
    Rule(f"{GENERATION}.top_p", _no_share, "it must be above 0 and at most 1; 1.0 turns it off"),
    Rule(f"{GENERATION}.top_k", _no_size(1, -1), "it must be a whole number, at least 1; null or -1 turns it off"),
    Rule(f"{GENERATION}.max_new_tokens", _no_size(1), _AT_LEAST_1),
    Rule(f"{VLLM_CFG}.max_model_len", _no_size(1, -1), _AT_LEAST_1),
    Rule(f"{VLLM_CFG}.gpu_memory_utilization", _no_share, "it is vLLM's share of the GPU's memory: above 0, at most 1"),
    Rule(f"{VLLM_CFG}.precision", lambda v: v is not None and v not in _PRECISIONS, f"use one of {', '.join(_PRECISIONS)}"),
)  # fmt: skip


def run_values(tree: Tree) -> Iterator[Finding]:
    """Yields the errors about values that hold whatever engine generates."""
    yield from broken(_OF_A_RUN, tree)


def engine_values(tree: Tree) -> Iterator[Finding]:
    """Yields the findings about vLLM's values, about the GPUs of its engines, and about folders of draft heads."""
    yield from broken(_OF_VLLM, tree)
    yield from _gpus(tree)
    yield from _missing_folders(tree)


def _gpus(tree: Tree) -> Iterator[Finding]:
    """Yields the errors about GPUs that cannot be dealt out (NeMo-RL: grpo.py:811, vllm_generation.py:121)."""
    tensor, pipeline, expert = parallel_sizes(tree)
    if expert > tensor and expert % tensor == 0 and at(tree, f"{VLLM_CFG}.async_engine"):
        text = f"{expert} with tensor_parallel_size {tensor}; NeMo-RL refuses different sizes with async_engine: true"
        yield Finding(f"{VLLM_CFG}.expert_parallel_size", f"{text}: set both alike, or async_engine to false", "error")
    if at(tree, "cluster") is None or _has_other_models(tree):
        return
    if not at(tree, f"{GENERATION}.colocated.enabled", True) and (wrong := list(_own_gpus(tree))):
        yield from wrong
        return
    gpus, of_engine = generating_gpus(tree), tensor * pipeline
    if gpus % of_engine:
        name, stages = "tensor_parallel_size", f" with pipeline_parallel_size {pipeline}" if pipeline > 1 else ""
        text = f"{tensor}{stages}; {gpus} GPUs generate, which engines of {of_engine} do not use up: choose a divisor"
        yield Finding(f"{VLLM_CFG}.{name}", text, "error")


def _own_gpus(tree: Tree) -> Iterator[Finding]:
    """Yields the errors about the GPUs that generate apart from training."""
    resources = f"{GENERATION}.colocated.resources"
    nodes, gpus = size_at(tree, "cluster.num_nodes"), size_at(tree, "cluster.gpus_per_node")
    is_controlled = at(tree, "async_rl") is not None
    own_gpus = size_at(tree, f"{resources}.gpus_per_node", 0, low=0)
    own_nodes = size_at(tree, f"{resources}.num_nodes", 1 if nodes == 1 or is_controlled else 0, low=0)
    shown = [at(tree, f"{resources}.{name}", "null") for name in ("gpus_per_node", "num_nodes")]
    is_one = nodes == 1
    yield from findings(
        (is_one and not 0 < own_gpus < gpus, f"{resources}.gpus_per_node",
         f"{shown[0]}; generation and training share {gpus} GPUs: set it to at least 1 and below {gpus}", "error"),
        (is_one and own_nodes != 1, f"{resources}.num_nodes", f"{shown[1]}; there is one node: set it to null", "error"),
        (not is_one and not 0 < own_nodes < nodes, f"{resources}.num_nodes",
         f"{shown[1]}; the rest of the {nodes} nodes trains: set it to at least 1 and below {nodes}", "error"),
        (not is_one and not (own_gpus == gpus or (is_controlled and 0 < own_gpus < gpus)), f"{resources}.gpus_per_node",
         f"{shown[0]}; whole nodes generate: set it to {gpus}, as in `cluster`", "error"),
    )  # fmt: skip


def _has_other_models(tree: Tree) -> bool:
    """Returns whether a reward model or teachers take GPUs too. NeMo-RL then deals the GPUs out in another way."""
    data = [at(tree, f"data.{name}") for name in ("train", "validation", "default")]
    blocks = [block for entry in data for block in (entry if isinstance(entry, list) else [entry])]
    has_reward_model = any(isinstance(b, Mapping) and b.get("env_name") == "reward_model" for b in blocks)
    teachers = at(tree, "on_policy_distillation")
    return has_reward_model or (isinstance(teachers, Mapping) and bool(teachers.get("enabled")))


def _missing_folders(tree: Tree) -> Iterator[Finding]:
    """Yields a note about each drafter whose weights are named by a path that is no folder here."""
    drafters = at(tree, f"{BLOCK_PATH}.drafters", [])
    listed = [d for d in drafters if isinstance(d, Mapping)] if isinstance(drafters, list | tuple) else []
    named = [(f"{BLOCK_PATH}.drafters", drafter.get("model")) for drafter in listed]
    if native_drafts(tree):
        named.append((f"{SPECULATIVE_CONFIG}.model", at(tree, f"{SPECULATIVE_CONFIG}.model")))
    for path, name in named:
        if isinstance(name, str) and name.startswith(("/", "./", "../")) and not Path(name).is_dir():
            yield Finding(path, f"{name} is not a folder here; each engine looks for it on its own machine", "note")


_FREE = (BLOCK_PATH, VLLM_KWARGS, "env", "runtime")
"""Blocks and keys that NeMo-RL's configs need not have. specrollout checks the keys of its own block itself."""
_FREE_ENDINGS = ("env_vars", "kwargs", "overrides")
"""Endings of the names of blocks that take any key."""


def unknown_overrides(path: Path, overrides: Sequence[str]) -> Iterator[Finding]:
    """Yields a finding about each override without `+` whose key the config at `path` lacks; `overrides` are valid.

    A key that resembles a known one is warned of. Any other may be an option that NeMo-RL's configs leave out.
    """
    if all(_is_free(override) for override in overrides):
        return
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
