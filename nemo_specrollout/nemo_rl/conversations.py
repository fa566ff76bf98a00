# SPDX-License-Identifier: Apache-2.0
"""Finds the prompt that a conversation began with, in any of its turns: siblings of a group share it.

NeMo-RL asks for the next turn with a longer prompt: the last one, its answer, and what the environment said.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

# An odd factor of a polynomial hash modulo 2^64.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
# Prompts that are remembered; the oldest half is forgotten when there are more.
_MOST = 1 << 16


class Conversations:
    """Remembers prompts. A prompt that begins with one of them, whole, is a later turn of the same conversation."""

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}  # hash of a prompt -> length of the prompt that its conversation began with
        self._lengths: set[int] = set()  # of all prompts
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        """For Ray, which copies the generation to other processes: a lock stays where it is."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    def root_lengths(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Returns for each prompt the number of its tokens that began the conversation; all of them in a first turn.

        `rows` are prompts as token ids. They are remembered.
        """
        with self._lock:
            return [self._root_length(row) for row in rows]

    def _root_length(self, row: Sequence[int]) -> int:
        hashes = prefix_hashes(row)
        ends = np.array([length - 1 for length in sorted(self._lengths) if length <= len(row)], dtype=np.int64)
        known = map(self._roots.get, hashes[ends].tolist())
        root = next((length for length in known if length is not None), len(row))
        if hashes.size:
            self._lengths.add(len(row))
            self._remember(int(hashes[-1]), root)
        return root

    def _remember(self, key: int, root: int) -> None:
        self._roots[key] = root
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
