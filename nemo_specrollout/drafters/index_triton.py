# SPDX-License-Identifier: Apache-2.0
"""The kernels of the context index for a GPU. `device_index.py` explains the tables; `index_numba.py` writes the same bits.

A program is one warp. It waits for memory, and there are many of them. Neither programs nor the lanes of one program wait for
each other. If two count in the same context or take the same slot at once, one count may be lost. Or a context may stand
beside the candidates of the other one until they are overwritten. Words and candidates are 64 bits, so none is ever torn, and
a candidate is always a token of some request.

Shapes: B rows of the batch, S request slots, L longest sequence, K draft positions. N positions learned at a time, J tokens
before each of them, M context lengths 1..M (some unused). P tokens of a window, I slots of a bucket, C candidates of a slot.
"""

import torch
import triton
import triton.language as tl

from nemo_specrollout.drafters import device_index as layout
from nemo_specrollout.drafters.base import Proposals, Texts
from nemo_specrollout.sampling.seeds import GAMMA, MIX_1, MIX_2

_GAMMA = tl.constexpr(GAMMA)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_BUCKET_SLOTS = tl.constexpr(layout.BUCKET_SLOTS)
_NUM_CANDIDATES = tl.constexpr(layout.NUM_CANDIDATES)
_RANK_BITS = tl.constexpr(layout.RANK_BITS)
_RANK_MASK = tl.constexpr(layout.RANK_MASK)
_IN_USE = tl.constexpr(layout.IN_USE)
_GAIN = tl.constexpr(layout.GAIN)
_MAX_LEAD = tl.constexpr(layout.MAX_LEAD)
_COUNT_MASK = tl.constexpr(layout.COUNT_MASK)
_MAX_COUNT = tl.constexpr(layout.MAX_COUNT)
_NO_RANK = tl.constexpr(layout.NO_RANK)
_FREE = tl.constexpr(layout.FREE)
_OWN = tl.constexpr(layout.OWN)

BLOCK = 16
"""Text positions that a program learns at a time."""
NUM_WARPS = 1
"""Warps of a program."""
MAX_PROGRAMS = 1 << 14
"""Most programs of a launch."""

# One variant of a kernel serves all values: numbers that are 1 or multiples of 16 are not worth another compilation.
_INTEGERS = ("row_stride", "num_slots", "longest", "bucket_mask")


@triton.jit
def mix64(z):  # type: ignore[no-untyped-def]
    """Returns SplitMix64's output function of a uint64."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _key(state):  # type: ignore[no-untyped-def]
    return (mix64(state) | _IN_USE).to(tl.int64, bitcast=True)


@triton.jit
def _term(token, factor):  # type: ignore[no-untyped-def]
    return (token.to(tl.int64) + 1).to(tl.uint64) * factor


@triton.jit
def _claim(words, key_N, is_counted_N, bucket_mask):  # type: ignore[no-untyped-def]
    """Returns the slot of each key, which gains ranks, and whether the slot was its own before.

    As in `index_numba.py`, the smallest cost * 8 + i of the slots i tells both the cost and the slot.
    """
    i_I = tl.arange(0, _BUCKET_SLOTS)[None, :]
    line_N = (key_N & bucket_mask) * _BUCKET_SLOTS
    word_NI = tl.load(words + line_N[:, None] + i_I, mask=is_counted_N[:, None], other=0)
    reference_N = tl.sum(tl.where(i_I == 0, word_NI, 0), axis=1)
    rank_NI = (word_NI - reference_N[:, None]).to(tl.int16).to(tl.int32)
    least_N = tl.min(tl.where(word_NI == 0, _NO_RANK, rank_NI), axis=1)
    least_N = tl.where(least_N == _NO_RANK, 0, least_N)
    is_own_NI = (word_NI ^ key_N[:, None]) >> _RANK_BITS == 0
    cost_NI = tl.where(is_own_NI, _OWN, tl.where(word_NI == 0, _FREE, rank_NI))
    best_N = tl.min(cost_NI * _BUCKET_SLOTS + i_I, axis=1)
    is_own_N = best_N < (_OWN + 1) * _BUCKET_SLOTS
    chosen_N = best_N & (_BUCKET_SLOTS - 1)
    rank_N = tl.sum(tl.where(i_I == chosen_N[:, None], rank_NI, 0), axis=1)
    gained_N = tl.maximum(rank_N, tl.minimum(rank_N + _GAIN, least_N + _MAX_LEAD))
    rank_N = tl.where(is_own_N, gained_N, least_N + 1)
    word_N = (key_N & ~_RANK_MASK) | ((reference_N + rank_N) & _RANK_MASK)
    tl.store(words + line_N + chosen_N, word_N, mask=is_counted_N)
    return line_N + chosen_N, is_own_N


@triton.jit
def _count(candidates, slot_N, token_N, is_own_N, is_counted_N):  # type: ignore[no-untyped-def]
    """Counts each token among the candidates of its slot. A new token replaces the candidate of the lowest count."""
    c_C = tl.arange(0, _NUM_CANDIDATES)[None, :]
    at_NC = candidates + slot_N[:, None] * _NUM_CANDIDATES + c_C
    candidate_NC = tl.load(at_NC, mask=(is_counted_N & is_own_N)[:, None], other=0)
    count_NC = candidate_NC & _COUNT_MASK
    is_same_NC = candidate_NC >> 32 == token_N[:, None]
    best_N = tl.min(tl.where(is_same_NC, 0, count_NC + 1) * _NUM_CANDIDATES + c_C, axis=1)
    is_chosen_NC = c_C == (best_N & (_NUM_CANDIDATES - 1))[:, None]
    candidate_NC = tl.where(is_chosen_NC, (token_N[:, None] << 32) | (count_NC + 1), candidate_NC)
    count_NC = candidate_NC & _COUNT_MASK
    is_full_N = tl.max(count_NC, axis=1) >= _MAX_COUNT
    halved_NC = (candidate_NC & ~_COUNT_MASK) | (count_NC >> 1)
    tl.store(at_NC, tl.where(is_full_N[:, None], halved_NC, candidate_NC), mask=is_counted_N[:, None])


@triton.jit
def _new_tokens(learned_S, total_len_S, s, longest, max_new):  # type: ignore[no-untyped-def]
    """Returns the positions at which the new part of a request's text starts and ends."""
    start = tl.maximum(tl.load(learned_S + s).to(tl.int64), 0)
    end = tl.minimum(tl.load(total_len_S + s).to(tl.int64), longest)
    return start, tl.minimum(end, start + max_new)


@triton.jit(do_not_specialize=[*_INTEGERS, "max_new"])
def _learn(  # type: ignore[no-untyped-def]
    words, candidates, slots_B, salts_S, learned_S, total_len_S, token_ids_SL, row_stride, num_slots, longest,
    bucket_mask, max_new, ORDER_BITS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, i) learns blocks i, i + n, i + 2n, ... of the new tokens of row b, where n programs share a row."""
    s = tl.load(slots_B + tl.program_id(0)).to(tl.int64)
    if (s < 0) | (s >= num_slots):
        return
    start, end = _new_tokens(learned_S, total_len_S, s, longest, max_new)
    salt = tl.load(salts_S + s).to(tl.uint64, bitcast=True)
    text = token_ids_SL + s * row_stride
    j_J = tl.arange(0, LANES) + 1
    factor_J = tl.full((LANES,), _GAMMA, tl.uint64)
    for j in tl.static_range(1, LANES):
        factor_J = tl.where(j_J > j, factor_J * _MIX_2, factor_J)
    for first in range(start + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        i_N = first + tl.arange(0, BLOCK)
        token_N = tl.load(text + i_N, mask=i_N < end, other=-1).to(tl.int64)
        at_NJ = i_N[:, None] - j_J[None, :]
        before_NJ = tl.load(text + at_NJ, mask=(i_N < end)[:, None] & (at_NJ >= 0), other=0)
        term_NJ = _term(before_NJ, factor_J[None, :])
        for m in tl.static_range(1, LANES + 1):
            if (ORDER_BITS >> m) & 1:
                state_N = tl.sum(tl.where(j_J[None, :] <= m, term_NJ, 0).to(tl.uint64), axis=1) + salt
                is_counted_N = (token_N >= 0) & (i_N >= m)
                slot_N, is_own_N = _claim(words, _key(state_N), is_counted_N, bucket_mask)
                _count(candidates, slot_N, token_N, is_own_N, is_counted_N)
    if tl.num_programs(1) == 1:
        tl.debug_barrier()
        tl.store(learned_S + s, end.to(tl.int32))


@triton.jit(do_not_specialize=["num_slots", "longest", "max_new"])
def _advance(slots_B, learned_S, total_len_S, num_slots, longest, max_new):  # type: ignore[no-untyped-def]
    """Program b records that row b is learned. It runs after all programs that share the row."""
    s = tl.load(slots_B + tl.program_id(0)).to(tl.int64)
    if (s < 0) | (s >= num_slots):
        return
    _, end = _new_tokens(learned_S, total_len_S, s, longest, max_new)
    tl.store(learned_S + s, end.to(tl.int32))


@triton.jit
def _likeliest(candidates, slot, order):  # type: ignore[no-untyped-def]
    """Returns the candidate of the highest count, the first of equals, its count, and its level. Order 0 means no slot."""
    c_C = tl.arange(0, _NUM_CANDIDATES)
    num = tl.where(order > 0, _NUM_CANDIDATES, 0)
    candidate_C = tl.load(candidates + slot * _NUM_CANDIDATES + c_C, mask=c_C < num, other=0)
    count_C = candidate_C & _COUNT_MASK
    shrunk = tl.sum(count_C, axis=0) + 1
    best = tl.max(count_C, axis=0)
    c = tl.min(tl.where(count_C == best, c_C, _NUM_CANDIDATES), axis=0)
    token = tl.sum(tl.where(c_C == c, candidate_C >> 32, 0), axis=0)
    by_share = (20 * best >= 9 * shrunk).to(tl.int32) + (5 * best >= 3 * shrunk) + (4 * best >= 3 * shrunk)
    by_order = (order > 2).to(tl.int32) + (order > 4) + (order > 6)
    return token, best, by_order * 4 + by_share


@triton.jit(do_not_specialize=[*_INTEGERS, "tokens_stride", "levels_stride", "num_positions"])
def _walk(  # type: ignore[no-untyped-def]
    words, candidates, slots_B, salts_S, total_len_S, token_ids_SL, row_stride, num_slots, longest, bucket_mask,
    level_rates, floor, tokens_BK, tokens_stride, levels_BK, levels_stride, found_B, num_positions,
    ORDER_BITS: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Program b extends row b.

    The window holds the last LANES tokens of the text, then the drafts. `factor_P` holds each token's factor in the key of a
    context that ends with the latest token, so no token is read twice.
    """
    b = tl.program_id(0).to(tl.int64)
    s = tl.load(slots_B + b).to(tl.int64)
    if (s < 0) | (s >= num_slots):
        tl.store(found_B + b, 0)
        return
    salt = tl.load(salts_S + s).to(tl.uint64, bitcast=True)
    length = tl.minimum(tl.load(total_len_S + s).to(tl.int64), longest)
    p_P = tl.arange(0, WINDOW)
    i_P = length - LANES + p_P
    window_P = tl.load(token_ids_SL + s * row_stride + i_P, mask=(p_P < LANES) & (i_P >= 0), other=0).to(tl.int64)
    factor_P = tl.zeros((WINDOW,), tl.uint64)
    for p in tl.static_range(LANES):
        factor_P = tl.where(p_P == p, _GAMMA, factor_P * _MIX_2)
    order_M = tl.arange(0, LANES) + 1
    is_order_M = (tl.full((LANES,), ORDER_BITS, tl.int64) >> order_M) & 1 == 1
    i_I = tl.arange(0, _BUCKET_SLOTS)[None, :]
    survival = 1.0
    k = 0
    limit = num_positions
    while k < limit:
        age_P = LANES + k - p_P
        is_in_MP = (age_P[None, :] >= 1) & (age_P[None, :] <= order_M[:, None])
        term_MP = tl.where(is_in_MP, _term(window_P, factor_P)[None, :], 0).to(tl.uint64)
        key_M = _key(tl.sum(term_MP, axis=1) + salt)
        line_M = (key_M & bucket_mask) * _BUCKET_SLOTS
        is_there_M = is_order_M & (order_M <= length + k)
        word_MI = tl.load(words + line_M[:, None] + i_I, mask=is_there_M[:, None], other=0)
        is_known_MI = (word_MI ^ key_M[:, None]) >> _RANK_BITS == 0
        known_M = tl.min(tl.where(is_known_MI, i_I, _BUCKET_SLOTS), axis=1)
        order = tl.max(tl.where(is_there_M & (known_M < _BUCKET_SLOTS), order_M, 0), axis=0)
        slot = tl.sum(tl.where(order_M == order, line_M + known_M, 0), axis=0)
        token, best, level = _likeliest(candidates, slot, order)
        survival *= tl.load(level_rates + level)
        if (best > 0) & (survival >= floor):
            tl.store(tokens_BK + b * tokens_stride + k, token.to(tl.int32))
            tl.store(levels_BK + b * levels_stride + k, level.to(tl.int8))
            window_P = tl.where(p_P == LANES + k, token, window_P)
            factor_P = tl.where(p_P == LANES + k, _GAMMA, factor_P * _MIX_2)
            k += 1
        else:
            limit = k
    tl.store(found_B + b, k)


def learn(
    index: layout.ContextIndex, texts: Texts, salts_S: torch.Tensor, learned_S: torch.Tensor, max_new: int
) -> None:
    """Implements `ContextIndex.learn`."""
    slots_B, total_len_S, token_ids_SL = texts
    num_rows, longest = len(slots_B), token_ids_SL.shape[1]
    num_slots = min(len(token_ids_SL), len(salts_S), len(learned_S), len(total_len_S))
    max_new = min(max_new, longest)
    if num_rows == 0 or max_new <= 0:
        return
    programs = min(triton.cdiv(max_new, BLOCK), max(1, MAX_PROGRAMS // num_rows))
    _learn[(num_rows, programs)](
        index.words, index.candidates, slots_B, salts_S, learned_S, total_len_S, token_ids_SL, token_ids_SL.stride(0),
        num_slots, longest, len(index.words) - 1, max_new, BLOCK=BLOCK, num_warps=NUM_WARPS, **_constants(index),
    )  # fmt: skip
    if programs > 1:
        _advance[(num_rows,)](slots_B, learned_S, total_len_S, num_slots, longest, max_new, num_warps=NUM_WARPS)


def walk(
    index: layout.ContextIndex,
    texts: Texts,
    salts_S: torch.Tensor,
    level_rates: torch.Tensor,
    floor: float,
    out: Proposals,
) -> None:
    """Implements `ContextIndex.walk`."""
    (slots_B, total_len_S, token_ids_SL), (tokens_BK, levels_BK, found_B) = texts, out
    num_rows = min(len(slots_B), len(tokens_BK), len(levels_BK), len(found_B))
    num_positions = min(tokens_BK.shape[1], levels_BK.shape[1])
    num_slots = min(len(token_ids_SL), len(salts_S), len(total_len_S))
    if num_rows == 0:
        return
    constants = _constants(index)
    _walk[(num_rows,)](
        index.words, index.candidates, slots_B, salts_S, total_len_S, token_ids_SL, token_ids_SL.stride(0), num_slots,
        token_ids_SL.shape[1], len(index.words) - 1, level_rates, float(floor), tokens_BK, tokens_BK.stride(0), levels_BK,
        levels_BK.stride(0), found_B, num_positions, WINDOW=triton.next_power_of_2(constants["LANES"] + num_positions),
        num_warps=NUM_WARPS, **constants,
    )  # fmt: skip


def _constants(index: layout.ContextIndex) -> dict[str, int]:
    return {"ORDER_BITS": sum(1 << m for m in index.orders), "LANES": triton.next_power_of_2(index.orders[-1])}
