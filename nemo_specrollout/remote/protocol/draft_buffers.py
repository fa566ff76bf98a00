# SPDX-License-Identifier: Apache-2.0
"""The verifier's tail buffers: of each request, what was drafted beyond the text that it has committed.

Shapes: S lanes, b some of them, N rows of a message, L longest sequence.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from nemo_specrollout.drafters.base import PRIOR_STRENGTH, REQUEST_DECAY
from nemo_specrollout.remote.protocol.prefix_hash import extend, of_text

NO_REQUEST = -1
LANE_BITS = 16
"""Low bits of a request's number that hold its lane, so that no table is needed to find it."""
LANE_MASK = (1 << LANE_BITS) - 1
LEAST_SURVIVAL = 0.02
"""A draft token that is less likely to be reached is not worth a drafter's while, whose step is for all of its requests."""
FIRST_RATE = 0.9
"""What is believed of a request's drafts at first: the share that is right, where all before were."""

BASE, COUNT, TOKENS = 0, 1, 2
"""Columns of a draft stream's table (`stream.py`): how long the text was, how many tokens follow it, the first of them."""


@dataclass
class TailCounts:
    """What became of the draft tokens that came, as sums."""

    kept: int = 0
    """Put behind a tail."""
    late: int = 0
    """The verifier had sampled that position itself by then."""
    stale: int = 0
    """Of a text that is not the request's (any more), or of a request that is gone."""
    beyond: int = 0
    """Not contiguous: something before it was lost; or more than there is room for."""
    wrong: int = 0
    """Kept, and dropped when the verifier sampled another token there or before it."""


class TailBuffers:
    """Owns the tails of all lanes.

    Invariants: a tail's token at position p was drafted for exactly the text that ends before p: the committed text and the
    tail up to there. Whatever arrives, in whatever order and however often, either extends a tail under that rule or changes
    nothing. The last message about a position counts: a drafter with new weights may overrule itself.
    """

    def __init__(self, num_lanes: int, most_ahead: int, vocab_size: int, num_levels: int) -> None:
        size = 1 << (most_ahead + 1).bit_length()
        self._requests = np.full(num_lanes, NO_REQUEST, np.int64)
        self._committed = np.zeros(num_lanes, np.int64)
        self._ends = np.zeros(num_lanes, np.int64)
        self._hashes = np.zeros((num_lanes, size), np.uint64)
        self._tokens = np.zeros((num_lanes, size), np.int32)
        self._levels = np.zeros((num_lanes, size), np.int8)
        self._lost = np.zeros(num_lanes, np.bool_)
        self._judged = np.zeros((num_lanes, 2))  # hits and trials, which fade
        self._counts = np.zeros(5, np.int64)
        self._most_ahead, self._vocab_size, self._num_levels = most_ahead, vocab_size, num_levels

    @property
    def counts(self) -> TailCounts:
        return TailCounts(*self._counts.tolist())

    def open(self, lane: int, request: int, seed: int, text: np.ndarray) -> None:
        """`lane` is now of `request`, whose int32 `text` is committed."""
        self._requests[lane] = request
        self._committed[lane] = self._ends[lane] = len(text)
        self._hashes[lane, len(text) % self._hashes.shape[1]] = of_text(seed, text)
        self._lost[lane] = False
        self._judged[lane] = 0.0

    def close(self, lanes: np.ndarray) -> None:
        """The requests of `lanes` are gone, or have no drafter: their tails go too, until a lane is opened again."""
        self._counts[4] += int((self._ends[lanes] - self._committed[lanes]).sum())
        self._requests[lanes] = NO_REQUEST
        self._ends[lanes] = self._committed[lanes]

    def commit(
        self, lanes_b: np.ndarray, token_ids_SL: np.ndarray, lengths_b: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The text of each lane's request is now `lengths_b` tokens long. Returns its length before, int64 [b], and the hash
        of that much, uint64 [b]."""
        bases_b, hashes_b = self._committed[lanes_b], np.empty(len(lanes_b), np.uint64)
        _commit(
            lanes_b, token_ids_SL, lengths_b, self._committed, self._ends, self._hashes, self._tokens, self._judged,
            hashes_b, self._counts,
        )  # fmt: skip
        return bases_b, hashes_b

    def windows(self, lanes_b: np.ndarray) -> np.ndarray:
        """Draft tokens that each request's drafter may be ahead of it, uint8 [b]: as far as there is a chance that they stand.

        The rate of a token's being right, where all before were, is the request's own of late. Source: the per-request windows
        of SpecActor's Algorithm 2 (arXiv 2511.16193); here no request waits for a full window.
        """
        hits_b, trials_b = self._judged[lanes_b].T
        rates_b = (hits_b + FIRST_RATE * PRIOR_STRENGTH) / (trials_b + PRIOR_STRENGTH)
        lengths_b = np.ceil(np.log(LEAST_SURVIVAL) / np.log(np.clip(rates_b, 1e-9, 1 - 1e-9)))
        return np.clip(lengths_b, 1, self._most_ahead).astype(np.uint8)

    def lose(self, lanes_B: np.ndarray) -> None:
        """Something drafted for these lanes may have been lost on the way."""
        self._lost[lanes_B] = True

    def take_lost(self, lanes_B: np.ndarray) -> np.ndarray:
        """Of which lanes something drafted was lost since last asked, uint8 [B]."""
        lost_B = self._lost[lanes_B].astype(np.uint8)
        self._lost[lanes_B] = False
        return lost_B

    def add(
        self,
        requests_N: np.ndarray,
        positions_N: np.ndarray,
        hashes_N: np.ndarray,
        tokens_N: np.ndarray,
        levels_N: np.ndarray,
    ) -> None:
        """Draft tokens have come."""
        _add(
            requests_N, positions_N, hashes_N, tokens_N, levels_N, self._requests, self._committed, self._ends, self._hashes,
            self._tokens, self._levels, self._counts, self._vocab_size, self._num_levels,
        )  # fmt: skip

    def write(self, table_SX: np.ndarray) -> None:
        """Writes all tails to the table of a draft stream (`stream.py`), a row for each lane."""
        _write(self._committed, self._ends, self._tokens, self._levels, table_SX)


def gather(token_ids_SL: np.ndarray, lanes_b: np.ndarray, starts_b: np.ndarray, counts_b: np.ndarray) -> np.ndarray:
    """The `counts_b` tokens of each lane from `starts_b` on, one lane after the other, int32."""
    lanes = np.repeat(lanes_b, counts_b)
    ends = np.cumsum(counts_b)
    offsets = np.arange(len(lanes)) - np.repeat(ends - counts_b, counts_b)
    return token_ids_SL[lanes, np.repeat(starts_b, counts_b) + offsets].astype(np.int32)


@njit(
    "void(int64[:], int32[:,:], int64[:], int64[:], int64[:], uint64[:,:], int32[:,:], float64[:,:], uint64[:], int64[:])",
    cache=True,
)
def _commit(  # type: ignore[no-untyped-def]
    lanes_b, token_ids_SL, lengths_b, committed, ends, hashes, tokens, judged, hashes_b, counts
):
    mask = tokens.shape[1] - 1
    for b in range(len(lanes_b)):
        lane = lanes_b[b]
        prefix_hash = hashes[lane, committed[lane] & mask]
        hashes_b[b] = prefix_hash
        for p in range(committed[lane], lengths_b[b]):
            token = token_ids_SL[lane, p]
            if p < ends[lane]:
                is_hit = tokens[lane, p & mask] == token
                judged[lane, 0] = judged[lane, 0] * REQUEST_DECAY + is_hit
                judged[lane, 1] = judged[lane, 1] * REQUEST_DECAY + 1.0
                if not is_hit:
                    counts[4] += ends[lane] - p
                    ends[lane] = p
            prefix_hash = extend(prefix_hash, token)
            hashes[lane, (p + 1) & mask] = prefix_hash
        committed[lane] = lengths_b[b]
        ends[lane] = max(ends[lane], committed[lane])


@njit(
    "void(int64[:], int64[:], uint64[:], int32[:], int8[:], int64[:], int64[:], int64[:], uint64[:,:], int32[:,:], int8[:,:],"
    " int64[:], int64, int64)",
    cache=True,
)
def _add(  # type: ignore[no-untyped-def]
    requests_N, positions_N, hashes_N, tokens_N, levels_N, requests, committed, ends, hashes, tokens, levels, counts,
    vocab_size, num_levels,
):  # fmt: skip
    size = tokens.shape[1]
    mask = size - 1
    for n in range(len(requests_N)):
        lane = requests_N[n] & LANE_MASK
        p = positions_N[n]
        is_sane = 0 <= tokens_N[n] < vocab_size and 0 <= levels_N[n] < num_levels
        if not is_sane or requests_N[n] < 0 or lane >= len(requests) or requests[lane] != requests_N[n]:
            counts[2] += 1
        elif p < committed[lane]:
            counts[1] += 1
        elif p > ends[lane] or p - committed[lane] >= size - 1:
            counts[3] += 1
        elif hashes[lane, p & mask] != hashes_N[n]:
            counts[2] += 1
        elif p == ends[lane] or tokens[lane, p & mask] != tokens_N[n]:
            counts[0] += 1
            counts[4] += ends[lane] - p
            tokens[lane, p & mask] = tokens_N[n]
            levels[lane, p & mask] = levels_N[n]
            hashes[lane, (p + 1) & mask] = extend(hashes_N[n], tokens_N[n])
            ends[lane] = p + 1


@njit("void(int64[:], int64[:], int32[:,:], int8[:,:], int32[:,:])", cache=True)
def _write(committed, ends, tokens, levels, table_SX):  # type: ignore[no-untyped-def]
    mask, room = tokens.shape[1] - 1, (table_SX.shape[1] - TOKENS) // 2
    for lane in range(len(committed)):
        count = min(ends[lane] - committed[lane], room)
        for i in range(count):
            p = (committed[lane] + i) & mask
            table_SX[lane, TOKENS + i] = tokens[lane, p]
            table_SX[lane, TOKENS + room + i] = levels[lane, p]
        table_SX[lane, BASE] = committed[lane]
        table_SX[lane, COUNT] = count
