# SPDX-License-Identifier: Apache-2.0
"""Branches of a text that was made ahead, and their form as bytes in a request. vLLM is not imported.

A text made ahead was sampled by older weights for a request of a coming step. A branch is an alternative to the rest of it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

TOKEN_BYTES = 4
"""Bytes of a token in a text that was made ahead."""
_HEAD = 3
"""How many numbers come before a branch's tokens. They are its parent, its position, and its number of tokens."""


class AheadBranch(NamedTuple):
    """A text that differs from its parent from a position on. The tokens before that position are the parent's."""

    parent: int
    """Number of the path that it leaves, which is 0 for the text itself and i + 1 for the branch of index i."""
    position: int
    """Index of its first own token in the response."""
    text: bytes
    """Its own tokens, as int32 numbers."""


def pack(branches: Iterable[AheadBranch]) -> bytes:
    """Returns branches as bytes of int32 numbers, the form in which `extra_args` carry them."""
    parts = []
    for branch in branches:
        head = np.array([branch.parent, branch.position, len(branch.text) // TOKEN_BYTES], np.int32)
        parts.append(head.tobytes() + branch.text)
    return b"".join(parts)


def unpack(packed: bytes) -> tuple[AheadBranch, ...]:
    """Returns the branches from which `pack` made the bytes `packed`.

    Raises ValueError if the bytes are not those of branches, each of which leaves the text or an earlier branch.
    """
    found: list[AheadBranch] = []
    numbers = np.frombuffer(packed, np.int32)
    while len(numbers):
        if len(numbers) < _HEAD:
            raise ValueError("a branch ends within its head")
        parent, position, count = numbers[:_HEAD].tolist()
        if not 0 <= parent <= len(found) or position < 0 or not 0 <= count <= len(numbers) - _HEAD:
            raise ValueError(f"branch {len(found)} has parent {parent}, position {position} and {count} tokens")
        found.append(AheadBranch(parent, position, numbers[_HEAD : _HEAD + count].tobytes()))
        numbers = numbers[_HEAD + count :]
    return tuple(found)


def paths_of(text: bytes, branches: Sequence[AheadBranch]) -> list[np.ndarray]:
    """Returns all paths as int32 arrays. They are the text itself, and each branch with its parents' tokens before it."""
    paths = [np.frombuffer(text, np.int32)]
    for branch in branches:
        own = np.frombuffer(branch.text, np.int32)
        paths.append(np.concatenate([paths[branch.parent][: branch.position], own]))
    return paths


def after_prefix(branches: Iterable[AheadBranch], num_tokens: int) -> tuple[AheadBranch, ...]:
    """Returns branches for a request whose prompt already contains the first `num_tokens` of the response.

    A branch that begins among these tokens keeps only its tokens after them, if there are any.
    """
    left = []
    for branch in branches:
        known = max(num_tokens - branch.position, 0)
        left.append(
            AheadBranch(branch.parent, max(branch.position - num_tokens, 0), branch.text[TOKEN_BYTES * known :])
        )
    return tuple(left)


def begun_again(
    made: Sequence[int], text: bytes, branches: Sequence[AheadBranch]
) -> tuple[bytes, tuple[AheadBranch, ...]]:
    """Returns the text made ahead and the branches of a request that starts over.

    The request has generated the tokens `made`, and had `text` and `branches` until now. The new text is `made`, continued
    by the rest of the path that agrees with it longest. So a request that starts over early in its response still carries
    everything that was ever generated for it. The other paths become branches, which begin where they diverge from the new
    text. There are at most as many branches as before, and those that diverge last are kept.
    """
    paths = paths_of(text, branches)
    own = np.array(made, np.int32)
    followed = max(range(len(paths)), key=lambda i: num_common(paths[i], own))
    whole = np.concatenate([own, paths[followed][len(own) :]])
    parting = [(num_common(path, whole), path) for path in paths]
    others = [AheadBranch(0, first, path[first:].tobytes()) for first, path in parting if first < len(path)]
    others.sort(key=lambda branch: -branch.position)
    return whole.tobytes(), tuple(others[: len(branches)])


def num_common(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of leading tokens that two texts have in common."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
