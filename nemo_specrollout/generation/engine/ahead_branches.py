# SPDX-License-Identifier: Apache-2.0
"""Branches of a text that was made ahead, and how a request carries them as bytes. vLLM is not imported.

A text made ahead was sampled by older weights for a request of a coming training step. A branch is another way in which this
text may go on from some position.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

TOKEN_BYTES = 4
"""Number of bytes of a token in a text that was made ahead."""
_HEAD = 3
"""How many numbers come before the tokens of a packed branch. They are its parent, its position and its number of tokens."""


class AheadBranch(NamedTuple):
    """A text that differs from another one, its parent, from some position on. Before that, it has the parent's tokens."""

    parent: int
    """Number of the parent, which is 0 for the text made ahead itself, and i + 1 for the branch with index i."""
    position: int
    """Index in the response of the first token that is not the parent's."""
    text: bytes
    """Ids of the branch's own tokens, which come from `position` on, as int32 numbers."""


def pack(branches: Iterable[AheadBranch]) -> bytes:
    """Returns branches as bytes of int32 numbers, in the form in which a request's `extra_args` carry them."""
    parts = []
    for branch in branches:
        head = np.array([branch.parent, branch.position, len(branch.text) // TOKEN_BYTES], np.int32)
        parts.append(head.tobytes() + branch.text)
    return b"".join(parts)


def unpack(packed: bytes) -> tuple[AheadBranch, ...]:
    """Returns the branches that `pack` has turned into the bytes `packed`.

    Raises ValueError if the bytes do not describe branches, or if the parent of a branch is not the text or an earlier branch.
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
    """Returns whole texts as int32 arrays. The first is the text made ahead, and its branches follow in their order.

    The array of a branch begins with the tokens that the branch shares with its parent.
    """
    paths = [np.frombuffer(text, np.int32)]
    for branch in branches:
        own = np.frombuffer(branch.text, np.int32)
        paths.append(np.concatenate([paths[branch.parent][: branch.position], own]))
    return paths


def after_prefix(branches: Iterable[AheadBranch], num_tokens: int) -> tuple[AheadBranch, ...]:
    """Returns branches for a request whose prompt already contains the first `num_tokens` tokens of the response.

    If a branch begins within these tokens, its part of them is cut off, and the rest of the branch is kept.
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
    """Returns a new text made ahead and its branches for a request that starts over, so that nothing made for it is lost.

    The request has generated the tokens `made`, and has carried `text` and `branches` until now. Both are compared with `made`
    as whole texts. The one that agrees with `made` longest is continued: the new text is `made` and then the rest of this
    whole text. The other whole texts become branches of the new text, the one that agrees with it longest first. No more than
    `len(branches)` branches are kept.
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
    """Returns the number of tokens at the beginning that two texts have in common."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
