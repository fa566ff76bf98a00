# SPDX-License-Identifier: Apache-2.0
"""Reads values from a config of NeMo-RL, and checks rules about them. It does not import NeMo-RL.

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
"""Folder of NeMo-RL's checkout in NeMo-RL's container."""
GENERATION = "policy.generation"
VLLM_CFG = f"{GENERATION}.vllm_cfg"
VLLM_KWARGS = f"{GENERATION}.vllm_kwargs"
SPECULATIVE_CONFIG = f"{VLLM_KWARGS}.speculative_config"
ASYNC_BLOCKS = ("grpo.async_grpo", "ppo.async_ppo")
"""Paths of the blocks that make NeMo-RL's own training loops asynchronous, so that generation and training overlap."""


def at(tree: Tree, path: str, default: Any = None) -> Any:
    """Returns the value at a dotted path, or `default` if the value or a block above it is absent or null."""
    node: Any = tree
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return default if node is None else node


def strings_at(tree: Tree, keys: Collection[str], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields the path and the value of each string under one of `keys`, in any block of `tree` and in lists of blocks.

    Each path begins with `above`.
    """
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
    """Returns the integer at a dotted path, or `default` if it is absent or null.

    Raises ConfigError if the value is not an integer, or if it is below `low`.
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
    """Returns the tensor, pipeline and expert parallel size of an engine, in this order."""
    tensor, pipeline, expert = (
        size_at(tree, f"{VLLM_CFG}.{kind}_parallel_size") for kind in ("tensor", "pipeline", "expert")
    )
    return tensor, pipeline, expert


def generating_gpus(tree: Tree) -> int:
    """Returns the number of GPUs that generate, on all nodes together.

    These are all GPUs if generation is colocated with training, and otherwise the GPUs that only generation has.
    """
    nodes = size_at(tree, "cluster.num_nodes")
    gpus = size_at(tree, "cluster.gpus_per_node")
    if at(tree, f"{GENERATION}.colocated.enabled", True):
        return nodes * gpus
    resources = f"{GENERATION}.colocated.resources"
    own_nodes = size_at(tree, f"{resources}.num_nodes", low=0) if nodes > 1 else 1
    return size_at(tree, f"{resources}.gpus_per_node", gpus, low=0) * own_nodes


def num_engines(tree: Tree) -> int:
    """Returns the number of engines that the run of a config has."""
    tensor, pipeline, _ = parallel_sizes(tree)
    return generating_gpus(tree) // (tensor * pipeline)


def block_is_on(tree: Tree) -> bool:
    """Tells whether a config has the block `specrollout`, and does not switch it off."""
    return at(tree, BLOCK_PATH) is not None and at(tree, f"{BLOCK_PATH}.enabled", True) is not False


def native_drafts(tree: Tree) -> int:
    """Returns the number of draft tokens per request and engine step in vLLM's `speculative_config`.

    Returns 0 if the config has no `speculative_config`, or one with `num_speculative_tokens: 0`, with which NeMo-RL drafts
    nothing.
    """
    config = at(tree, SPECULATIVE_CONFIG)
    is_block = isinstance(config, Mapping) and config
    return size_at(tree, f"{SPECULATIVE_CONFIG}.num_speculative_tokens", low=0) if is_block else 0


def drafter_types(tree: Tree) -> list[str]:
    """Returns the types of the drafters that a run of the config has.

    If vLLM's `speculative_config` is set, the list has only the method that it names. Otherwise it has the types of the
    drafters in the block `specrollout`, or of the block's default drafters. It is empty if the block is off.
    """
    if native_drafts(tree):
        return [str(at(tree, f"{SPECULATIVE_CONFIG}.method"))]
    if not block_is_on(tree):
        return []
    if at(tree, f"{BLOCK_PATH}.drafters") is None:
        return [d.type for d in SpecrolloutConfig().drafters]
    return [str(d.get("type")) for d in named_drafters(tree)]


def named_drafters(tree: Tree) -> list[Mapping[str, Any]]:
    """Returns the entries of the list `drafters` in the block `specrollout`. Empty if there is no such list."""
    drafters = at(tree, f"{BLOCK_PATH}.drafters", [])
    return [d for d in drafters if isinstance(d, Mapping)] if isinstance(drafters, list | tuple) else []


def asynchronous_block(tree: Tree) -> str | None:
    """Returns the path of the block that makes NeMo-RL's training loop asynchronous, or None if none is enabled."""
    return next((path for path in ASYNC_BLOCKS if at(tree, f"{path}.enabled")), None)


def stale_kv_field(tree: Tree) -> str | None:
    """Returns the field that must be set to true so that running requests get a new KV cache when the weights change.

    Until it is true, they keep the KV cache of the older weights. The result is the path of the field. It is None if the field
    is already true, or if weights never change while requests run.
    """
    block = "async_rl" if at(tree, "async_rl") is not None else asynchronous_block(tree)
    is_in_flight = block == "async_rl" or (block is not None and at(tree, f"{block}.in_flight_weight_updates"))
    field = f"{block}.recompute_kv_cache_after_weight_updates"
    return field if is_in_flight and not at(tree, field) else None


def nemo_rl_checkout() -> Path | None:
    """Returns the folder of the NeMo-RL checkout that a run on this machine uses, or None if there is none.

    It is the checkout from which this Python imports NeMo-RL. If this Python has no NeMo-RL, it is the folder that the
    environment variable `NEMO_RL_DIR` names, or the checkout of NeMo-RL's container.
    """
    if (importable := installed_source("nemo_rl")) is not None:
        return importable
    named = Path(os.environ.get(NEMO_RL_DIR) or DEFAULT_NEMO_RL_DIR)
    return named if named.is_dir() else None


def model_config(tree: Tree) -> dict[str, Any] | None:
    """Returns the content of the policy's `config.json`, or None if it cannot be read or the policy has no folder here."""
    try:
        return read_object(Path(str(at(tree, "policy.model_name", ""))) / "config.json")
    except ValueError:
        return None


@dataclass(frozen=True)
class Finding:
    """An error, a warning or a note about one field of a config or about one package."""

    subject: str
    """Path of the field in the config, or name of the package."""
    text: str
    kind: str
    """The kind of finding, which is `error`, `warning` or `note`."""

    @classmethod
    def error(cls, sentence: object, prefix: str = "") -> Self:
        """Returns an error finding from a text of the form `subject: text`, or from an exception with such a message.

        `prefix` is put before the subject.
        """
        subject, _, text = str(sentence).partition(": ")
        return cls(prefix + subject, text, "error")

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


@dataclass(frozen=True)
class Rule:
    """A rule about the value at one path of a config."""

    path: str
    trips: Callable[[Any], object]
    """Function that tells whether a value breaks the rule. It gets None if the path is absent."""
    text: str
    kind: str = "error"
    when: Callable[[Tree], object] = lambda tree: True
    """Function that tells whether the rule applies to a config."""


def broken(rules: Iterable[Rule], tree: Tree) -> Iterator[Finding]:
    """Yields a finding for each of `rules` that the config `tree` breaks."""
    for rule in rules:
        value = at(tree, rule.path)
        if rule.when(tree) and rule.trips(value):
            yield Finding(rule.path, f"{json.dumps(value, default=str)}; {rule.text}", rule.kind)


def findings(*found: tuple[object, str, str, str]) -> Iterator[Finding]:
    """Yields a finding for each tuple (condition, subject, text, kind) whose condition is true."""
    yield from (Finding(subject, text, kind) for holds, subject, text, kind in found if holds)


def is_on(path: str) -> Callable[[Tree], bool]:
    """Returns a function that tells whether the value at `path` of a config is truthy."""
    return lambda tree: bool(at(tree, path))


def is_set(value: Any) -> bool:
    """Tells whether a value of a config is neither absent nor null."""
    return value is not None


RUNTIMES = ("local", "nemo_rl")


def runtime_of(tree: Tree) -> str:
    """Returns the runtime that a config is for: `nemo_rl`, or `local` for runs of the laboratory (`lab`) without NeMo-RL.

    The config's key `runtime` names it. Without this key, a config with `cluster.gpus_per_node` is for NeMo-RL, because only
    NeMo-RL's configs have that key. Raises ConfigError if `runtime` has another value.
    """
    runtime = tree.get("runtime", "nemo_rl" if at(tree, "cluster.gpus_per_node") else "local")
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime: {runtime!r} is not available{nearest(str(runtime), RUNTIMES)}")
    return str(runtime)
