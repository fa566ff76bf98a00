# SPDX-License-Identifier: Apache-2.0
"""The verifier's draft buffers: the tokens drafted beyond the committed text of each request.

Shapes: S request slots, b some of them, N rows of a message, L longest sequence, X columns of a draft stream's table.
"""

from typing import NamedTuple

import numpy as np
from numba import from_dtype, int8, int32, int64, njit, uint64, void

from nemo_specrollout.drafters.base import NUM_LEVELS, PRIOR_STRENGTH, REQUEST_DECAY
from nemo_specrollout.remote.protocol.draft_ring import RINGS, new_rings, put, text_hash

NO_REQUEST = -1
"""Request number of a free slot."""
SLOT_BITS = 16
"""Low bits of a request's number. They hold its slot, so the slot is found without a table."""
SLOT_MASK = (1 << SLOT_BITS) - 1
LEAST_SURVIVAL = 0.02
"""Least probability to be reached at which a draft token is worth the drafter's time."""
FIRST_RATE = 0.9
"""Assumed share of right drafts (given that all drafts before were right) of a request without history."""

BASE, COUNT, TOKENS = 0, 1, 2
"""Columns of a draft stream's table (`draft_stream.py`): length of the text, number of tokens that follow, first of them."""

KEPT = 0
"""Index in `DraftBuffers.counts`: tokens appended to a buffer."""
LATE = 1
"""Tokens of a position that the verifier had sampled itself by then."""
STALE = 2
"""Tokens of another text, of a request that ended, behind a gap, or beyond the buffer's end."""
WRONG = 3
"""Tokens that were kept, and dropped when the verifier sampled another token there or before."""

_SLOT = np.dtype(
    [
        ("request", np.int64),
        ("committed", np.int64),  # length of the committed text
        ("end", np.int64),  # length of the text with the buffered tokens
        ("num_hits", np.float64),  # right drafts and judged drafts, decayed
        ("num_judged", np.float64),
        ("has_lost", np.bool_),
    ],
    align=True,
)
_SLOTS = from_dtype(_SLOT)[::1]


class Commits(NamedTuple):
    """Newly committed tokens of some slots, as columns of a `Step`."""

    bases_b: np.ndarray
    """int64: length of the text before."""
    hashes_b: np.ndarray
    """uint64: hash of that text."""
    counts_b: np.ndarray
    """int64: number of new tokens."""
    tokens: np.ndarray
    """int32: the new tokens, slot by slot."""


class DraftBuffers:
    """Owns the draft buffers of all request slots.

    Messages may arrive in any order and any number of times. Each one either extends a buffer or changes nothing. The last
    message about a position wins, because a drafter with new weights may correct itself.
    """

    def __init__(self, num_slots: int, most_ahead: int, vocab_size: int) -> None:
        self.counts = np.zeros(4, np.int64)
        """Received draft tokens by outcome: `KEPT`, `LATE`, `STALE`; and `WRONG`, which are some of the kept ones."""
        self._slots = np.zeros(num_slots, _SLOT)
        self._slots["request"] = NO_REQUEST
        self._rings = new_rings(num_slots, most_ahead + 1)
        self._most_ahead, self._vocab_size = most_ahead, vocab_size

    def open(self, slot: int, request: int, seed: int, text: np.ndarray) -> None:
        """Assigns `slot` to `request`, whose int32 `text` is committed."""
        length = len(text)
        self._slots[slot] = (request, length, length, 0.0, 0.0, False)
        self._rings[slot, length % self._rings.shape[1]]["prefix_hash"] = text_hash(seed, text)

    def close(self, slots: np.ndarray) -> None:
        """Empties the buffers of `slots` and takes no drafts for them until they are opened again."""
        committed = self._slots["committed"][slots]
        self.counts[WRONG] += int((self._slots["end"][slots] - committed).sum())
        self._slots["request"][slots] = NO_REQUEST
        self._slots["end"][slots] = committed

    def commit(self, slots_b: np.ndarray, token_ids_SL: np.ndarray, lengths_b: np.ndarray) -> Commits:
        """Extends the committed text of each slot to `lengths_b` tokens and drops buffered tokens that differ from it."""
        bases_b = self._slots["committed"][slots_b]
        counts_b = lengths_b - bases_b
        new = Commits(bases_b, np.empty(len(slots_b), np.uint64), counts_b, np.empty(counts_b.sum(), np.int32))
        _commit(slots_b, token_ids_SL, lengths_b, self._slots, self._rings, new.hashes_b, new.tokens, self.counts)
        return new

    def windows(self, slots_b: np.ndarray) -> np.ndarray:
        """Returns how many draft tokens a drafter may be ahead of each request, uint8 [b].

        A window ends where drafts are unlikely to be accepted at the request's own recent rate. Source: the per-request
        windows of SpecActor's Algorithm 2 (arXiv 2511.16193); here no request waits for a full window.
        """
        hits_b, judged_b = self._slots["num_hits"][slots_b], self._slots["num_judged"][slots_b]
        rates_b = (hits_b + FIRST_RATE * PRIOR_STRENGTH) / (judged_b + PRIOR_STRENGTH)
        lengths_b = np.ceil(np.log(LEAST_SURVIVAL) / np.log(np.clip(rates_b, 1e-9, 1 - 1e-9)))
        return np.clip(lengths_b, 1, self._most_ahead).astype(np.uint8)

    def note_loss(self, slots: np.ndarray) -> None:
        """Records that drafts for these slots may have been lost on the way."""
        self._slots["has_lost"][slots] = True

    def take_losses(self, slots_b: np.ndarray) -> np.ndarray:
        """Returns the slots with recorded losses, uint8 [b], and clears the records."""
        has_lost_b = self._slots["has_lost"][slots_b].astype(np.uint8)
        self._slots["has_lost"][slots_b] = False
        return has_lost_b

    def add(
        self,
        requests_N: np.ndarray,
        positions_N: np.ndarray,
        hashes_N: np.ndarray,
        tokens_N: np.ndarray,
        levels_N: np.ndarray,
    ) -> None:
        """Appends draft tokens that continue the text of their requests, and counts what becomes of each token."""
        _add(
            requests_N, positions_N, hashes_N, tokens_N, levels_N, self._slots, self._rings, self.counts, self._vocab_size
        )  # fmt: skip

    def write(self, table_SX: np.ndarray) -> None:
        """Writes all buffers to a draft stream's table, one row for each slot."""
        _write(self._slots, self._rings, table_SX)


@njit(void(int64[:], int32[:, :], int64[:], _SLOTS, RINGS, uint64[:], int32[:], int64[:]), cache=True)
def _commit(slots_b, token_ids_SL, lengths_b, slots, rings, hashes_b, new_tokens, counts):  # type: ignore[no-untyped-def]
    mask, num_new = rings.shape[1] - 1, 0
    for b in range(len(slots_b)):
        state, ring = slots[slots_b[b]], rings[slots_b[b]]
        hashes_b[b] = ring[state.committed & mask].prefix_hash
        for p in range(state.committed, lengths_b[b]):
            token = token_ids_SL[slots_b[b], p]
            if p < state.end:
                is_hit = ring[p & mask].token == token
                state.num_hits = state.num_hits * REQUEST_DECAY + is_hit
                state.num_judged = state.num_judged * REQUEST_DECAY + 1.0
                if not is_hit:
                    counts[WRONG] += state.end - p
                    state.end = p
            put(ring, p, token, 0)
            new_tokens[num_new] = token
            num_new += 1
        state.committed = lengths_b[b]
        state.end = max(state.end, state.committed)


@njit(void(int64[:], int64[:], uint64[:], int32[:], int8[:], _SLOTS, RINGS, int64[:], int64), cache=True)
def _add(  # type: ignore[no-untyped-def]
    requests_N, positions_N, hashes_N, tokens_N, levels_N, slots, rings, counts, vocab_size
):
    size = rings.shape[1]
    for n in range(len(requests_N)):
        slot, p = requests_N[n] & SLOT_MASK, positions_N[n]
        is_valid = requests_N[n] >= 0 and 0 <= tokens_N[n] < vocab_size and 0 <= levels_N[n] < NUM_LEVELS
        if not is_valid or slot >= len(slots) or slots[slot].request != requests_N[n]:
            counts[STALE] += 1
            continue
        state, entry = slots[slot], rings[slot, p & (size - 1)]
        if p < state.committed:
            counts[LATE] += 1
        elif p > state.end or p - state.committed >= size - 1 or entry.prefix_hash != hashes_N[n]:
            counts[STALE] += 1
        elif p == state.end or entry.token != tokens_N[n]:
            counts[KEPT] += 1
            counts[WRONG] += state.end - p
            put(rings[slot], p, tokens_N[n], levels_N[n])
            state.end = p + 1


@njit(void(_SLOTS, RINGS, int32[:, :]), cache=True)
def _write(slots, rings, table_SX):  # type: ignore[no-untyped-def]
    mask, most_ahead = rings.shape[1] - 1, (table_SX.shape[1] - TOKENS) // 2
    for slot in range(len(slots)):
        state = slots[slot]
        count = min(state.end - state.committed, most_ahead)
        for i in range(count):
            entry = rings[slot, (state.committed + i) & mask]
            table_SX[slot, TOKENS + i] = entry.token
            table_SX[slot, TOKENS + most_ahead + i] = entry.level
        table_SX[slot, BASE] = state.committed
        table_SX[slot, COUNT] = count
