# SPDX-License-Identifier: Apache-2.0
"""Reads values of a config with NeMo-RL's keys, and evaluates tables of rules about them. NeMo-RL is not imported.

A tree is the content of a config as nested mappings and lists.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.strict import ConfigError, nearest
from nemo_specrollout.installed.python_source import installed_source
from nemo_specrollout.storage.model_folder import read_object

Tree = Mapping[str, Any]
DEFAULT_NEMO_RL_DIR = "/opt/nemo-rl"
"""NeMo-RL's checkout in its container."""
GENERATION = "policy.generation"
VLLM_CFG = f"{GENERATION}.vllm_cfg"
VLLM_KWARGS = f"{GENERATION}.vllm_kwargs"
SPECULATIVE_CONFIG = f"{VLLM_KWARGS}.speculative_config"
ASYNC_BLOCKS = ("grpo.async_grpo", "ppo.async_ppo")
"""Blocks that let generation and training overlap in NeMo-RL's own loops."""


def at(tree: Tree, path: str, default: Any = None) -> Any:
    """Returns the value at a dotted path; `default` if the value or a block above it is absent or null."""
    node: Any = tree
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return default if node is None else node


def strings_at(tree: Tree, keys: Collection[str], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields path and value of each string under one of `keys`, in any block of `tree`, also in lists of blocks."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from strings_at(value, keys, f"{above}{name}.")
        elif isinstance(value, list):
            for i, block in enumerate(value):
                if isinstance(block, Mapping):
                    yield from strings_at(block, keys, f"{above}{name}[{i}].")
        elif name in keys and isinstance(value, str):
            yield f"{above}{name}", value


def size_at(tree: Tree, path: str, default: int = 1, *, low: int = 1) -> int:
    """Returns the integer at a dotted path; `default` if it is absent or null.

    Raises ConfigError if the value is not an integer, or is below `low`.
    """
    parent = path.rpartition(".")[0]
    block = at(tree, parent, {})
    value = at(tree, path)
    if not isinstance(block, Mapping):
        raise ConfigError(f"{parent}: expected a block of keys, got {block!r}")
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{path}: {value!r} is out of range; it must be a whole number, at least {low}")
    return value


def parallel_sizes(tree: Tree) -> tuple[int, int, int]:
    """Returns the tensor, pipeline and expert parallel sizes of an engine."""
    tensor, pipeline, expert = (
        size_at(tree, f"{VLLM_CFG}.{kind}_parallel_size") for kind in ("tensor", "pipeline", "expert")
    )
    return tensor, pipeline, expert


def generating_gpus(tree: Tree) -> int:
    """Returns the number of GPUs that generate: all if generation is colocated with training, else its own."""
    nodes = size_at(tree, "cluster.num_nodes")
    gpus = size_at(tree, "cluster.gpus_per_node")
    if at(tree, f"{GENERATION}.colocated.enabled", True):
        return nodes * gpus
    resources = f"{GENERATION}.colocated.resources"
    own_nodes = size_at(tree, f"{resources}.num_nodes", low=0) if nodes > 1 else 1
    return size_at(tree, f"{resources}.gpus_per_node", gpus, low=0) * own_nodes


def num_engines(tree: Tree) -> int:
    """Returns the number of engines of the run."""
    tensor, pipeline, _ = parallel_sizes(tree)
    return generating_gpus(tree) // (tensor * pipeline)


def block_is_on(tree: Tree) -> bool:
    """Returns whether there is a block `specrollout` that is not switched off."""
    return at(tree, BLOCK_PATH) is not None and at(tree, f"{BLOCK_PATH}.enabled", True) is not False


def native_drafts(tree: Tree) -> int:
    """Returns the draft tokens per request and engine step of vLLM's `speculative_config`; 0 if that is absent or off.

    As in NeMo-RL, `num_speculative_tokens: 0` turns it off.
    """
    config = at(tree, SPECULATIVE_CONFIG)
    is_block = isinstance(config, Mapping) and config
    return size_at(tree, f"{SPECULATIVE_CONFIG}.num_speculative_tokens", low=0) if is_block else 0


def drafter_types(tree: Tree) -> list[str]:
    """Returns the types of the drafters in effect: vLLM's own, else the block's, else the block's defaults."""
    if native_drafts(tree):
        return [str(at(tree, f"{SPECULATIVE_CONFIG}.method"))]
    if not block_is_on(tree):
        return []
    if at(tree, f"{BLOCK_PATH}.drafters") is None:
        return [d.type for d in SpecrolloutConfig().drafters]
    return [str(d.get("type")) for d in named_drafters(tree)]


def named_drafters(tree: Tree) -> list[Mapping[str, Any]]:
    """Returns the blocks in the list `drafters`."""
    drafters = at(tree, f"{BLOCK_PATH}.drafters", [])
    return [d for d in drafters if isinstance(d, Mapping)] if isinstance(drafters, list | tuple) else []


def asynchronous_block(tree: Tree) -> str | None:
    """Returns the path of the enabled block among `ASYNC_BLOCKS`, if there is one."""
    return next((path for path in ASYNC_BLOCKS if at(tree, f"{path}.enabled")), None)


def stale_kv_field(tree: Tree) -> str | None:
    """Returns the path of the field that must be true for running requests to drop the KV cache of older weights.

    Returns None if the field is true, or if weights do not change while requests run.
    """
    block = "async_rl" if at(tree, "async_rl") is not None else asynchronous_block(tree)
    is_in_flight = block == "async_rl" or (block is not None and at(tree, f"{block}.in_flight_weight_updates"))
    field = f"{block}.recompute_kv_cache_after_weight_updates"
    return field if is_in_flight and not at(tree, field) else None


def nemo_rl_checkout() -> Path | None:
    """Returns the checkout of NeMo-RL that a run on this machine uses; None if it is not found.

    It is the one from which this Python imports NeMo-RL, or else the folder that the variable `NEMO_RL_DIR` names, or else the
    checkout of NeMo-RL's container.
    """
    if (importable := installed_source("nemo_rl")) is not None:
        return importable
    named = Path(os.environ.get(NEMO_RL_DIR) or DEFAULT_NEMO_RL_DIR)
    return named if named.is_dir() else None


def model_config(tree: Tree) -> dict[str, Any] | None:
    """Returns `config.json` of the policy's folder; None if it is unreadable, or the policy is a name on the Hub."""
    try:
        return read_object(Path(str(at(tree, "policy.model_name", ""))) / "config.json")
    except ValueError:
        return None


@dataclass(frozen=True)
class Finding:
    """An error, a warning or a note about one field or one package."""

    subject: str
    """Path of the field, or name of the package."""
    text: str
    kind: str
    """`error`, `warning` or `note`."""

    @classmethod
    def error(cls, sentence: object, prefix: str = "") -> Self:
        """Returns an error made of a sentence `subject: text`, or of an exception with such a message.

        `prefix` is put before the subject.
        """
        subject, _, text = str(sentence).partition(": ")
        return cls(prefix + subject, text, "error")

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


@dataclass(frozen=True)
class Rule:
    """A rule about the value at one path."""

    path: str
    trips: Callable[[Any], object]
    """Tells whether a value breaks the rule; the value is None if the path is absent."""
    text: str
    kind: str = "error"
    when: Callable[[Tree], object] = lambda tree: True
    """Tells whether the rule applies to a tree."""


def broken(rules: Iterable[Rule], tree: Tree) -> Iterator[Finding]:
    """Yields a finding for each of `rules` that the tree breaks."""
    for rule in rules:
        value = at(tree, rule.path)
        if rule.when(tree) and rule.trips(value):
            yield Finding(rule.path, f"{json.dumps(value, default=str)}; {rule.text}", rule.kind)


def findings(*found: tuple[object, str, str, str]) -> Iterator[Finding]:
    """Yields a finding for each tuple (does it hold, subject, text, kind) whose first entry is true."""
    yield from (Finding(subject, text, kind) for holds, subject, text, kind in found if holds)


def is_on(path: str) -> Callable[[Tree], bool]:
    """Returns a function that tells whether the value at `path` of a tree is true, or not empty."""
    return lambda tree: bool(at(tree, path))


def is_set(value: Any) -> bool:
    """Returns whether a value is neither absent nor null."""
    return value is not None


RUNTIMES = ("local", "nemo_rl")


def runtime_of(tree: Tree) -> str:
    """Returns the runtime that a config is for, `local` or `nemo_rl`.

    The key `runtime` names it. Without that key, a config with `cluster.gpus_per_node` is for NeMo-RL, because only NeMo-RL's
    configs have it. Raises ConfigError for another value of `runtime`.
    """
    runtime = tree.get("runtime", "nemo_rl" if at(tree, "cluster.gpus_per_node") else "local")
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime: {runtime!r} is not available{nearest(str(runtime), RUNTIMES)}")
    return str(runtime)
