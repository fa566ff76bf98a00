# SPDX-License-Identifier: Apache-2.0
"""The context index on a GPU, as functions that the kernels in `step_triton.py` call. `device_index.py` explains the tables.

Learning takes two launches. In the first, programs list the keys of all new contexts, in the order in which a CPU counts them.
In the second, each program owns a part of the buckets, and counts the listed contexts of its part in order. No two programs
write the same bucket. So the result has the same bits as that of the laboratory's kernels for a CPU.

Shapes: B entries of the batch, S request slots, L longest text, K draft positions. N positions listed at a time, J tokens
before each of them, M context lengths 1..M (some unused). E listed keys read at a time, R batch entries read at a time. P
tokens of a window, I slots of a bucket, C candidates of a slot, G evidence levels.

Constants of an index: bit m of ORDER_BITS is set if contexts of m tokens are counted, and NUM_ORDERS bits are set. LANES is
the length of the longest context, rounded up to a power of two. BUCKET_MASK is the number of buckets minus one.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nemo_specrollout.drafters import base
from nemo_specrollout.drafters import device_index as layout
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
_NO_SALT = tl.constexpr(layout.NO_SALT)
_NO_RANK = tl.constexpr(layout.NO_RANK)
_FREE = tl.constexpr(layout.FREE)
_OWN = tl.constexpr(layout.OWN)
_MAX_LISTED = tl.constexpr(layout.MAX_LISTED)
_NUM_LEVELS = tl.constexpr(base.NUM_LEVELS)
_ROWS = tl.constexpr(128)
_KEYS = tl.constexpr(256)

BLOCK = 16
"""Number of text positions that a program lists at a time."""
_BLOCK = tl.constexpr(BLOCK)


class Index(NamedTuple):
    """The tensors of one context index and of the drafter that uses it.

    N is `MAX_LISTED`, and M is the number of context lengths that are counted. To *list* a context means to write down its key
    in one launch, so that the next launch counts it.
    """

    words: Any
    candidates: Any
    salts_S: Any
    learned_S: Any
    keys_NM: Any
    """Keys of the listed contexts, int64. A key is 0 where the text is too short for a context of that length."""
    tokens_N: Any
    """Token that followed each listed context, int32."""
    num_listed: Any
    """Number of listed text positions, int32."""


@triton.jit
def mix64(z):  # type: ignore[no-untyped-def]
    """Returns the bits of a uint64 mixed by the output function of SplitMix64."""
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
def _claim(words, key, bucket_mask):  # type: ignore[no-untyped-def]
    """Finds the slot of a key in its bucket, or else gives a slot to the key. Raises the key's rank.

    Returns the slot, and whether the key already had the slot before. The cost of slot i is `OWN`, `FREE` or its rank. The
    minimum of cost * 8 + i gives both the lowest cost and its slot.
    """
    i_I = tl.arange(0, _BUCKET_SLOTS)
    line = (key & bucket_mask) * _BUCKET_SLOTS
    word_I = tl.load(words + line + i_I)
    reference = tl.sum(tl.where(i_I == 0, word_I, 0), axis=0)
    rank_I = (word_I - reference).to(tl.int16).to(tl.int32)
    least = tl.min(tl.where(word_I == 0, _NO_RANK, rank_I), axis=0)
    least = tl.where(least == _NO_RANK, 0, least)
    is_own_I = (word_I ^ key) >> _RANK_BITS == 0
    cost_I = tl.where(is_own_I, _OWN, tl.where(word_I == 0, _FREE, rank_I))
    best = tl.min(cost_I * _BUCKET_SLOTS + i_I, axis=0)
    is_own = best < (_OWN + 1) * _BUCKET_SLOTS
    chosen = best & (_BUCKET_SLOTS - 1)
    rank = tl.sum(tl.where(i_I == chosen, rank_I, 0), axis=0)
    gained = tl.maximum(rank, tl.minimum(rank + _GAIN, least + _MAX_LEAD))
    rank = tl.where(is_own, gained, least + 1)
    tl.debug_barrier()  # all lanes have read the bucket
    tl.store(words + line + chosen, (key & ~_RANK_MASK) | ((reference + rank) & _RANK_MASK))
    return line + chosen, is_own


@triton.jit
def _count(candidates, slot, token, is_own):  # type: ignore[no-untyped-def]
    """Counts a token among the candidates of a slot. A new token replaces the candidate with the lowest count.

    `is_own` is false if the slot has just been given to another context. Then the candidates that are in it do not count.
    """
    c_C = tl.arange(0, _NUM_CANDIDATES)
    at_C = candidates + slot * _NUM_CANDIDATES + c_C
    candidate_C = tl.load(at_C, mask=c_C < tl.where(is_own, _NUM_CANDIDATES, 0), other=0)
    is_same_C = candidate_C >> 32 == token
    best = tl.min(tl.where(is_same_C, 0, (candidate_C & _COUNT_MASK) + 1) * _NUM_CANDIDATES + c_C, axis=0)
    num = (candidate_C & _COUNT_MASK) + 1
    candidate_C = tl.where(c_C == (best & (_NUM_CANDIDATES - 1)), (token << 32) | num, candidate_C)
    is_full = tl.max(candidate_C & _COUNT_MASK, axis=0) >= _MAX_COUNT
    halved_C = (candidate_C & ~_COUNT_MASK) | ((candidate_C & _COUNT_MASK) >> 1)
    tl.debug_barrier()  # all lanes have read the candidates
    tl.store(at_C, tl.where(is_full, halved_C, candidate_C))


@triton.jit
def _num_new(index, texts, row_R, mask_R, num_slots, longest, max_new):  # type: ignore[no-untyped-def]
    """Returns the request slot and the range of new tokens of each batch entry in `row_R`.

    The result consists of the slot, whether there is one, and the start, the end and the number of the new tokens. An entry
    without a slot has no new tokens.
    """
    slot_R = tl.load(texts.slots_B + row_R, mask=mask_R, other=-1).to(tl.int64)
    has_slot_R = (slot_R >= 0) & (slot_R < num_slots)
    start_R = tl.maximum(tl.load(index.learned_S + slot_R, mask=has_slot_R, other=0), 0)
    end_R = tl.minimum(tl.load(texts.total_len_S + slot_R, mask=has_slot_R, other=0), longest)
    end_R = tl.minimum(end_R, start_R + max_new)
    return slot_R, has_slot_R, start_R, end_R, tl.maximum(end_R - start_R, 0)


@triton.jit
def _num_before(index, texts, row, num_slots, longest, max_new):  # type: ignore[no-untyped-def]
    """Returns how many new tokens the entries of the batch before entry `row` have together."""
    num = 0
    for first in range(0, row, _ROWS):
        row_R = first + tl.arange(0, _ROWS)
        _, _, _, _, num_R = _num_new(index, texts, row_R, row_R < row, num_slots, longest, max_new)
        num += tl.sum(num_R, axis=0)
    return num


@triton.jit
def list_contexts(  # type: ignore[no-untyped-def]
    index, texts, row_stride, num_slots, longest, max_new, row, num_rows, part, num_parts,
    ORDER_BITS: tl.constexpr, NUM_ORDERS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Lists the new tokens of one text, each with the keys of the contexts before it, so that `learn_listed` can count them.

    The text is that of entry `row` of the batch. Of the blocks of its new tokens, this program lists those with the numbers
    part, part + num_parts, and so on. The texts of all entries are listed one after another, up to `MAX_LISTED` tokens. A
    token below 0 gets no contexts.
    """
    slot, has_slot, start, _, num = _num_new(index, texts, row, True, num_slots, longest, max_new)
    is_last = (row == num_rows - 1) & (part == 0)
    if (num > part * _BLOCK) | is_last:
        before = _num_before(index, texts, row, num_slots, longest, max_new)
        num = tl.minimum(num, tl.maximum(_MAX_LISTED - before, 0))
        if is_last:
            tl.store(index.num_listed, tl.minimum(before, _MAX_LISTED) + num)
        salt = tl.load(index.salts_S + slot, mask=has_slot, other=0).to(tl.uint64, bitcast=True)
        text = texts.token_ids_SL + slot * row_stride
        j_J = tl.arange(0, LANES) + 1
        factor_J = tl.full((LANES,), _GAMMA, tl.uint64)
        for j in tl.static_range(1, LANES):
            factor_J = tl.where(j_J > j, factor_J * _MIX_2, factor_J)
        for first in range(part * _BLOCK, num, num_parts * _BLOCK):
            n_N = first + tl.arange(0, _BLOCK)
            i_N = start + n_N
            is_new_N = n_N < num
            token_N = tl.load(text + i_N, mask=is_new_N, other=-1)
            tl.store(index.tokens_N + before + n_N, token_N, mask=is_new_N)
            at_NJ = i_N[:, None] - j_J[None, :]
            before_NJ = tl.load(text + at_NJ, mask=is_new_N[:, None] & (at_NJ >= 0), other=0)
            term_NJ = _term(before_NJ, factor_J[None, :])
            column = 0
            for m in tl.static_range(1, LANES + 1):
                if (ORDER_BITS >> m) & 1:
                    state_N = tl.sum(tl.where(j_J[None, :] <= m, term_NJ, 0).to(tl.uint64), axis=1) + salt
                    key_N = tl.where((token_N >= 0) & (i_N >= m), _key(state_N), 0)
                    tl.store(index.keys_NM + (before + n_N) * NUM_ORDERS + column, key_N, mask=is_new_N)
                    column += 1


@triton.jit
def learn_listed(index, part, num_parts, NUM_ORDERS: tl.constexpr, BUCKET_MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts the listed tokens in order, for those contexts whose buckets belong to part number `part`."""
    num_keys = tl.load(index.num_listed) * NUM_ORDERS
    for first in range(0, num_keys, _KEYS):
        e_E = first + tl.arange(0, _KEYS)
        key_E = tl.load(index.keys_NM + e_E, mask=e_E < num_keys, other=0)
        is_mine_E = (key_E != 0) & ((key_E & BUCKET_MASK & (num_parts - 1)) == part)
        num_mine = tl.sum(is_mine_E.to(tl.int32), axis=0)
        while num_mine > 0:
            e = tl.min(tl.where(is_mine_E, e_E, num_keys), axis=0)
            key = tl.sum(tl.where(e_E == e, key_E, 0), axis=0)
            slot, is_own = _claim(index.words, key, BUCKET_MASK)
            _count(index.candidates, slot, tl.load(index.tokens_N + e // NUM_ORDERS).to(tl.int64), is_own)
            tl.debug_barrier()  # the next context may be in the same bucket
            is_mine_E = is_mine_E & (e_E != e)
            num_mine -= 1


@triton.jit
def record_learned(index, texts, num_slots, longest, max_new, num_rows):  # type: ignore[no-untyped-def]
    """Writes to `learned_S` how many tokens of each text have been listed by now.

    No other program may read `learned_S` at the same time.
    """
    room = _MAX_LISTED + 0
    for first in range(0, num_rows, _ROWS):
        row_R = first + tl.arange(0, _ROWS)
        slot_R, has_slot_R, start_R, end_R, num_R = _num_new(
            index, texts, row_R, row_R < num_rows, num_slots, longest, max_new
        )
        left_R = tl.maximum(room - (tl.cumsum(num_R, axis=0) - num_R), 0)
        end_R = tl.where(num_R > left_R, start_R + left_R, end_R)
        tl.store(index.learned_S + slot_R, end_R, mask=has_slot_R)
        room -= tl.sum(num_R, axis=0)


@triton.jit
def _likeliest(candidates, slot, order):  # type: ignore[no-untyped-def]
    """Returns the candidate in `slot` with the highest count, this count, and the evidence level of the candidate.

    The candidates are tokens that have followed a context. If several have the highest count, the first of them is returned.
    `order` is the length of the context in tokens, or 0 if the index has no context of the text. Then the count is 0 too.
    """
    c_C = tl.arange(0, _NUM_CANDIDATES)
    num = tl.where(order > 0, _NUM_CANDIDATES, 0)
    candidate_C = tl.load(candidates + slot * _NUM_CANDIDATES + c_C, mask=c_C < num, other=0)
    count_C = (candidate_C & _COUNT_MASK).to(tl.int32)
    shrunk = tl.sum(count_C, axis=0) + 1
    best = tl.max(count_C, axis=0)
    c = tl.min(tl.where(count_C == best, c_C, _NUM_CANDIDATES), axis=0)
    token = tl.sum(tl.where(c_C == c, candidate_C >> 32, 0), axis=0)
    by_share = (20 * best >= 9 * shrunk).to(tl.int32) + (5 * best >= 3 * shrunk) + (4 * best >= 3 * shrunk)
    by_order = (order > 2).to(tl.int32) + (order > 4) + (order > 6)
    return token, best, by_order * 4 + by_share


@triton.jit
def walk_row(  # type: ignore[no-untyped-def]
    index, texts, row_stride, num_slots, longest, row, rate_G, floor, out, K: tl.constexpr, MOST: tl.constexpr,
    ORDER_BITS: tl.constexpr, LANES: tl.constexpr, BUCKET_MASK: tl.constexpr,
):  # fmt: skip
    """Writes the likeliest continuation of one text to `out`. `rate_G` is the acceptance rate of each evidence level.

    The window holds the last LANES tokens of the text, followed by the draft tokens. So each token is read only once. The key
    of a context is computed from a sum over its tokens, each multiplied by a factor. `factor_P` has the factor of each token
    of the window for contexts that end with the latest token.
    """
    WINDOW: tl.constexpr = triton.next_power_of_2(LANES + MOST)
    slot = tl.load(texts.slots_B + row).to(tl.int64)
    has_slot = (slot >= 0) & (slot < num_slots)
    own_salt = tl.load(index.salts_S + slot, mask=has_slot, other=_NO_SALT)
    salt = own_salt.to(tl.uint64, bitcast=True)
    length = tl.minimum(tl.load(texts.total_len_S + slot, mask=has_slot, other=0), longest)
    p_P = tl.arange(0, WINDOW)
    level_G = tl.arange(0, _NUM_LEVELS)
    i_P = length - LANES + p_P
    text_ptr = texts.token_ids_SL + slot * row_stride + i_P
    window_P = tl.load(text_ptr, mask=(p_P < LANES) & (i_P >= 0), other=0).to(tl.int64)
    factor_P = tl.zeros((WINDOW,), tl.uint64)
    for p in tl.static_range(LANES):
        factor_P = tl.where(p_P == p, _GAMMA, factor_P * _MIX_2)
    order_M = tl.arange(0, LANES) + 1
    is_order_M = (tl.full((LANES,), ORDER_BITS, tl.int64) >> order_M) & 1 == 1
    i_I = tl.arange(0, _BUCKET_SLOTS)[None, :]
    survival, k = 1.0, 0
    limit = tl.where(own_salt != _NO_SALT, MOST, 0)
    while k < limit:
        age_P = LANES + k - p_P
        is_in_MP = (age_P[None, :] >= 1) & (age_P[None, :] <= order_M[:, None])
        term_MP = tl.where(is_in_MP, _term(window_P, factor_P)[None, :], 0).to(tl.uint64)
        key_M = _key(tl.sum(term_MP, axis=1) + salt)
        line_M = (key_M & BUCKET_MASK) * _BUCKET_SLOTS
        is_there_M = is_order_M & (order_M <= length + k)
        word_MI = tl.load(index.words + line_M[:, None] + i_I, mask=is_there_M[:, None], other=0)
        is_known_MI = (word_MI ^ key_M[:, None]) >> _RANK_BITS == 0
        known_M = tl.min(tl.where(is_known_MI, i_I, _BUCKET_SLOTS), axis=1)
        order = tl.max(tl.where(is_there_M & (known_M < _BUCKET_SLOTS), order_M, 0), axis=0)
        found = tl.sum(tl.where(order_M == order, line_M + known_M, 0), axis=0)
        token, best, level = _likeliest(index.candidates, found, order)
        survival *= tl.sum(tl.where(level_G == level, rate_G, 0.0), axis=0)
        if (best > 0) & (survival >= floor):
            tl.store(out.tokens_BK + row * K + k, token.to(tl.int32))
            tl.store(out.levels_BK + row * K + k, level.to(tl.int8))
            window_P = tl.where(p_P == LANES + k, token, window_P)
            factor_P = tl.where(p_P == LANES + k, _GAMMA, factor_P * _MIX_2)
            k += 1
        else:
            limit = k
    tl.store(out.found_B + row, k)
