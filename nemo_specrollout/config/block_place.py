# SPDX-License-Identifier: Apache-2.0
"""Finds the block `specrollout`, or parts of it, at places of a config where nothing reads them."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.nemo_rl_tree import Finding, Tree, at, block_is_on
from nemo_specrollout.config.strict import join

Keys = tuple[str, ...]
"""The keys from the top of a config to a value."""
_PLACE = tuple(BLOCK_PATH.split("."))
_NAME = _PLACE[-1]
_ALIKE = 0.85
"""Similarity by `difflib` from which on a key, such as `specrolout`, counts as a misspelling of `specrollout`."""
_LONG_NAME = re.compile(r"spec[a-z]*roll")
"""Pattern for longer forms of the name `specrollout`, such as `speculative_rollout` and `nemo_specrollout`."""
_COMMON_KEYS = {"enabled", "num_speculative_tokens", "budget", "verify"}
"""Keys of the block `specrollout` that other blocks of a config may also have."""
_OWN_KEYS = {field.name for field in dataclasses.fields(SpecrolloutConfig)} - _COMMON_KEYS
_SWITCHES = {field.name for field in dataclasses.fields(SpecrolloutConfig) if field.default is None}
"""Keys of the block `specrollout` whose feature is off if the key has no value."""


def place_findings(tree: Tree) -> Iterator[Finding]:
    """Yields a finding for each place where the block `specrollout`, or a part of it, is misspelt, misplaced or has no value.

    `tree` is the config after its `defaults` and the overrides of the command line were merged into it.
    """
    generation = at(tree, ".".join(_PLACE[:-1]), {})
    if isinstance(generation, Mapping) and _NAME in generation and generation[_NAME] is None:
        text = "null; a block without a value is off: write `enabled: true` into it, or remove the key"
        yield Finding(BLOCK_PATH, text, "warning")
    yield from _parts_without_value(at(tree, BLOCK_PATH))
    for path, keys in _misplaced(tree):
        yield _misplacement(path, keys[-1], is_on=block_is_on(tree))


def _parts_without_value(block: Any) -> Iterator[Finding]:
    names = (
        [key for key, value in block.items() if value is None and key in _SWITCHES]
        if isinstance(block, Mapping)
        else []
    )
    if names:
        text = f"{' and '.join(names)} without a value, which is off; `{{}}` turns it on with its defaults"
        yield Finding(BLOCK_PATH, text, "note")


def _misplaced(node: Any, path: str = "", keys: Keys = ()) -> Iterator[tuple[str, Keys]]:
    """Yields the place of each key below `node` that looks like the block `specrollout` or a part of it, but is misplaced.

    A place is a pair of a path in dotted form and the same path as a tuple of keys. `path` and `keys` are the place of `node`.
    """
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _misplaced(item, f"{path}[{index}]", (*keys, str(index)))
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        below = (*keys, str(key))
        if below == _PLACE:
            continue  # `build` checks the keys of the block itself
        if _is_name(str(key)) or str(key) in _OWN_KEYS:
            yield join(path, key), below
        else:
            yield from _misplaced(value, join(path, key), below)


def _is_name(key: str) -> bool:
    """Tells whether a key, or a part of it between dots, is the name `specrollout` or a misspelling of it."""
    for part in key.split("."):
        letters = re.sub("[^a-z]", "", part.lower())
        is_alike = letters[:1] == "s" and difflib.SequenceMatcher(None, letters, _NAME).ratio() >= _ALIKE
        if is_alike or _LONG_NAME.search(letters):
            return True
    return False


def _misplacement(path: str, key: str, *, is_on: bool) -> Finding:
    place = join(BLOCK_PATH, key) if key in _OWN_KEYS else BLOCK_PATH
    if is_on:
        effect = f"; the block in effect is {BLOCK_PATH}: move there what is meant, and remove this"
    else:
        effect = f", and specrollout is off; it belongs at {place}"
    if "." in key and not is_on:
        effect += ", each name on a line of its own, because a key of a file with dots is one name"
    return Finding(path, f"nothing reads it there{effect}", "warning")
