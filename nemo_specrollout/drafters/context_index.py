# SPDX-License-Identifier: Apache-2.0
"""Which token followed a context: counts by the hash of the last m tokens, in a table of fixed size.

One table serves every request. A `salt` separates texts that must not see each other, and joins those that may:
requests of one group share theirs. Memory is bounded: a full neighbourhood gives up its least used context.

Shapes: B requests, K draft positions, C candidate tokens of a context.
"""

import numpy as np
from numba import njit

from nemo_specrollout.sampling.constants import GAMMA, MIX_1, MIX_2

NUM_CANDIDATES = 4
SLOT_WORDS = 8
PROBE_LENGTH = 8
MAX_COUNT = 1 << 14
COUNT_MASK = (1 << 32) - 1

_GAMMA = np.uint64(GAMMA)
_MIX_1 = np.uint64(MIX_1)
_MIX_2 = np.uint64(MIX_2)


def context_orders(shortest: int, longest: int) -> tuple[int, ...]:
    """Context lengths to count: up to 2, then every second. More would cost time and tell little more."""
    return (*range(shortest, min(longest, 2) + 1), *range(4, longest + 1, 2))


class ContextIndex:
    """A hash table from (salt, last m tokens) to the tokens seen next and how often.

    `orders` are the context lengths m, ascending. A slot is one cache line of eight int64: the context's key (0: free),
    then C candidates as token * 2^32 + count.
    """

    def __init__(self, num_slots: int, orders: tuple[int, ...]) -> None:
        if num_slots & (num_slots - 1) or num_slots < PROBE_LENGTH:
            raise ValueError(f"num_slots must be a power of two of at least {PROBE_LENGTH}, got {num_slots}")
        self.orders = np.array(orders, np.int64)
        self.slots = np.zeros((num_slots, SLOT_WORDS), np.int64)

    @property
    def num_bytes(self) -> int:
        return self.slots.nbytes

    def learn(self, salts_B: np.ndarray, token_ids_BL: np.ndarray, starts_B: np.ndarray, ends_B: np.ndarray) -> None:
        """Counts tokens `starts_B` to `ends_B` of each row as continuations of what precedes them."""
        _learn(self.slots, self.orders, salts_B, token_ids_BL, starts_B, ends_B)

    def walk(
        self,
        salts_B: np.ndarray,
        token_ids_BL: np.ndarray,
        lengths_B: np.ndarray,
        tokens_BK: np.ndarray,
        levels_BK: np.ndarray,
        found_B: np.ndarray,
    ) -> None:
        """Extends each row by the likeliest continuation of its longest known context, again and again.

        Writes tokens int32 [B, K], their evidence levels int8 [B, K], and how many were found int64 [B].
        """
        _walk(self.slots, self.orders, salts_B, token_ids_BL, lengths_B, tokens_BK, levels_BK, found_B)


@njit(cache=True, inline="always")
def _extend(state, token):  # type: ignore[no-untyped-def]
    state = (state ^ (np.uint64(token) + np.uint64(1))) * _MIX_1
    return (state ^ (state >> np.uint64(29))) * _MIX_2


@njit(cache=True, inline="always")
def _finish(state, order):  # type: ignore[no-untyped-def]
    key = (state + np.uint64(order)) * _GAMMA
    return np.int64((key ^ (key >> np.uint64(32))) | np.uint64(1))


@njit(cache=True, inline="always")
def _home(key, num_slots):  # type: ignore[no-untyped-def]
    return (key >> 20) & (num_slots - 1)


@njit(cache=True)
def _find(slots, key):  # type: ignore[no-untyped-def]
    home = _home(key, len(slots))
    for probe in range(PROBE_LENGTH):
        slot = (home + probe) & (len(slots) - 1)
        if slots[slot, 0] == key:
            return slot
        if slots[slot, 0] == 0:
            return -1
    return -1


@njit(cache=True)
def _claim(slots, key):  # type: ignore[no-untyped-def]
    """The slot of `key`, taking a free one or the least used one of its neighbourhood."""
    home = _home(key, len(slots))
    victim = home
    least = np.int64(1) << 60
    for probe in range(PROBE_LENGTH):
        slot = (home + probe) & (len(slots) - 1)
        if slots[slot, 0] == key:
            return slot
        if slots[slot, 0] == 0:
            victim = slot
            break
        total = np.int64(0)
        for c in range(1, NUM_CANDIDATES + 1):
            total += slots[slot, c] & COUNT_MASK
        if total < least:
            least = total
            victim = slot
    slots[victim, :] = 0
    slots[victim, 0] = key
    return victim


@njit(cache=True)
def _count(slot_words, token):  # type: ignore[no-untyped-def]
    """Space-saving counts (Metwally et al. 2005): a token that is not among the candidates replaces the rarest."""
    rarest = 1
    for c in range(1, NUM_CANDIDATES + 1):
        count = slot_words[c] & COUNT_MASK
        if count > 0 and slot_words[c] >> 32 == token:
            slot_words[c] += count < MAX_COUNT
            return
        if count < slot_words[rarest] & COUNT_MASK:
            rarest = c
    slot_words[rarest] = (np.int64(token) << 32) | min((slot_words[rarest] & COUNT_MASK) + 1, MAX_COUNT)


@njit("void(int64[:,:], int64[:], uint64[:], int32[:,:], int64[:], int64[:])", cache=True)
def _learn(slots, orders, salts_B, token_ids_BL, starts_B, ends_B):  # type: ignore[no-untyped-def]
    for b in range(len(salts_B)):
        for i in range(starts_B[b], ends_B[b]):
            state = salts_B[b]
            taken = 0
            for order in orders:
                if order > i:
                    break
                while taken < order:
                    taken += 1
                    state = _extend(state, token_ids_BL[b, i - taken])
                slot = _claim(slots, _finish(state, order))
                _count(slots[slot], token_ids_BL[b, i])


@njit(cache=True)
def _level(order, best, total):  # type: ignore[no-untyped-def]
    """Evidence in 16 grades: four by the context's length, four by the share of the best candidate, shrunk by one."""
    share = best / (total + 1.0)
    by_share = 0 if share < 0.45 else 1 if share < 0.6 else 2 if share < 0.75 else 3
    by_order = 0 if order <= 2 else 1 if order <= 4 else 2 if order <= 6 else 3
    return by_order * 4 + by_share


@njit("void(int64[:,:], int64[:], uint64[:], int32[:,:], int64[:], int32[:,:], int8[:,:], int64[:])", cache=True)
def _walk(slots, orders, salts_B, token_ids_BL, lengths_B, tokens_BK, levels_BK, found_B):  # type: ignore[no-untyped-def]
    num_orders = len(orders)
    keys = np.empty(num_orders, np.int64)
    for b in range(len(salts_B)):
        found_B[b] = 0
        for k in range(tokens_BK.shape[1]):
            length = lengths_B[b] + k
            state = salts_B[b]
            taken = 0
            known = 0
            for n in range(num_orders):
                if orders[n] > length:
                    break
                while taken < orders[n]:
                    taken += 1
                    i = length - taken
                    previous = tokens_BK[b, i - lengths_B[b]] if i >= lengths_B[b] else token_ids_BL[b, i]
                    state = _extend(state, previous)
                keys[n] = _finish(state, orders[n])
                known = n + 1
            hit = False
            for n in range(known - 1, -1, -1):
                slot = _find(slots, keys[n])
                if slot < 0:
                    continue
                total = np.int64(0)
                best = np.int64(0)
                token = np.int64(0)
                for c in range(1, NUM_CANDIDATES + 1):
                    count = slots[slot, c] & COUNT_MASK
                    total += count
                    if count > best:
                        best = count
                        token = slots[slot, c] >> 32
                tokens_BK[b, k] = token
                levels_BK[b, k] = _level(orders[n], best, total)
                hit = True
                break
            if not hit:
                break
            found_B[b] = k + 1
