# SPDX-License-Identifier: Apache-2.0
"""Branches of a text that was made ahead, as a request brings them along. Plain data: vLLM is not imported."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

TOKEN_BYTES = 4
"""Bytes of a token in a text that was made ahead."""
_HEAD = 3
"""Numbers before the tokens of a branch: its parent, its position, and the number of its tokens."""


class AheadBranch(NamedTuple):
    """A text that goes on with another token than its parent from a position on. Tokens before it are the parent's."""

    parent: int
    """Number of the path that it leaves: 0 for the text itself, i + 1 for the branch of index i."""
    position: int
    """Number of its first own token, counted from the end of the prompt."""
    text: bytes
    """Its own tokens, as int32 numbers."""


def pack(branches: Iterable[AheadBranch]) -> bytes:
    """Returns branches as int32 numbers, in which form `extra_args` carry them."""
    parts = []
    for branch in branches:
        head = np.array([branch.parent, branch.position, len(branch.text) // TOKEN_BYTES], np.int32)
        parts.append(head.tobytes() + branch.text)
    return b"".join(parts)


def unpack(packed: bytes) -> tuple[AheadBranch, ...]:
    """Returns the branches that `pack` was given.

    Raises ValueError if the numbers are not those of branches, each of which leaves the text or an earlier branch.
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
    """Returns the whole paths: the text, and each branch with the tokens of its parents before it. int32 each."""
    paths = [np.frombuffer(text, np.int32)]
    for branch in branches:
        own = np.frombuffer(branch.text, np.int32)
        paths.append(np.concatenate([paths[branch.parent][: branch.position], own]))
    return paths


def after_prefix(branches: Iterable[AheadBranch], num_tokens: int) -> tuple[AheadBranch, ...]:
    """Returns branches for a request whose prompt has got the first `num_tokens` of the response.

    A branch that began among them keeps the tokens that come after, if there are any.
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
    """Returns text and branches with which a request begins again that has made `made` with the older `text` and `branches`.

    The text is what was made, and beyond its end the rest of the path that agrees with it longest. So a request that begins
    again early in its response still brings everything that was ever made of it. The other paths are branches where they
    part from that text. There are at most as many of them as before, and those that part last are kept.
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
    """Returns the number of tokens with which two texts begin alike."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
