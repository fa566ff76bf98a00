# SPDX-License-Identifier: Apache-2.0
"""The drafter's shadows: of each verifier's request, the committed text as it is known here, and what was drafted beyond it.

Shapes: N rows of a message, M shadows of a step, S how much of a shadow's text is remembered here.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from nemo_specrollout.remote.protocol.prefix_hash import extend, of_text

FINE, CORRECT, LACKING = 0, 1, 2


@dataclass(frozen=True)
class Correction:
    """The engine's request of `shadow` keeps its first `num_kept` tokens, and goes on with `tokens`."""

    shadow: int
    num_kept: int
    tokens: list[int]


@dataclass(frozen=True)
class Drafted:
    """What an engine drafted in a step, a token for each shadow: shadow int64, position int64, token int32, evidence level
    int8; each [M]."""

    shadows_M: np.ndarray
    positions_M: np.ndarray
    tokens_M: np.ndarray
    levels_M: np.ndarray

    def select(self, is_wanted_M: np.ndarray) -> "Drafted":
        """Some of it."""
        columns = (self.shadows_M, self.positions_M, self.tokens_M, self.levels_M)
        return Drafted(*(c[is_wanted_M] for c in columns))


@dataclass(frozen=True)
class DraftRows:
    """Draft tokens, row by row: shadow int64, position int64, hash of the text before uint64, token int32, level int8."""

    shadows: np.ndarray
    positions: np.ndarray
    hashes: np.ndarray
    tokens: np.ndarray
    levels: np.ndarray


class ShadowSequences:
    """Owns what is known of the shadows, by their slots; the engine owns their full texts and KV.

    Invariants: a shadow's first `committed` tokens are the verifier's. Its text never shrinks below them. A commit names the
    text that it extends by length and hash, so one that is doubled or late changes nothing, and after a lost one the next is
    understood, if the shadow has drafted that very text by itself; else the shadow is lacking, and has to be opened again.
    """

    def __init__(self, num_shadows: int, most_ahead: int) -> None:
        # What may still be asked for: drafts beyond the committed text, and commits that lie behind them.
        size = 1 << (4 * most_ahead).bit_length()
        self._committed = np.zeros(num_shadows, np.int64)
        self._ends = np.zeros(num_shadows, np.int64)
        self._starts = np.zeros(num_shadows, np.int64)
        self._windows = np.zeros(num_shadows, np.int64)
        self._limits = np.zeros(num_shadows, np.int64)
        self._stopped = np.zeros(num_shadows, np.int64)
        self._hashes = np.zeros((num_shadows, size), np.uint64)
        self._tokens = np.zeros((num_shadows, size), np.int32)
        self._levels = np.zeros((num_shadows, size), np.int8)
        self._most_ahead = most_ahead

    def open(self, shadow: int, seed: int, text: np.ndarray, limit: int, window: int) -> None:
        """The slot is of a request whose int32 `text` is committed; it never grows beyond `limit` tokens."""
        self._committed[shadow] = self._ends[shadow] = self._starts[shadow] = len(text)
        self._hashes[shadow, len(text) % self._hashes.shape[1]] = of_text(seed, text)
        self._limits[shadow], self._windows[shadow] = limit, min(window, self._most_ahead)
        self._stopped[shadow] = -1

    def close(self, shadow: int) -> None:
        """The slot is free: nothing is drafted for it."""
        self._limits[shadow] = 0

    def commit(
        self,
        shadows_N: np.ndarray,
        bases_N: np.ndarray,
        hashes_N: np.ndarray,
        counts_N: np.ndarray,
        windows_N: np.ndarray,
        tokens: np.ndarray,
    ) -> tuple[list[Correction], np.ndarray]:
        """What verifiers have committed; a shadow of -1 is none of ours. Returns what the engine has to correct, and bool [N]:
        of which rows the request has to be told again."""
        outcome_N, kept_N, first_N = (np.empty(len(shadows_N), np.int64) for _ in range(3))
        windows_N = np.minimum(windows_N.astype(np.int64), self._most_ahead)
        _commit(
            shadows_N, bases_N, hashes_N, counts_N, windows_N, tokens, self._committed, self._ends, self._starts,
            self._windows, self._hashes, self._stopped, self._tokens, outcome_N, kept_N, first_N,
        )  # fmt: skip
        ends_N = np.cumsum(counts_N)
        corrections = [
            Correction(int(shadows_N[n]), int(kept_N[n]), tokens[first_N[n] : ends_N[n]].tolist())
            for n in np.flatnonzero(outcome_N == CORRECT)
        ]
        return corrections, outcome_N == LACKING

    def wanting(self) -> np.ndarray:
        """The shadows that may draft, those with the shortest run-ahead first, int64 [M]."""
        ahead = self._ends - self._committed
        may_draft = (ahead < self._windows) & (self._ends < self._limits) & (self._stopped < self._committed)
        shadows_M = np.flatnonzero(may_draft)
        return shadows_M[np.argsort(ahead[shadows_M], kind="stable")]

    def drafted(self, new: Drafted, stop_token_ids: np.ndarray) -> DraftRows:
        """The engine has drafted for some shadows; returns the rows to tell. Beyond a token that ends the text nothing more
        is drafted."""
        hashes_M = np.empty(len(new.shadows_M), np.uint64)
        _append(
            new.shadows_M, new.positions_M, new.tokens_M, new.levels_M, self._ends, self._hashes, self._tokens, self._levels,
            hashes_M,
        )  # fmt: skip
        is_stop_M = (new.tokens_M[:, None] == stop_token_ids).any(axis=1)
        self._stopped[new.shadows_M[is_stop_M]] = new.positions_M[is_stop_M]
        return DraftRows(new.shadows_M, new.positions_M, hashes_M, new.tokens_M, new.levels_M)

    def num_committed(self, shadow: int) -> int:
        """How much of the shadow's text is known to be the verifier's."""
        return int(self._committed[shadow])

    def text_hash(self, shadow: int) -> tuple[int, int]:
        """How long the shadow's text is, and its hash: what the engine holds must have the same."""
        end = int(self._ends[shadow])
        return end, int(self._hashes[shadow, end % self._hashes.shape[1]])

    def ahead_of(self, shadow: int) -> DraftRows:
        """All that is drafted beyond the committed text of one shadow, to be told again."""
        positions = np.arange(self._committed[shadow], self._ends[shadow])
        at = positions % self._tokens.shape[1]
        parts = (self._hashes[shadow, at], self._tokens[shadow, at], self._levels[shadow, at])
        return DraftRows(np.full(len(positions), shadow), positions, *parts)


@njit(
    "void(int64[:], int64[:], uint64[:], int64[:], int64[:], int32[:], int64[:], int64[:], int64[:], int64[:], uint64[:,:],"
    " int64[:], int32[:,:], int64[:], int64[:], int64[:])",
    cache=True,
)
def _commit(  # type: ignore[no-untyped-def]
    shadows_N, bases_N, hashes_N, counts_N, windows_N, new, committed, ends, starts, windows, hashes, stopped, tokens,
    outcome_N, kept_N, first_N,
):  # fmt: skip
    size = tokens.shape[1]
    mask = size - 1
    offset = 0
    for n in range(len(shadows_N)):
        m, base, end = shadows_N[n], bases_N[n], bases_N[n] + counts_N[n]
        first = offset
        offset += counts_N[n]
        outcome_N[n] = FINE
        if m < 0:
            outcome_N[n] = LACKING
            continue
        if end < committed[m]:
            continue
        oldest = max(starts[m], ends[m] - size + 1)
        if base > ends[m] or base < oldest or hashes[m, base & mask] != hashes_N[n]:
            outcome_N[n] = LACKING
            continue
        windows[m] = windows_N[n]
        p = base
        while p < end and p < ends[m] and tokens[m, p & mask] == new[first + p - base]:
            p += 1
        if p < end and p < committed[m]:
            outcome_N[n] = LACKING
            continue
        committed[m] = p
        if p == end:
            continue
        outcome_N[n], kept_N[n], first_N[n] = CORRECT, p, first + p - base
        prefix_hash = hashes[m, p & mask]
        for q in range(p, end):
            token = new[first + q - base]
            tokens[m, q & mask] = token
            prefix_hash = extend(prefix_hash, token)
            hashes[m, (q + 1) & mask] = prefix_hash
        committed[m] = ends[m] = end
        if stopped[m] >= p:
            stopped[m] = -1


@njit(
    "void(int64[:], int64[:], int32[:], int8[:], int64[:], uint64[:,:], int32[:,:], int8[:,:], uint64[:])", cache=True
)
def _append(shadows_M, positions_M, new, new_levels, ends, hashes, tokens, levels, hashes_M):  # type: ignore[no-untyped-def]
    mask = tokens.shape[1] - 1
    for i in range(len(shadows_M)):
        m, p = shadows_M[i], positions_M[i]
        hashes_M[i] = hashes[m, p & mask]
        tokens[m, p & mask] = new[i]
        levels[m, p & mask] = new_levels[i]
        hashes[m, (p + 1) & mask] = extend(hashes_M[i], new[i])
        ends[m] = p + 1
