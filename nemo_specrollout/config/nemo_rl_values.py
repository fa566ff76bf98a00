# SPDX-License-Identifier: Apache-2.0
"""Values of NeMo-RL configs that vLLM refuses late, keys that a config lacks, and folders of draft heads."""

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
    native_drafts,
)
from nemo_specrollout.config.strict import nearest
from nemo_specrollout.storage.model_folder import check_model


def _no_size(low: int, *others: int) -> Callable[[Any], bool]:
    """Returns a function that tells whether a value is set, and is neither a whole number from `low` on nor in `others`."""

    def trips(value: Any) -> bool:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return value is not None and not (is_whole and (value >= low or value in others))

    return trips


def _no_share(value: Any) -> bool:
    """Returns whether a value is set, and is not a number above 0 and up to 1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is not None and not (is_number and 0 < value <= 1)


_RULES = (
    Rule("policy.model_name", lambda v: not (isinstance(v, str) and v), "name the policy: a folder, or a model of the Hub"),
    Rule(VLLM_CFG, lambda v: not v, "NeMo-RL needs it for vLLM: inherit one of NeMo-RL's configs, or write the block"),
    Rule(f"{GENERATION}.top_p", _no_share, "it must be above 0 and at most 1; 1.0 turns it off"),
    Rule(f"{GENERATION}.top_k", _no_size(1, -1), "it must be a whole number, at least 1; null or -1 turns it off"),
    Rule(f"{GENERATION}.max_new_tokens", _no_size(1), "it must be a whole number, at least 1"),
)  # fmt: skip
"""vLLM refuses these sampling parameters with the first request, after all models are loaded."""


def engine_values(tree: Tree) -> Iterator[Finding]:
    """Yields the errors about values that vLLM refuses late, and the findings about folders of models."""
    yield from broken(_RULES, tree)
    yield from _folders(tree)


def _folders(tree: Tree) -> Iterator[Finding]:
    """Yields an error about each model in a folder here that cannot be loaded, and a note about each folder elsewhere."""
    drafters = at(tree, f"{BLOCK_PATH}.drafters", [])
    listed = [d for d in drafters if isinstance(d, Mapping)] if isinstance(drafters, list | tuple) else []
    policy, native = str(at(tree, "policy.model_name")), at(tree, SPECULATIVE_CONFIG) if native_drafts(tree) else {}
    named = [("policy.model_name", policy, ""), (f"{SPECULATIVE_CONFIG}.model", *map(native.get, ("model", "method")))]
    named += [(f"{BLOCK_PATH}.drafters", d.get("model"), d.get("type")) for d in listed]
    for path, name, kind in named:
        if isinstance(name, str) and name and Path(name).is_dir():
            try:
                check_model(Path(name), Path(policy), str(kind))
            except ValueError as error:
                yield Finding(path, str(error), "error")
        elif isinstance(name, str) and name.startswith(("/", "./", "../")):
            yield Finding(path, f"{name} is not a folder here; each engine looks for it on its own machine", "note")


_FREE = (BLOCK_PATH, VLLM_KWARGS, "env", "runtime")
"""Blocks and keys that NeMo-RL's configs need not have. specrollout checks the keys of its own block itself."""
_FREE_ENDINGS = ("env_vars", "kwargs", "overrides")
"""Endings of the names of blocks that take any key."""


def unknown_overrides(path: Path, overrides: Sequence[str]) -> Iterator[Finding]:
    """Yields a warning of each override that misspells a key of the config at `path`, and a note of any other new key."""
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
