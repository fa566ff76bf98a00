# SPDX-License-Identifier: Apache-2.0
"""The context index's CPU body, compiled by numba. `index_layout.py` says what the tables hold.

What it costs is waiting for memory: each context lies in a line of its own, cold after a model's step. So the lines that
a step needs are first all asked for, then read: the loads do not depend on each other, and the core keeps many in flight.

Shapes: B rows of the batch, S request slots, L longest sequence, K draft positions, M context lengths, N contexts' ends.
"""

import numpy as np
import torch
from numba import njit

from nemo_specrollout.drafters import index_layout as layout
from nemo_specrollout.drafters.index_slots_numba import candidate_at, claim, count, find, likeliest, line_of
from nemo_specrollout.sampling import constants
from nemo_specrollout.sampling.cpu_mix import mix64

CHUNK = 1024  # positions learned at a time: their keys stay in the L1 and L2 caches

_IN_USE = np.uint64(layout.IN_USE)
_GAMMA = np.uint64(constants.GAMMA)
_MIX_2 = np.uint64(constants.MIX_2)
_ONE = np.uint64(1)


def learn(
    words: torch.Tensor,
    candidates: torch.Tensor,
    order_bits: int,
    idx_mapping_B: torch.Tensor,
    salts_S: torch.Tensor,
    learned_S: torch.Tensor,
    total_len_S: torch.Tensor,
    token_ids_SL: torch.Tensor,
    max_new: int,
) -> None:
    """`ContextIndex.learn` for tensors of a CPU; bit m of `order_bits` says that contexts of m tokens are counted."""
    _learn(
        words.numpy().reshape(-1), candidates.numpy().reshape(-1), order_bits, _int64(idx_mapping_B), salts_S.numpy(),
        learned_S.numpy(), total_len_S.numpy(), token_ids_SL.numpy(), max_new,
    )  # fmt: skip


def walk(
    words: torch.Tensor,
    candidates: torch.Tensor,
    order_bits: int,
    idx_mapping_B: torch.Tensor,
    salts_S: torch.Tensor,
    total_len_S: torch.Tensor,
    token_ids_SL: torch.Tensor,
    level_rates: torch.Tensor,
    floor: float,
    tokens_BK: torch.Tensor,
    levels_BK: torch.Tensor,
    found_B: torch.Tensor,
) -> None:
    """`ContextIndex.walk` for tensors of a CPU."""
    _walk(
        words.numpy().reshape(-1), candidates.numpy().reshape(-1), order_bits, _int64(idx_mapping_B), salts_S.numpy(),
        total_len_S.numpy(), token_ids_SL.numpy(), level_rates.numpy(), floor, tokens_BK.numpy(), levels_BK.numpy(),
        found_B.numpy(),
    )  # fmt: skip


def _int64(rows: torch.Tensor) -> np.ndarray:
    return rows.numpy().astype(np.int64, copy=False)


@njit(cache=True)
def _orders(order_bits):  # type: ignore[no-untyped-def]
    orders_M = np.empty(64, np.int64)
    num_orders = 0
    for m in range(63):
        if (order_bits >> m) & 1:
            orders_M[num_orders] = m
            num_orders += 1
    return orders_M[:num_orders]


@njit(cache=True)
def _keys(words, orders_M, salt, token_ids_SL, s, length, drafts_BK, b, num_drafts, keys_NM, n):  # type: ignore[no-untyped-def]
    """Writes to row n the keys of what `length` tokens of text s and then `num_drafts` of drafts b end in, zero where
    they are too few; asks memory for their buckets. What it returns keeps the compiler from leaving that out."""
    state = np.uint64(salt)
    factor = _GAMMA
    taken = 0
    asked_for = np.int64(0)
    for m in range(len(orders_M)):
        if orders_M[m] > length + num_drafts:
            for rest in range(m, len(orders_M)):
                keys_NM[n, rest] = 0
            break
        while taken < orders_M[m]:
            taken += 1
            i = num_drafts - taken
            token = drafts_BK[b, i] if i >= 0 else token_ids_SL[s, length + i]
            state += (np.uint64(token) + _ONE) * factor
            factor *= _MIX_2
        key = np.int64(mix64(state) | _IN_USE)
        keys_NM[n, m] = key
        asked_for ^= words[line_of(words, key)]
    return asked_for


@njit(cache=True)
def _count_all(words, candidates, keys_NM, tokens_N, num):  # type: ignore[no-untyped-def]
    """Counts the first `num` of `tokens_N` as what followed the contexts `keys_NM`, whose buckets have been asked for."""
    asked_for = np.int64(0)
    for n in range(num):
        for m in range(keys_NM.shape[1]):
            if keys_NM[n, m] != 0:
                slot = max(find(words, keys_NM[n, m]), 0)
                asked_for ^= candidates[candidate_at(slot, 0)]
    for n in range(num):
        for m in range(keys_NM.shape[1]):
            if keys_NM[n, m] != 0:
                count(candidates, claim(words, candidates, keys_NM[n, m]), tokens_N[n])
    return asked_for


@njit(
    "int64(int64[::1], int64[::1], int64, int64[:], int64[:], int32[:], int32[:], int32[:,:], int64)",
    cache=True,
    nogil=True,
)
def _learn(  # type: ignore[no-untyped-def]
    words, candidates, order_bits, idx_mapping_B, salts_S, learned_S, total_len_S, token_ids_SL, max_new
):
    longest = token_ids_SL.shape[1]
    num_slots = min(len(token_ids_SL), len(salts_S), len(learned_S), len(total_len_S))
    orders_M = _orders(order_bits)
    keys_NM = np.empty((CHUNK, len(orders_M)), np.int64)
    tokens_N = np.empty(CHUNK, np.int32)
    asked_for = np.int64(0)
    n = 0
    for b in range(len(idx_mapping_B)):
        s = idx_mapping_B[b]
        if s < 0 or s >= num_slots:
            continue
        start = max(learned_S[s], 0)
        end = min(total_len_S[s], longest, start + max_new)
        learned_S[s] = end
        for i in range(start, end):
            tokens_N[n] = token_ids_SL[s, i]
            if tokens_N[n] < 0:
                continue
            asked_for ^= _keys(words, orders_M, salts_S[s], token_ids_SL, s, i, token_ids_SL, s, 0, keys_NM, n)
            n += 1
            if n == CHUNK:
                asked_for ^= _count_all(words, candidates, keys_NM, tokens_N, n)
                n = 0
    return asked_for ^ _count_all(words, candidates, keys_NM, tokens_N, n)


@njit(cache=True)
def _find_longest(words, candidates, orders_M, keys_BM, b):  # type: ignore[no-untyped-def]
    """The slot of the longest known context of row b and its length, -1 if none is known; asks for its candidates."""
    for m in range(len(orders_M) - 1, -1, -1):
        if keys_BM[b, m] != 0:
            slot = find(words, keys_BM[b, m])
            if slot >= 0:
                return slot, orders_M[m], candidates[candidate_at(slot, 0)]
    return np.int64(-1), np.int64(0), np.int64(0)


@njit(
    "int64(int64[::1], int64[::1], int64, int64[:], int64[:], int32[:], int32[:,:], float32[:], float32,"
    " int32[:,:], int8[:,:], int32[:])",
    cache=True,
    nogil=True,
)
def _walk(  # type: ignore[no-untyped-def]
    words, candidates, order_bits, idx_mapping_B, salts_S, total_len_S, token_ids_SL, level_rates, floor,
    tokens_BK, levels_BK, found_B,
):  # fmt: skip
    num_rows = min(len(idx_mapping_B), len(tokens_BK), len(levels_BK), len(found_B))
    num_positions = min(tokens_BK.shape[1], levels_BK.shape[1])
    longest = token_ids_SL.shape[1]
    num_slots = min(len(token_ids_SL), len(salts_S), len(total_len_S))
    orders_M = _orders(order_bits)
    keys_BM = np.empty((num_rows, len(orders_M)), np.int64)
    slots_B = np.empty(num_rows, np.int64)
    orders_B = np.empty(num_rows, np.int64)
    hope_B = np.ones(num_rows, np.float32)
    asked_for = np.int64(0)
    found_B[:num_rows] = 0
    for k in range(num_positions):
        for b in range(num_rows):
            s = idx_mapping_B[b]
            slots_B[b] = -1
            if found_B[b] == k and s >= 0 and s < num_slots:
                slots_B[b] = 0
                length = min(total_len_S[s], longest)
                asked_for ^= _keys(words, orders_M, salts_S[s], token_ids_SL, s, length, tokens_BK, b, k, keys_BM, b)
        for b in range(num_rows):
            if slots_B[b] >= 0:
                slots_B[b], orders_B[b], touched = _find_longest(words, candidates, orders_M, keys_BM, b)
                asked_for ^= touched
        for b in range(num_rows):
            if slots_B[b] >= 0:
                token, level = likeliest(candidates, slots_B[b], orders_B[b])
                hope_B[b] *= level_rates[max(level, 0)]
                if level >= 0 and hope_B[b] >= floor:
                    tokens_BK[b, k] = token
                    levels_BK[b, k] = level
                    found_B[b] = k + 1
    return asked_for
