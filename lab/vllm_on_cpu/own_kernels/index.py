# SPDX-License-Identifier: Apache-2.0
"""The kernels of the context index on a CPU. `drafters/device_index.py` explains the tables.

The kernels mostly wait for memory. Each context has a cache line of its own, which is no longer in a cache after a forward
pass of the model. So a kernel first loads a word of each line that it needs, and reads the lines only then. The first loads
are independent of each other, so a core has many in flight. Functions return a mixture of the loaded words (`touched`), which
keeps the compiler from removing the loads.

In this module the tables are flat and indexed with unsigned numbers, because numba checks whether a signed index is negative.

Shapes: B rows of the batch, S request slots, L longest sequence, K draft positions, M context lengths, N text positions.
"""

import numpy as np
import torch
from numba import njit

from lab.vllm_on_cpu.own_kernels.tensors import on_tensors
from nemo_specrollout.drafters import device_index as layout
from nemo_specrollout.drafters.base import Proposals, Texts, num_looked_up
from nemo_specrollout.sampling.numba_common import mix64
from nemo_specrollout.sampling.seeds import GAMMA, MIX_2

CHUNK = 1024
"""Number of text positions learned at a time, so few that their keys stay in the L1 and L2 caches."""

_BUCKET_SLOTS, _NUM_CANDIDATES = layout.BUCKET_SLOTS, layout.NUM_CANDIDATES
_RANK_BITS, _RANK_MASK, _COUNT_MASK = layout.RANK_BITS, layout.RANK_MASK, layout.COUNT_MASK
_IN_USE, _GAMMA, _MIX_2 = np.uint64(layout.IN_USE), np.uint64(GAMMA), np.uint64(MIX_2)


def learn(lookup: layout.Lookup, texts: Texts, max_new: int) -> None:
    """Implements `ContextIndex.learn` on a CPU."""
    slots_B, *others = texts
    _learn(*_tables(lookup.index), slots_B.long(), lookup.salts_S, lookup.learned_S, *others, max_new)


def walk(lookup: layout.Lookup, texts: Texts, level_rates: torch.Tensor, floor: float, out: Proposals) -> None:
    """Implements `ContextIndex.walk` on a CPU."""
    slots_B, *others = texts
    most = num_looked_up(min(out.tokens_BK.shape[1], out.levels_BK.shape[1]))
    _walk(*_tables(lookup.index), slots_B.long(), lookup.salts_S, *others, level_rates, floor, most, *out)


def _tables(index: layout.ContextIndex) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    return index.words.view(-1), index.candidates.view(-1), np.array(index.orders)


@njit(cache=True, inline="always")
def _line_of(words, key):  # type: ignore[no-untyped-def]
    """Returns the index of the first word in the bucket of `key`."""
    return np.uint64(key) * np.uint64(_BUCKET_SLOTS) & np.uint64(len(words) - 1)


@njit(cache=True, inline="always")
def _candidate_at(slot, c):  # type: ignore[no-untyped-def]
    """Returns the index of candidate c of a slot."""
    return np.uint64(slot) * np.uint64(_NUM_CANDIDATES) + np.uint64(c)


@njit(cache=True, inline="always")
def _rank(word, reference):  # type: ignore[no-untyped-def]
    """Returns by how many ranks `word` is above `reference`, which is another word of the same bucket."""
    return np.int64(np.int16(word - reference))


@njit(cache=True)
def _find(words, key):  # type: ignore[no-untyped-def]
    """Returns the slot of `key`, or -1 if the index does not have the key."""
    line = _line_of(words, key)
    for i in range(_BUCKET_SLOTS):
        if (words[line + np.uint64(i)] ^ key) >> _RANK_BITS == 0:
            return np.int64(line + np.uint64(i))
    return np.int64(-1)


@njit(cache=True)
def _claim(words, candidates, key):  # type: ignore[no-untyped-def]
    """Returns the slot of `key`, and raises the slot's rank. A key without a slot gets one.

    This is a free slot of the key's bucket. If none is free, it is the slot of the lowest rank, whose counts are dropped.

    In the code, each slot i of the bucket has a cost. The key's own slot costs `OWN`, which is the least. A free slot costs
    `FREE`, and any other slot costs its rank. `best` is the minimum of cost * 8 + i, which has both the lowest cost and its
    slot.
    """
    line = _line_of(words, key)
    reference = words[line]
    least, best = np.int64(layout.NO_RANK), np.int64(layout.NO_RANK * _BUCKET_SLOTS)
    for i in range(_BUCKET_SLOTS):
        word = words[line + np.uint64(i)]
        rank = _rank(word, reference)
        if word != 0:
            least = min(least, rank)
        is_own = (word ^ key) >> _RANK_BITS == 0
        cost = np.int64(layout.OWN if is_own else layout.FREE if word == 0 else rank)
        best = min(best, cost * _BUCKET_SLOTS + i)
    if least == layout.NO_RANK:
        least = np.int64(0)
    slot = line + np.uint64(best & (_BUCKET_SLOTS - 1))
    if best < (layout.OWN + 1) * _BUCKET_SLOTS:
        rank = _rank(words[slot], reference)
        rank = max(rank, min(rank + layout.GAIN, least + layout.MAX_LEAD))
    else:
        rank = least + 1
        for c in range(_NUM_CANDIDATES):
            candidates[_candidate_at(slot, c)] = 0
    words[slot] = (key & ~_RANK_MASK) | ((reference + rank) & _RANK_MASK)
    return slot


@njit(cache=True)
def _count(candidates, slot, token):  # type: ignore[no-untyped-def]
    """Adds one to the count of `token` among the candidates of a slot.

    A new token replaces the candidate with the lowest count.
    """
    chosen = _candidate_at(slot, 0)
    least = _COUNT_MASK
    for c in range(_NUM_CANDIDATES):
        candidate = candidates[_candidate_at(slot, c)]
        if candidate >> 32 == token:
            chosen = _candidate_at(slot, c)
            break
        if candidate & _COUNT_MASK < least:
            least = candidate & _COUNT_MASK
            chosen = _candidate_at(slot, c)
    num = (candidates[chosen] & _COUNT_MASK) + 1
    candidates[chosen] = (np.int64(token) << 32) | num
    if num >= layout.MAX_COUNT:
        for c in range(_NUM_CANDIDATES):
            candidate = candidates[_candidate_at(slot, c)]
            candidates[_candidate_at(slot, c)] = (candidate & ~_COUNT_MASK) | ((candidate & _COUNT_MASK) >> 1)


@njit(cache=True)
def _likeliest(candidates, slot, order):  # type: ignore[no-untyped-def]
    """Returns the candidate token with the highest count, and its evidence level. The level is -1 if there is no candidate.

    Of equal counts the first one wins. A level is 4 * (grade of the context's length) + (grade of the candidate's share of the
    counts). One is added to the total count, so that a share of few counts gets a lower grade.
    """
    total = np.int64(0)
    best = np.int64(0)
    token = np.int64(0)
    for c in range(_NUM_CANDIDATES):
        candidate = candidates[_candidate_at(slot, c)]
        num = candidate & _COUNT_MASK
        total += num
        if num > best:
            best = num
            token = candidate >> 32
    by_share = int(20 * best >= 9 * (total + 1)) + int(5 * best >= 3 * (total + 1)) + int(4 * best >= 3 * (total + 1))
    by_order = int(order > 2) + int(order > 4) + int(order > 6)
    return token, by_order * 4 + by_share if best > 0 else -1


@njit(cache=True)
def _keys(words, orders_M, salt, token_ids_SL, s, length, drafts_BK, b, num_drafts, keys_NM, n):  # type: ignore[no-untyped-def]
    """Writes the keys of the contexts at the end of a text to row n of `keys_NM`, one for each context length.

    The text is the first `length` tokens of request s, followed by `num_drafts` drafts of row b. A context that is longer than
    the text has the key 0. The cache lines of the keys' buckets are loaded as well.
    """
    state = np.uint64(salt)
    factor = _GAMMA
    taken = 0
    touched = np.int64(0)
    for m in range(len(orders_M)):
        if orders_M[m] > length + num_drafts:
            for rest in range(m, len(orders_M)):
                keys_NM[n, rest] = 0
            break
        while taken < orders_M[m]:
            taken += 1
            i = num_drafts - taken
            token = drafts_BK[b, i] if i >= 0 else token_ids_SL[s, length + i]
            state += (np.uint64(token) + np.uint64(1)) * factor
            factor *= _MIX_2
        key = np.int64(mix64(state) | _IN_USE)
        keys_NM[n, m] = key
        touched ^= words[_line_of(words, key)]
    return touched


@njit(cache=True)
def _count_all(words, candidates, keys_NM, tokens_N, num):  # type: ignore[no-untyped-def]
    """Counts each of the first `num` tokens as a continuation of its contexts.

    The contexts' buckets must be in a cache already.
    """
    touched = np.int64(0)
    for n in range(num):
        for m in range(keys_NM.shape[1]):
            if keys_NM[n, m] != 0:
                slot = max(_find(words, keys_NM[n, m]), 0)
                touched ^= candidates[_candidate_at(slot, 0)]
    for n in range(num):
        for m in range(keys_NM.shape[1]):
            if keys_NM[n, m] != 0:
                _count(candidates, _claim(words, candidates, keys_NM[n, m]), tokens_N[n])
    return touched


@on_tensors
@njit(
    "int64(int64[::1], int64[::1], int64[::1], int64[:], int64[:], int32[:], int32[:], int32[:,:], int64)",
    cache=True,
    nogil=True,
)
def _learn(  # type: ignore[no-untyped-def]
    words, candidates, orders_M, slots_B, salts_S, learned_S, total_len_S, token_ids_SL, max_new
):
    longest = token_ids_SL.shape[1]
    num_slots = min(len(token_ids_SL), len(salts_S), len(learned_S), len(total_len_S))
    keys_NM = np.empty((CHUNK, len(orders_M)), np.int64)
    tokens_N = np.empty(CHUNK, np.int32)
    touched = np.int64(0)
    n, room = 0, layout.MAX_LISTED
    for b in range(len(slots_B)):
        s = slots_B[b]
        if s < 0 or s >= num_slots:
            continue
        start = max(learned_S[s], 0)
        end = min(total_len_S[s], longest, start + min(max_new, room))
        room -= max(end - start, 0)
        learned_S[s] = end
        for i in range(start, end):
            tokens_N[n] = token_ids_SL[s, i]
            if tokens_N[n] < 0:
                continue
            touched ^= _keys(words, orders_M, salts_S[s], token_ids_SL, s, i, token_ids_SL, s, 0, keys_NM, n)
            n += 1
            if n == CHUNK:
                touched ^= _count_all(words, candidates, keys_NM, tokens_N, n)
                n = 0
    return touched ^ _count_all(words, candidates, keys_NM, tokens_N, n)


@njit(cache=True)
def _find_longest(words, candidates, orders_M, keys_BM, b):  # type: ignore[no-untyped-def]
    """Finds row b's longest known context. Returns its slot, its length, and a word of its candidates, or -1, 0 and 0 if no
    context is known.

    Reading the word loads the cache line of the candidates.
    """
    for m in range(len(orders_M) - 1, -1, -1):
        if keys_BM[b, m] != 0:
            slot = _find(words, keys_BM[b, m])
            if slot >= 0:
                return slot, orders_M[m], candidates[_candidate_at(slot, 0)]
    return np.int64(-1), np.int64(0), np.int64(0)


@on_tensors
@njit(
    "int64(int64[::1], int64[::1], int64[::1], int64[:], int64[:], int32[:], int32[:,:], float32[:], float32, int64,"
    " int32[:,:], int8[:,:], int32[:])",
    cache=True,
    nogil=True,
)
def _walk(  # type: ignore[no-untyped-def]
    words, candidates, orders_M, slots_B, salts_S, total_len_S, token_ids_SL, level_rates, floor,
    num_positions, tokens_BK, levels_BK, found_B,
):  # fmt: skip
    num_rows = min(len(slots_B), len(tokens_BK), len(levels_BK), len(found_B))
    longest = token_ids_SL.shape[1]
    num_slots = min(len(token_ids_SL), len(salts_S), len(total_len_S))
    keys_BM = np.empty((num_rows, len(orders_M)), np.int64)
    found_slots_B = np.empty(num_rows, np.int64)
    orders_B = np.empty(num_rows, np.int64)
    survival_B = np.ones(num_rows, np.float32)
    touched = np.int64(0)
    found_B[:num_rows] = 0
    for k in range(num_positions):
        for b in range(num_rows):
            s = slots_B[b]
            found_slots_B[b] = -1
            if found_B[b] == k and s >= 0 and s < num_slots and salts_S[s] != layout.NO_SALT:
                found_slots_B[b] = 0
                length = min(total_len_S[s], longest)
                touched ^= _keys(words, orders_M, salts_S[s], token_ids_SL, s, length, tokens_BK, b, k, keys_BM, b)
        for b in range(num_rows):
            if found_slots_B[b] >= 0:
                found_slots_B[b], orders_B[b], loaded = _find_longest(words, candidates, orders_M, keys_BM, b)
                touched ^= loaded
        for b in range(num_rows):
            if found_slots_B[b] >= 0:
                token, level = _likeliest(candidates, found_slots_B[b], orders_B[b])
                survival_B[b] *= level_rates[max(level, 0)]
                if level >= 0 and survival_B[b] >= floor:
                    tokens_BK[b, k] = token
                    levels_BK[b, k] = level
                    found_B[b] = k + 1
    return touched
