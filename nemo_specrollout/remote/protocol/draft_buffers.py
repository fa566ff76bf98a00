# SPDX-License-Identifier: Apache-2.0
"""The verifier's draft buffers, which hold the tokens drafted beyond the committed text of each request.

The committed text is the prompt with the tokens that the policy has sampled. Verifier and drafter both keep the last positions
of each text in a ring buffer, where each token has a prefix hash. The prefix hash of a position is a hash of the request's
seed and of all tokens before that position.

Shapes: S request slots, b some of them, N rows of a message, L longest sequence, X columns of a draft stream's table.
"""

import numpy as np
from numba import from_dtype, int32, int64, njit, void

from nemo_specrollout.drafters.base import NUM_LEVELS, PRIOR_STRENGTH, REQUEST_DECAY
from nemo_specrollout.remote.protocol.messages import COMMIT_ROW, DRAFT_ROW
from nemo_specrollout.sampling.numba_common import mix64
from nemo_specrollout.sampling.seeds import GAMMA

NO_REQUEST = -1
SLOT_BITS = 16
"""Number of low bits of a request's number that hold its slot, so that the slot follows from the number."""
SLOT_MASK = (1 << SLOT_BITS) - 1
LEAST_SURVIVAL = 0.02
"""Smallest survival at which a draft token is worth the drafter's time. Survival is the probability that all draft tokens of a
request up to this one are accepted."""
FIRST_RATE = 0.9
"""Assumed probability that a draft token is accepted if all before it are, for a request that has no history yet."""

BASE, COUNT, TOKENS = 0, 1, 2
"""Columns of a draft stream's table (`draft_stream.py`). A row has the length of the text for which the tokens were drafted,
the number of draft tokens, the tokens, and their evidence levels."""

KEPT, LATE, STALE, WRONG = 0, 1, 2, 3
"""Indices of `DraftBuffers.counts`, which are the possible outcomes of a draft token (see `DrafterStats`). A token also counts
as stale if the buffer does not have the token before it, or has no room for it."""

ENTRY = np.dtype([("prefix_hash", np.uint64), ("token", np.int32), ("level", np.int8)], align=True)
"""One position of a text, with the hash of all tokens before it, its token, and the evidence level if it was drafted."""
RINGS = from_dtype(ENTRY)[:, ::1]
_GAMMA = np.uint64(GAMMA)
_SLOT = np.dtype(
    [
        ("request", np.int64),
        ("committed", np.int64),  # length of the committed text
        ("end", np.int64),  # length of the text with the buffered tokens
        ("num_hits", np.float64),  # right drafts and judged drafts, decayed
        ("num_judged", np.float64),
    ],
    align=True,
)
_SLOTS, _COMMITS, _DRAFTS = (from_dtype(row)[::1] for row in (_SLOT, COMMIT_ROW, DRAFT_ROW))


def new_rings(num_rows: int, least_size: int) -> np.ndarray:
    """Returns empty ring buffers [num_rows, size], where `size` is the smallest power of two above `least_size`."""
    return np.zeros((num_rows, 1 << least_size.bit_length()), ENTRY)


@njit("uint64(uint64, int64)", cache=True)
def extend(prefix_hash, token):  # type: ignore[no-untyped-def]
    """Returns the prefix hash of a text that grows by one token.

    It is SplitMix64's output function of the old prefix hash plus a multiple of the token.
    """
    return mix64(prefix_hash + _GAMMA * np.uint64(token + 1))


@njit("uint64(uint64, int32[:])", cache=True)
def _extend_all(prefix_hash, tokens):  # type: ignore[no-untyped-def]
    for token in tokens:
        prefix_hash = extend(prefix_hash, token)
    return prefix_hash


def text_hash(seed: int, tokens: np.ndarray) -> int:
    """Returns the prefix hash after the whole text of a request, from its seed and its int32 `tokens`."""
    return int(_extend_all(np.uint64(seed), tokens))


@njit(cache=True)
def put(ring, position, token, level):  # type: ignore[no-untyped-def]
    """Writes a token with its evidence level into a ring buffer, and computes the prefix hash of the next position."""
    mask = len(ring) - 1
    entry = ring[position & mask]
    entry.token = token
    entry.level = level
    ring[(position + 1) & mask].prefix_hash = extend(entry.prefix_hash, token)


class DraftBuffers:
    """Owns the draft buffer of each request slot, with the tokens drafted beyond the committed text of its request.

    Messages may arrive in any order and any number of times. Each one extends or corrects a buffer, or changes nothing. If two
    messages have different tokens for a position, the later one wins, because a drafter with new weights may correct itself.
    """

    def __init__(self, num_slots: int, most_ahead: int, vocab_size: int) -> None:
        self.counts = np.zeros(4, np.int64)
        """Number of received draft tokens by outcome, int64 [4]. Tokens that are counted as wrong were counted as kept
        before."""
        self._slots = np.zeros(num_slots, _SLOT)
        self._slots["request"] = NO_REQUEST
        self._rings = new_rings(num_slots, most_ahead + 1)
        self._most_ahead = most_ahead
        self._vocab_size = vocab_size

    def open(self, slot: int, request: int, seed: int, text: np.ndarray) -> None:
        """Gives `slot` to the request with number `request`. The request's `text`, int32, counts as committed."""
        length = len(text)
        self._slots[slot] = (request, length, length, 0.0, 0.0)
        self._rings[slot, length % self._rings.shape[1]]["prefix_hash"] = text_hash(seed, text)

    def close(self, slots: np.ndarray) -> None:
        """Empties the buffers of `slots`, and accepts no draft tokens for them until they are opened again."""
        committed = self._slots["committed"][slots]
        self.counts[WRONG] += int((self._slots["end"][slots] - committed).sum())
        self._slots["request"][slots] = NO_REQUEST
        self._slots["end"][slots] = committed

    def commit(
        self, slots_b: np.ndarray, token_ids_SL: np.ndarray, lengths_b: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Extends the committed text of each slot to `lengths_b` tokens, and drops buffered draft tokens that differ from it.

        Returns a `COMMIT_ROW` for each slot [b], and the new tokens of all slots one after another. A `Step` carries both to
        the drafter.
        """
        rows_b = np.zeros(len(slots_b), COMMIT_ROW)
        slots = self._slots[slots_b]
        rows_b["request"] = slots["request"]
        rows_b["base"] = slots["committed"]
        rows_b["count"] = lengths_b - rows_b["base"]
        tokens = np.empty(rows_b["count"].sum(), np.int32)
        _commit(slots_b, token_ids_SL, lengths_b, self._slots, self._rings, rows_b, tokens, self.counts)
        rows_b["window"] = self.windows(slots_b)
        return rows_b, tokens

    def windows(self, slots_b: np.ndarray) -> np.ndarray:
        """Returns for each request how many tokens a drafter may draft beyond its committed text, uint8 [b].

        Drafting ends where the probability of acceptance has fallen to `LEAST_SURVIVAL`, at the recent acceptance rate of the
        request. This rule is that of SpecActor's Algorithm 2 (arXiv 2511.16193), but no request waits until all of these
        tokens are drafted.
        """
        hits_b = self._slots["num_hits"][slots_b]
        judged_b = self._slots["num_judged"][slots_b]
        rates_b = (hits_b + FIRST_RATE * PRIOR_STRENGTH) / (judged_b + PRIOR_STRENGTH)
        lengths_b = np.ceil(np.log(LEAST_SURVIVAL) / np.log(np.clip(rates_b, 1e-9, 1 - 1e-9)))
        return np.clip(lengths_b, 1, self._most_ahead).astype(np.uint8)

    def add(self, rows_N: np.ndarray) -> None:
        """Appends received draft tokens, `DRAFT_ROW` [N], to their buffers, and counts the outcome of each token."""
        _add(rows_N, self._slots, self._rings, self.counts, self._vocab_size)

    def write(self, table_SX: np.ndarray) -> None:
        """Writes all buffers to a draft stream's table, one row for each slot."""
        _write(self._slots, self._rings, table_SX)


@njit(void(int64[:], int32[:, :], int64[:], _SLOTS, RINGS, _COMMITS, int32[:], int64[:]), cache=True)
def _commit(slots_b, token_ids_SL, lengths_b, slots, rings, rows_b, new_tokens, counts):  # type: ignore[no-untyped-def]
    mask = rings.shape[1] - 1
    num_new = 0
    for b in range(len(slots_b)):
        state = slots[slots_b[b]]
        ring = rings[slots_b[b]]
        rows_b[b].prefix_hash = ring[state.committed & mask].prefix_hash
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


@njit(void(_DRAFTS, _SLOTS, RINGS, int64[:], int64), cache=True)
def _add(rows_N, slots, rings, counts, vocab_size):  # type: ignore[no-untyped-def]
    size = rings.shape[1]
    for n in range(len(rows_N)):
        row = rows_N[n]
        slot = row.owner & SLOT_MASK
        p = row.position
        is_valid = row.owner >= 0 and 0 <= row.token < vocab_size and 0 <= row.level < NUM_LEVELS
        if not is_valid or slot >= len(slots) or slots[slot].request != row.owner:
            counts[STALE] += 1
            continue
        state = slots[slot]
        entry = rings[slot, p & (size - 1)]
        if p < state.committed:
            counts[LATE] += 1
        elif p > state.end or p - state.committed >= size - 1 or entry.prefix_hash != row.prefix_hash:
            counts[STALE] += 1
        elif p == state.end or entry.token != row.token:
            counts[KEPT] += 1
            counts[WRONG] += state.end - p
            put(rings[slot], p, row.token, row.level)
            state.end = p + 1


@njit(void(_SLOTS, RINGS, int32[:, :]), cache=True)
def _write(slots, rings, table_SX):  # type: ignore[no-untyped-def]
    mask = rings.shape[1] - 1
    most_ahead = (table_SX.shape[1] - TOKENS) // 2
    for slot in range(len(slots)):
        state = slots[slot]
        count = min(state.end - state.committed, most_ahead)
        for i in range(count):
            entry = rings[slot, (state.committed + i) & mask]
            table_SX[slot, TOKENS + i] = entry.token
            table_SX[slot, TOKENS + most_ahead + i] = entry.level
        table_SX[slot, BASE] = state.committed
        table_SX[slot, COUNT] = count
