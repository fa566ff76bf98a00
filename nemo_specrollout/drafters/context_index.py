# SPDX-License-Identifier: Apache-2.0
"""Which token followed a context: counts by the hash of the last m tokens, in a table of fixed size.

One table serves every request. A `salt` separates texts that must not see each other, and joins those that may:
requests of one group share theirs. Memory is bounded: a full neighbourhood gives up its least used context.

Shapes: B requests, K draft positions, N table slots, C candidate tokens of a context.
"""

import numpy as np
from numba import njit

from nemo_specrollout.sampling.constants import GAMMA, MIX_1, MIX_2

NUM_CANDIDATES = 4
PROBE_LENGTH = 8
MAX_COUNT = 1 << 14

_GAMMA = np.uint64(GAMMA)
_MIX_1 = np.uint64(MIX_1)
_MIX_2 = np.uint64(MIX_2)


def context_orders(shortest: int, longest: int) -> tuple[int, ...]:
    """Context lengths to count: each up to 4, then every second. More would cost time and tell little more."""
    return (*range(shortest, min(longest, 4) + 1), *range(6, longest + 1, 2))


class ContextIndex:
    """A hash table from (salt, last m tokens) to the tokens seen next and how often.

    `orders` are the context lengths m, ascending. Slots hold a 64-bit key (0: free), C candidates and their counts.
    """

    def __init__(self, num_slots: int, orders: tuple[int, ...]) -> None:
        if num_slots & (num_slots - 1) or num_slots < PROBE_LENGTH:
            raise ValueError(f"num_slots must be a power of two of at least {PROBE_LENGTH}, got {num_slots}")
        self.orders = np.array(orders, np.int64)
        self.keys_N = np.zeros(num_slots, np.uint64)
        self.tokens_NC = np.zeros((num_slots, NUM_CANDIDATES), np.int32)
        self.counts_NC = np.zeros((num_slots, NUM_CANDIDATES), np.int32)

    @property
    def num_bytes(self) -> int:
        return self.keys_N.nbytes + self.tokens_NC.nbytes + self.counts_NC.nbytes

    def learn(self, salts_B: np.ndarray, token_ids_BL: np.ndarray, starts_B: np.ndarray, ends_B: np.ndarray) -> None:
        """Counts tokens `starts_B` to `ends_B` of each row as continuations of what precedes them."""
        _learn(self.keys_N, self.tokens_NC, self.counts_NC, self.orders, salts_B, token_ids_BL, starts_B, ends_B)

    def walk(
        self, salts_B: np.ndarray, token_ids_BL: np.ndarray, lengths_B: np.ndarray, max_tokens: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Extends each row by the likeliest continuation of its longest known context, again and again.

        Returns tokens int32 [B, K], how many were found [B], and their evidence levels int8 [B, K].
        """
        num_rows = len(salts_B)
        tokens_BK = np.zeros((num_rows, max_tokens), np.int32)
        levels_BK = np.zeros((num_rows, max_tokens), np.int8)
        found_B = np.zeros(num_rows, np.int64)
        _walk(
            self.keys_N, self.tokens_NC, self.counts_NC, self.orders,
            salts_B, token_ids_BL, lengths_B, tokens_BK, levels_BK, found_B,
        )  # fmt: skip
        return tokens_BK, found_B, levels_BK


@njit(cache=True, inline="always")
def _extend(state, token):  # type: ignore[no-untyped-def]
    state = (state ^ (np.uint64(token) + np.uint64(1))) * _MIX_1
    return (state ^ (state >> np.uint64(29))) * _MIX_2


@njit(cache=True, inline="always")
def _finish(state, order):  # type: ignore[no-untyped-def]
    key = (state + np.uint64(order)) * _GAMMA
    return (key ^ (key >> np.uint64(32))) | np.uint64(1)


@njit(cache=True)
def _find(keys_N, key):  # type: ignore[no-untyped-def]
    mask = len(keys_N) - 1
    home = np.int64(key >> np.uint64(20)) & mask
    for probe in range(PROBE_LENGTH):
        slot = (home + probe) & mask
        if keys_N[slot] == key:
            return slot
        if keys_N[slot] == 0:
            return -1
    return -1


@njit(cache=True)
def _claim(keys_N, counts_NC, key):  # type: ignore[no-untyped-def]
    """The slot of `key`, taking a free one or the least used one of its neighbourhood."""
    mask = len(keys_N) - 1
    home = np.int64(key >> np.uint64(20)) & mask
    victim = home
    least = np.int64(1) << 60
    for probe in range(PROBE_LENGTH):
        slot = (home + probe) & mask
        if keys_N[slot] == key:
            return slot
        total = np.int64(0)
        for c in range(NUM_CANDIDATES):
            total += counts_NC[slot, c]
        if keys_N[slot] == 0:
            victim = slot
            break
        if total < least:
            least = total
            victim = slot
    keys_N[victim] = key
    counts_NC[victim, :] = 0
    return victim


@njit(cache=True)
def _count(tokens_C, counts_C, token):  # type: ignore[no-untyped-def]
    """Space-saving counts (Metwally et al. 2005): a token that is not among the candidates replaces the rarest."""
    rarest = 0
    for c in range(NUM_CANDIDATES):
        if counts_C[c] > 0 and tokens_C[c] == token:
            counts_C[c] = min(counts_C[c] + 1, MAX_COUNT)
            return
        if counts_C[c] < counts_C[rarest]:
            rarest = c
    tokens_C[rarest] = token
    counts_C[rarest] = min(counts_C[rarest] + 1, MAX_COUNT)


@njit(cache=True)
def _learn(keys_N, tokens_NC, counts_NC, orders, salts_B, token_ids_BL, starts_B, ends_B):  # type: ignore[no-untyped-def]
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
                slot = _claim(keys_N, counts_NC, _finish(state, order))
                _count(tokens_NC[slot], counts_NC[slot], token_ids_BL[b, i])


@njit(cache=True)
def _level(order, best, total):  # type: ignore[no-untyped-def]
    """Evidence in 16 grades: four by the context's length, four by the share of the best candidate, shrunk by one."""
    share = best / (total + 1.0)
    by_share = 0 if share < 0.45 else 1 if share < 0.6 else 2 if share < 0.75 else 3
    by_order = 0 if order <= 2 else 1 if order <= 4 else 2 if order <= 6 else 3
    return by_order * 4 + by_share


@njit(cache=True)
def _walk(keys_N, tokens_NC, counts_NC, orders, salts_B, token_ids_BL, lengths_B, tokens_BK, levels_BK, found_B):  # type: ignore[no-untyped-def]
    num_orders = len(orders)
    keys = np.empty(num_orders, np.uint64)
    for b in range(len(salts_B)):
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
                    token = tokens_BK[b, i - lengths_B[b]] if i >= lengths_B[b] else token_ids_BL[b, i]
                    state = _extend(state, token)
                keys[n] = _finish(state, orders[n])
                known = n + 1
            hit = False
            for n in range(known - 1, -1, -1):
                slot = _find(keys_N, keys[n])
                if slot < 0:
                    continue
                total = 0
                best = 0
                for c in range(NUM_CANDIDATES):
                    total += counts_NC[slot, c]
                    if counts_NC[slot, c] > counts_NC[slot, best]:
                        best = c
                tokens_BK[b, k] = tokens_NC[slot, best]
                levels_BK[b, k] = _level(orders[n], counts_NC[slot, best], total)
                hit = True
                break
            if not hit:
                break
            found_B[b] = k + 1
