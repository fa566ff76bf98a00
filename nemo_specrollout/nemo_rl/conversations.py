# SPDX-License-Identifier: Apache-2.0
"""Finds the prompt that a conversation began with, in any of its turns: siblings of a group share it.

NeMo-RL asks for the next turn with a longer prompt: the last one, its answer, and what the environment said.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_specrollout.nemo_rl.locked import Locked

# An odd factor of a polynomial hash modulo 2^64.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
# Prompts that are remembered; the oldest half is forgotten when there are more.
_MOST = 1 << 16


class Conversations(Locked):
    """Remembers prompts. A prompt that begins with one of them, whole, is a later turn of the same conversation."""

    def __init__(self) -> None:
        super().__init__()
        self._roots: dict[int, int] = {}  # hash of a prompt -> length of the prompt that its conversation began with
        self._lengths: list[int] = []  # of all prompts, each once, in ascending order

    def root_lengths(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Returns for each prompt the number of its tokens that began the conversation; all of them in a first turn.

        `rows` are prompts as token ids. They are remembered.
        """
        with self._lock:
            return [self._root_length(row) for row in rows]

    def _root_length(self, row: Sequence[int]) -> int:
        hashes = prefix_hashes(row)
        ends = np.array(self._lengths[: bisect_right(self._lengths, len(row))], dtype=np.int64) - 1
        known = map(self._roots.get, hashes[ends].tolist())
        root = next((length for length in known if length is not None), len(row))
        if hashes.size:
            self._remember(int(hashes[-1]), len(row), root)
        return root

    def _remember(self, key: int, length: int, root: int) -> None:
        self._roots[key] = root
        place = bisect_left(self._lengths, length)
        if self._lengths[place : place + 1] != [length]:
            self._lengths.insert(place, length)
        if len(self._roots) > _MOST:
            for oldest in list(self._roots)[: _MOST // 2]:
                del self._roots[oldest]


def prefix_hashes(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns a 64-bit hash of each beginning of `tokens`: of the first, of the first two, and so on; shape [tokens]."""
    tokens_T = np.asarray(tokens, dtype=np.uint64)
    with np.errstate(over="ignore"):
        powers_T = np.cumprod(np.full(tokens_T.size, _FACTOR, dtype=np.uint64))
        sums_T = np.cumsum((tokens_T + np.uint64(1)) * powers_T, dtype=np.uint64)
    return sums_T ^ (sums_T >> np.uint64(29))
