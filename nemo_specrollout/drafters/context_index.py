# SPDX-License-Identifier: Apache-2.0
"""Which token followed a context: counts by the hash of the last m tokens, in a table of fixed size.

One table serves every request. A `salt` separates texts that must not see each other, and joins those that may:
requests of one group share theirs. Memory is bounded: a full neighbourhood gives up its least used context.

What it costs is waiting for memory. So a neighbourhood's keys fill one cache line, and the lines that a step needs are
first all asked for, then read.

Shapes: B requests, K draft positions, C candidate tokens of a context.
"""

import mmap

import numpy as np
from numba import njit

from nemo_specrollout.sampling.constants import GAMMA, MIX_1, MIX_2

NUM_CANDIDATES = 4
BUCKET_SLOTS = 8
HUGE_PAGE = 1 << 21
USES_MASK = 0xFFFF
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

    `orders` are the context lengths m, ascending. A bucket of eight contexts holds a word for each: 48 bits of its key
    above 16 bits of how often it was counted (0: free). `candidates` int64 [slots, C] are token * 2^32 + count.
    """

    def __init__(self, num_slots: int, orders: tuple[int, ...]) -> None:
        if num_slots & (num_slots - 1) or num_slots < BUCKET_SLOTS:
            raise ValueError(f"num_slots must be a power of two of at least {BUCKET_SLOTS}, got {num_slots}")
        self.orders = np.array(orders, np.int64)
        self.words = _zeros(num_slots // BUCKET_SLOTS, BUCKET_SLOTS)
        self.candidates = _zeros(num_slots, NUM_CANDIDATES)

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.candidates.nbytes

    def learn(self, salts_B: np.ndarray, token_ids_BL: np.ndarray, starts_B: np.ndarray, ends_B: np.ndarray) -> None:
        """Counts tokens `starts_B` to `ends_B` of each row as continuations of what precedes them."""
        _learn(self.words, self.candidates, self.orders, salts_B, token_ids_BL, starts_B, ends_B)

    def learn_and_walk(
        self,
        salts_B: np.ndarray,
        token_ids_BL: np.ndarray,
        starts_B: np.ndarray,
        ends_B: np.ndarray,
        level_rates: np.ndarray,
        floor: float,
        tokens_BK: np.ndarray,
        levels_BK: np.ndarray,
        found_B: np.ndarray,
    ) -> None:
        """Learns, then extends each row by the likeliest continuation of its longest known context, again and again.

        Stops where the product of the levels' rates falls below `floor`. Writes tokens int32 [B, K], their evidence
        levels int8 [B, K], and how many were found int64 [B]. One call for both: a cold call costs 30 us by itself.
        """
        _learn_and_walk(
            self.words, self.candidates, self.orders, salts_B, token_ids_BL, starts_B, ends_B, level_rates, floor,
            tokens_BK, levels_BK, found_B,
        )  # fmt: skip


def _zeros(num_rows: int, num_columns: int) -> np.ndarray:
    """int64 zeros that start a huge page, where the system has them: with small ones, half the waiting is for page walks."""
    size = num_rows * num_columns * 8
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    start = -everything.ctypes.data % HUGE_PAGE
    return everything[start : start + size].view(np.int64).reshape(num_rows, num_columns)


@njit(cache=True, inline="always")
def _add(state, token, factor):  # type: ignore[no-untyped-def]
    """One more token of a context: a sum of products, for those do not wait for each other as a chain of mixes would."""
    return state + (np.uint64(token) + np.uint64(1)) * factor


@njit(cache=True, inline="always")
def _key(state, order):  # type: ignore[no-untyped-def]
    """64 bits of which the low ones choose the bucket and the high 48 tell contexts apart; never zero there."""
    key = (state ^ (state >> np.uint64(32))) * (_MIX_1 + np.uint64(2 * order))
    return np.int64((key ^ (key >> np.uint64(29))) | np.uint64(USES_MASK + 1))


@njit(cache=True, inline="always")
def _bucket(key, num_buckets):  # type: ignore[no-untyped-def]
    return key & (num_buckets - 1)


@njit(cache=True)
def _find(words, key):  # type: ignore[no-untyped-def]
    """The slot of `key`, or -1."""
    bucket = _bucket(key, len(words))
    for i in range(BUCKET_SLOTS):
        if (words[bucket, i] ^ key) >> 16 == 0:
            return bucket * BUCKET_SLOTS + i
    return -1


@njit(cache=True)
def _claim(words, candidates, key):  # type: ignore[no-untyped-def]
    """The slot of `key`, with one use more: its own, or the least used of its bucket."""
    bucket = _bucket(key, len(words))
    least = 0
    for i in range(BUCKET_SLOTS):
        word = words[bucket, i]
        if (word ^ key) >> 16 == 0:
            words[bucket, i] = word + (word & USES_MASK < USES_MASK)
            return bucket * BUCKET_SLOTS + i
        if word & USES_MASK < words[bucket, least] & USES_MASK:
            least = i
    words[bucket, least] = (key & ~USES_MASK) + 1
    candidates[bucket * BUCKET_SLOTS + least, :] = 0
    return bucket * BUCKET_SLOTS + least


@njit(cache=True)
def _count(candidates_C, token):  # type: ignore[no-untyped-def]
    """Space-saving counts (Metwally et al. 2005): a token that is not among the candidates replaces the rarest."""
    rarest = 0
    for c in range(NUM_CANDIDATES):
        count = candidates_C[c] & COUNT_MASK
        if count > 0 and candidates_C[c] >> 32 == token:
            candidates_C[c] += count < MAX_COUNT
            return
        if count < candidates_C[rarest] & COUNT_MASK:
            rarest = c
    candidates_C[rarest] = (np.int64(token) << 32) | min((candidates_C[rarest] & COUNT_MASK) + 1, MAX_COUNT)


@njit("int64(int64[:,::1], int64[:,::1], int64[::1], uint64[::1], int32[:,:], int64[::1], int64[::1])", cache=True)
def _learn(words, candidates, orders, salts_B, token_ids_BL, starts_B, ends_B):  # type: ignore[no-untyped-def]
    keys = np.zeros(((ends_B - starts_B).sum(), len(orders)), np.int64)
    asked_for = np.int64(0)
    n = 0
    for b in range(len(salts_B)):
        for i in range(starts_B[b], ends_B[b]):
            state = salts_B[b]
            factor = _GAMMA
            taken = 0
            for m in range(len(orders)):
                if orders[m] > i:
                    break
                while taken < orders[m]:
                    taken += 1
                    state = _add(state, token_ids_BL[b, i - taken], factor)
                    factor *= _MIX_2
                keys[n, m] = _key(state, orders[m])
                asked_for ^= words[_bucket(keys[n, m], len(words)), 0]
            n += 1
    n = 0
    for b in range(len(salts_B)):
        for i in range(starts_B[b], ends_B[b]):
            for m in range(len(orders)):
                if keys[n, m] == 0:
                    break
                slot = _claim(words, candidates, keys[n, m])
                _count(candidates[slot], token_ids_BL[b, i])
            n += 1
    return asked_for


@njit(cache=True)
def _level(order, best, total):  # type: ignore[no-untyped-def]
    """Evidence in 16 grades: four by the context's length, four by the share of the best candidate, shrunk by one."""
    share = best / (total + 1.0)
    by_share = 0 if share < 0.45 else 1 if share < 0.6 else 2 if share < 0.75 else 3
    by_order = 0 if order <= 2 else 1 if order <= 4 else 2 if order <= 6 else 3
    return by_order * 4 + by_share


@njit(
    "int64(int64[:,::1], int64[:,::1], int64[::1], uint64[::1], int32[:,:], int64[::1], float64[::1], float64,"
    " int32[:,:], int8[:,:], int64[:])",
    cache=True,
)
def _walk(  # type: ignore[no-untyped-def]
    words, candidates, orders, salts_B, token_ids_BL, lengths_B, level_rates, floor, tokens_BK, levels_BK, found_B
):
    num_requests, num_positions = tokens_BK.shape
    keys = np.zeros((num_requests, len(orders)), np.int64)
    asked_for = np.int64(0)
    found_B[:] = 0
    hope_B = np.ones(num_requests)
    for k in range(num_positions):
        for b in range(num_requests):
            if found_B[b] < k:
                continue
            state = salts_B[b]
            factor = _GAMMA
            taken = 0
            for m in range(len(orders)):
                if orders[m] > lengths_B[b] + k:
                    break
                while taken < orders[m]:
                    taken += 1
                    token = tokens_BK[b, k - taken] if taken <= k else token_ids_BL[b, lengths_B[b] + k - taken]
                    state = _add(state, token, factor)
                    factor *= _MIX_2
                keys[b, m] = _key(state, orders[m])
                asked_for ^= words[_bucket(keys[b, m], len(words)), 0]
        for b in range(num_requests):
            if found_B[b] < k:
                continue
            for m in range(len(orders) - 1, -1, -1):
                slot = _find(words, keys[b, m]) if keys[b, m] != 0 else -1
                if slot < 0:
                    continue
                total = np.int64(0)
                best = np.int64(0)
                token = np.int64(0)
                for c in range(NUM_CANDIDATES):
                    count = candidates[slot, c] & COUNT_MASK
                    total += count
                    if count > best:
                        best = count
                        token = candidates[slot, c] >> 32
                level = _level(orders[m], best, total)
                hope_B[b] *= level_rates[level]
                if hope_B[b] >= floor:
                    tokens_BK[b, k] = token
                    levels_BK[b, k] = level
                    found_B[b] = k + 1
                break
    return asked_for


@njit(
    "int64(int64[:,::1], int64[:,::1], int64[::1], uint64[::1], int32[:,:], int64[::1], int64[::1], float64[::1],"
    " float64, int32[:,:], int8[:,:], int64[:])",
    cache=True,
)
def _learn_and_walk(  # type: ignore[no-untyped-def]
    words,
    candidates,
    orders,
    salts_B,
    token_ids_BL,
    starts_B,
    ends_B,
    level_rates,
    floor,
    tokens_BK,
    levels_BK,
    found_B,
):
    asked_for = _learn(words, candidates, orders, salts_B, token_ids_BL, starts_B, ends_B)
    return asked_for ^ _walk(
        words, candidates, orders, salts_B, token_ids_BL, ends_B, level_rates, floor, tokens_BK, levels_BK, found_B
    )
