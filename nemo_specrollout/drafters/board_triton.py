# SPDX-License-Identifier: Apache-2.0
"""The kernels of the draft board for a GPU: one program for each request. `board.py` says what they compute.

Learning takes two launches, because the tables must fade before anything is added to them. Choosing takes a third. Programs
share only the tables and counts, and add to them atomically. So their order changes a result only by the rounding of sums.

Shapes: as in `board_numba.py`. A block's D and K are rounded up to powers of two.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from nemo_specrollout.drafters.base import (
    CALIBRATION_DECAY,
    EVIDENCE_WINDOW,
    FACTOR_WEIGHT_DECAY,
    MAX_RATE,
    MIN_WORTH_SHARE,
    NUM_LEVELS,
    OUTLOOK_DECAY,
    OUTLOOK_RETURN,
    PRIOR_RATE,
    PRIOR_STRENGTH,
    REQUEST_DECAY,
)

_CALIBRATION_DECAY = tl.constexpr(CALIBRATION_DECAY)
_EVIDENCE_WINDOW = tl.constexpr(EVIDENCE_WINDOW)
_FACTOR_WEIGHT_DECAY = tl.constexpr(FACTOR_WEIGHT_DECAY)
_LOG2_REQUEST_DECAY = tl.constexpr(math.log2(REQUEST_DECAY))
_MAX_RATE = tl.constexpr(MAX_RATE)
_MIN_WORTH_SHARE = tl.constexpr(MIN_WORTH_SHARE)
_NUM_LEVELS = tl.constexpr(NUM_LEVELS)
_OUTLOOK_DECAY = tl.constexpr(OUTLOOK_DECAY)
_OUTLOOK_RETURN = tl.constexpr(OUTLOOK_RETURN)
_PRIOR_RATE = tl.constexpr(PRIOR_RATE)
_PRIOR_STRENGTH = tl.constexpr(PRIOR_STRENGTH)


@triton.jit
def _fade(table_ptr, rows, leader, num_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales hits and trials of each row like row `leader` is scaled down to the evidence window. Returns both unscaled."""
    mask = rows < num_rows
    hits = tl.load(table_ptr + 2 * rows, mask=mask, other=0.0)
    trials = tl.load(table_ptr + 2 * rows + 1, mask=mask, other=1.0)
    most = tl.load(table_ptr + 2 * leader + 1, mask=mask, other=1.0)
    left = tl.where(most > _EVIDENCE_WINDOW, _EVIDENCE_WINDOW / most, 1.0)
    tl.debug_barrier()
    tl.store(table_ptr + 2 * rows, hits * left, mask=mask)
    tl.store(table_ptr + 2 * rows + 1, trials * left, mask=mask)
    return hits, trials


@triton.jit(do_not_specialize_on_alignment=["step_ptr"])
def _begin_step(  # type: ignore[no-untyped-def]
    evidence_ptr, position_ptr, factor_weight_ptr, calibration_ptr, step_ptr, rates_ptr,
    DE: tl.constexpr, DK: tl.constexpr, D2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK)
    hits, trials = _fade(evidence_ptr, rows, rows, DE)
    tl.store(rates_ptr + rows, hits / trials, mask=rows < DE)
    num_positions: tl.constexpr = 2 * DK // D2
    _fade(position_ptr, rows, rows - rows % num_positions, DK)
    factor_weight = tl.load(factor_weight_ptr + rows, mask=rows < D2, other=0.0)
    tl.store(factor_weight_ptr + rows, factor_weight * _FACTOR_WEIGHT_DECAY, mask=rows < D2)
    calibration = tl.load(calibration_ptr + rows, mask=rows < 2, other=0.0)
    tl.store(calibration_ptr + rows, calibration * _CALIBRATION_DECAY, mask=rows < 2)
    tl.store(step_ptr + rows, tl.zeros([BLOCK], tl.int32), mask=rows < D2)


@triton.jit
def _raw_factor(factor_ptr, row, mask):  # type: ignore[no-untyped-def]
    """Returns a request's hits over the hits that its evidence predicted, with a prior of 1."""
    hits = tl.load(factor_ptr + 2 * row, mask=mask, other=0.0) + _PRIOR_STRENGTH
    return hits / (tl.load(factor_ptr + 2 * row + 1, mask=mask, other=0.0) + _PRIOR_STRENGTH)


@triton.jit
def _factor(factor_ptr, factor_weight_ptr, row, d, mask):  # type: ignore[no-untyped-def]
    """Returns the factor for new drafts: the raw factor, weighted by how well factors have predicted hits."""
    products = tl.load(factor_weight_ptr + 2 * d, mask=mask, other=0.0) + 1.0
    weight = products / (tl.load(factor_weight_ptr + 2 * d + 1, mask=mask, other=0.0) + 1.0)
    return 1.0 + tl.minimum(tl.maximum(weight, 0.0), 1.0) * (_raw_factor(factor_ptr, row, mask) - 1.0)


@triton.jit
def _count_verified(  # type: ignore[no-untyped-def]
    slot, num_sampled, num_rejected, total_len, chosen_ptr, submitted_ptr, edges_ptr, verified_ptr, request_ptr, step_ptr,
    open_evidence_ptr, factor_ptr, factor_weight_ptr, calibration_ptr, rates_ptr, WITNESS: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Adds the drafts that the step verified, and those that it accepted, to all counts."""
    drafter = tl.minimum(tl.maximum(tl.load(chosen_ptr + slot), 0), D - 1)
    submitted = tl.minimum(tl.load(submitted_ptr + slot), K)
    num_verified = tl.minimum(num_sampled - 1 + num_rejected, submitted)
    num_accepted = tl.minimum(num_sampled - 1, num_verified)
    c = tl.arange(0, BLOCK_C)
    edges = tl.load(edges_ptr + c, mask=c < C, other=0)
    length_class = tl.sum(((c < C) & (total_len - num_sampled >= edges)).to(tl.int32), axis=0)
    k = tl.arange(0, BLOCK_K)
    counts_ptr = verified_ptr + 2 * ((drafter * (C + 1) + length_class) * K + k)
    one = tl.full([BLOCK_K], 1, tl.int64)
    tl.atomic_add(counts_ptr, one, mask=k < num_verified, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, one, mask=k < num_accepted, sem="relaxed")
    if num_verified > 0:
        tl.atomic_add(step_ptr + 2 * drafter, num_verified, sem="relaxed")
        tl.atomic_add(step_ptr + 2 * drafter + 1, num_accepted, sem="relaxed")
        tl.store(request_ptr + 2 * slot, tl.load(request_ptr + 2 * slot) + num_verified)
        tl.store(request_ptr + 2 * slot + 1, tl.load(request_ptr + 2 * slot + 1) + num_accepted)
        row = slot * D + drafter
        evidence = tl.load(open_evidence_ptr + row * K + k, mask=k < num_verified, other=0).to(tl.int32)
        evidence = tl.minimum(tl.maximum(evidence, 0), E - 1)
        if (drafter != WITNESS) & (tl.sum(tl.where(k == 0, evidence, 0)) < _NUM_LEVELS):
            factor = _factor(factor_ptr, factor_weight_ptr, row, drafter, True)
            rate = tl.load(rates_ptr + drafter * E + evidence, mask=k < num_verified, other=0.0)
            predicted = tl.sum(tl.cumprod(tl.minimum(rate * factor, _MAX_RATE), axis=0))
            tl.atomic_add(calibration_ptr, num_accepted.to(tl.float32), sem="relaxed")
            tl.atomic_add(calibration_ptr + 1, predicted, sem="relaxed")
    tl.store(submitted_ptr + slot, 0)


@triton.jit
def _judge(  # type: ignore[no-untyped-def]
    slot, total_len, text_ptr, open_tokens_ptr, open_evidence_ptr, length_ptr, base_ptr, checked_ptr, factor_ptr,
    factor_weight_ptr, evidence_ptr, position_ptr, rates_ptr,
    D: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compares the proposals of a request with its text, each up to its first miss or the end of the text."""
    d, k = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)[None, :]
    row, mask_D = slot * D + d, d < D
    length = tl.minimum(tl.load(length_ptr + row, mask=mask_D, other=0), K)
    base = tl.load(base_ptr + row, mask=mask_D, other=0)
    checked = tl.load(checked_ptr + row, mask=mask_D, other=0)
    position = base[:, None] + k
    is_known = (k >= checked[:, None]) & (k < length[:, None]) & (position < total_len)
    token = tl.load(text_ptr + position, mask=is_known, other=0)
    is_hit = tl.load(open_tokens_ptr + row[:, None] * K + k, mask=is_known, other=-1) == token
    first_miss = tl.min(tl.where(is_known & (is_hit == 0), k, BLOCK_K), axis=1)
    judged = is_known & (k <= first_miss[:, None])
    hit = judged & is_hit
    evidence = tl.load(open_evidence_ptr + row[:, None] * K + k, mask=judged, other=0).to(tl.int32)
    evidence = d[:, None] * E + tl.minimum(tl.maximum(evidence, 0), E - 1)
    rate = tl.load(rates_ptr + evidence, mask=judged, other=0.0)
    excess = _raw_factor(factor_ptr, row, mask_D) - 1.0

    num_judged = tl.sum(judged.to(tl.int32), axis=1)
    end = checked + num_judged
    weight = tl.where(judged, tl.exp2((end[:, None] - 1 - k).to(tl.float32) * _LOG2_REQUEST_DECAY), 0.0)
    left = tl.exp2(num_judged.to(tl.float32) * _LOG2_REQUEST_DECAY)
    any_D = num_judged > 0
    hits = tl.load(factor_ptr + 2 * row, mask=any_D, other=0.0) * left + tl.sum(tl.where(hit, weight, 0.0), axis=1)
    predicted = tl.load(factor_ptr + 2 * row + 1, mask=any_D, other=0.0) * left + tl.sum(weight * rate, axis=1)
    beyond = tl.sum(tl.where(hit, 1.0, 0.0) - rate, axis=1)
    tl.atomic_add(factor_weight_ptr + 2 * d, excess * beyond, mask=any_D, sem="relaxed")
    tl.atomic_add(factor_weight_ptr + 2 * d + 1, excess * excess * tl.sum(rate, axis=1), mask=any_D, sem="relaxed")
    tl.store(factor_ptr + 2 * row, hits, mask=any_D)
    tl.store(factor_ptr + 2 * row + 1, predicted, mask=any_D)
    tl.store(checked_ptr + row, end, mask=any_D)
    tl.store(length_ptr + row, tl.zeros([BLOCK_D], tl.int32), mask=any_D & ((first_miss < BLOCK_K) | (end == length)))

    one = tl.full([BLOCK_D, BLOCK_K], 1.0, tl.float32)
    tl.atomic_add(evidence_ptr + 2 * evidence, one, mask=hit, sem="relaxed")
    tl.atomic_add(evidence_ptr + 2 * evidence + 1, one, mask=judged, sem="relaxed")
    counts_ptr = position_ptr + 2 * (d[:, None] * K + k)
    tl.atomic_add(counts_ptr, one, mask=hit, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, one, mask=judged, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["step_ptr"])
def _observe(  # type: ignore[no-untyped-def]
    slots_ptr, num_sampled_ptr, num_rejected_ptr, total_len_ptr, text_ptr, text_stride,
    open_tokens_ptr, open_evidence_ptr, length_ptr, base_ptr, checked_ptr, factor_ptr, factor_weight_ptr, calibration_ptr,
    evidence_ptr, position_ptr, chosen_ptr, submitted_ptr, edges_ptr, verified_ptr, request_ptr, step_ptr, rates_ptr,
    WITNESS: tl.constexpr, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    num_sampled = tl.load(num_sampled_ptr + request)
    if (slot >= 0) & (num_sampled > 0):
        total_len = tl.load(total_len_ptr + slot)
        num_rejected = tl.load(num_rejected_ptr + request)
        _count_verified(
            slot, num_sampled, num_rejected, total_len, chosen_ptr, submitted_ptr, edges_ptr, verified_ptr, request_ptr,
            step_ptr, open_evidence_ptr, factor_ptr, factor_weight_ptr, calibration_ptr, rates_ptr,
            WITNESS, K, C, D, E, BLOCK_K, BLOCK_C,
        )  # fmt: skip
        _judge(
            slot, total_len, text_ptr + slot * text_stride, open_tokens_ptr, open_evidence_ptr, length_ptr, base_ptr,
            checked_ptr, factor_ptr, factor_weight_ptr, evidence_ptr, position_ptr, rates_ptr, D, K, E, BLOCK_D, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _relation(token, is_draft, count, d, k, WITNESS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the relation of each token to the proposal of the other side (`NUM_RELATIONS`), int32 [D, K]."""
    is_witness = d == WITNESS
    witness_count = tl.sum(tl.where(is_witness, count, 0), axis=0)
    witness_token = tl.sum(tl.where(is_witness[:, None], token, 0), axis=0)
    both = is_draft & (k < witness_count)[None, :] & (is_witness == 0)[:, None]
    alike = tl.cumprod(tl.where(both & (token == witness_token[None, :]), 1.0, 0.0), axis=1) > 0.0
    num_alike = tl.sum(alike.to(tl.int32), axis=1)
    differs = both & (k[None, :] == num_alike[:, None])
    text_count = tl.max(tl.where(is_witness, 0, count), axis=0)
    text_relation = tl.where(alike, 1, tl.where(differs, 2, tl.where(witness_count > 0, 3, 0)))
    agreed, contradicted = tl.max(alike.to(tl.int32), axis=0), tl.max(differs.to(tl.int32), axis=0)
    witness_relation = tl.where(agreed > 0, 1, tl.where(contradicted > 0, 2, tl.where(text_count > 0, 3, 0)))
    return tl.where(is_witness[:, None], witness_relation[None, :], text_relation)


@triton.jit
def _worth(rate, is_draft, row_price):  # type: ignore[no-untyped-def]
    """Returns the worth of each proposal, [D], in tokens, from the rates of its tokens, [D, K]."""
    survival = tl.where(is_draft, tl.cumprod(rate, axis=1), 0.0)
    return tl.sum(tl.maximum(survival - row_price, survival * _MIN_WORTH_SHARE), axis=1)


@triton.jit
def _store_outlook(  # type: ignore[no-untyped-def]
    outlook_ptr, evidence_ptr, position_ptr, calibration_ptr, entry, count, factor, is_draft, row_price, max_drafts, d, k,
    MODEL: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Stores the mean and latest survival of the best text proposal and of the model's drafts (`board.outlook_S4K`)."""
    is_model, mask_K = d == MODEL, k < K
    model_count = tl.sum(tl.where(is_model, count, 0), axis=0)
    hits = tl.load(evidence_ptr + entry, mask=is_draft, other=0.0)
    trials = tl.load(evidence_ptr + entry + 1, mask=is_draft, other=1.0)
    if model_count > 0:
        for relation in tl.static_range(1, E // _NUM_LEVELS):
            hits += tl.load(evidence_ptr + entry + 2 * _NUM_LEVELS * relation, mask=is_draft, other=0.0)
            trials += tl.load(evidence_ptr + entry + 2 * _NUM_LEVELS * relation + 1, mask=is_draft, other=0.0)
    rate = tl.minimum(hits / trials * factor, _MAX_RATE)

    worth = tl.where(is_model, 0.0, _worth(rate, is_draft, row_price))
    _, best = tl.max(worth, axis=0, return_indices=True)
    is_best = is_draft & ((d == best) & (worth > 0.0))[:, None]
    calibration = (tl.load(calibration_ptr) + _PRIOR_STRENGTH) / (tl.load(calibration_ptr + 1) + _PRIOR_STRENGTH)
    survival = tl.sum(tl.where(is_best, tl.cumprod(rate, axis=1), 0.0), axis=0)
    survival = tl.minimum(survival * calibration, 1.0)
    before = tl.load(outlook_ptr + k, mask=mask_K, other=0.0)
    tl.store(outlook_ptr + k, before + (1 - _OUTLOOK_DECAY) * (survival - before), mask=mask_K)
    tl.store(outlook_ptr + 2 * K + k, survival, mask=mask_K)

    by_position, position_rate = tl.zeros([BLOCK_K], tl.float32), _PRIOR_RATE
    for j in tl.static_range(K):
        place = position_ptr + 2 * (MODEL * K + j)
        position_rate = (tl.load(place) + _PRIOR_STRENGTH * position_rate) / (tl.load(place + 1) + _PRIOR_STRENGTH)
        by_position = tl.where((k == j) & (k < max_drafts), position_rate, by_position)
    by_position = tl.minimum(by_position * tl.sum(tl.where(is_model[:, None], factor, 0.0)), _MAX_RATE)
    by_evidence = tl.sum(tl.where(is_draft & is_model[:, None], rate, 0.0), axis=0)
    usual = tl.cumprod(by_position, axis=0)
    expected = tl.cumprod(tl.where(k < model_count, by_evidence, by_position), axis=0)
    is_new = tl.load(outlook_ptr + K) == 0.0
    before = tl.where(is_new, usual, tl.load(outlook_ptr + K + k, mask=mask_K, other=0.0))
    after = tl.where(model_count > 0, expected, usual)
    rest = tl.where(model_count > 0, 1 - _OUTLOOK_DECAY, 1 - _OUTLOOK_RETURN)
    tl.debug_barrier()
    tl.store(outlook_ptr + K + k, before + rest * (after - before), mask=mask_K)
    tl.store(outlook_ptr + 3 * K + k, tl.where(k < model_count, expected, 0.0), mask=mask_K)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    slots_ptr, total_len_ptr, limit_ptr, tokens_ptr, levels_ptr, found_ptr, new_stride, found_stride,
    open_tokens_ptr, open_evidence_ptr, length_ptr, base_ptr, checked_ptr, factor_ptr, factor_weight_ptr, calibration_ptr,
    evidence_ptr, position_ptr, chosen_ptr, submitted_ptr, drafts_ptr, rates_ptr, outlook_ptr, row_price,
    MODEL: tl.constexpr, WITNESS: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    d, k = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    out = request * K + k
    if slot < 0:
        tl.store(drafts_ptr + out, tl.zeros([BLOCK_K], tl.int64), mask=k < K)
        tl.store(rates_ptr + out, tl.zeros([BLOCK_K], tl.float32), mask=k < K)
    else:
        row, mask_D = slot * D + d, d < D
        total_len = tl.load(total_len_ptr + slot)
        max_drafts = tl.minimum(tl.maximum(tl.load(limit_ptr + slot) - total_len - 1, 0), K)
        count = tl.minimum(tl.load(found_ptr + d * found_stride + request, mask=mask_D, other=0), max_drafts)
        is_draft = k[None, :] < count[:, None]
        source = d[:, None] * new_stride + out[None, :]
        token = tl.load(tokens_ptr + source, mask=is_draft, other=0)
        level = tl.load(levels_ptr + source, mask=is_draft, other=0)
        level = tl.minimum(tl.maximum(level.to(tl.int32), 0), _NUM_LEVELS - 1)
        entry = 2 * (d[:, None] * E + level)
        factor = _factor(factor_ptr, factor_weight_ptr, row, d, mask_D)[:, None]
        if MODEL >= 0:
            _store_outlook(
                outlook_ptr + slot * 4 * K, evidence_ptr, position_ptr, calibration_ptr, entry, count, factor, is_draft,
                row_price, max_drafts, d, k,
                MODEL, K, E, BLOCK_D, BLOCK_K,
            )  # fmt: skip
        if WITNESS >= 0:
            level += _NUM_LEVELS * _relation(token, is_draft, count, d, k, WITNESS)
            entry = 2 * (d[:, None] * E + level)
        hits = tl.load(evidence_ptr + entry, mask=is_draft, other=0.0)
        rate = tl.minimum(hits / tl.load(evidence_ptr + entry + 1, mask=is_draft, other=1.0) * factor, _MAX_RATE)
        worth = _worth(rate, is_draft, row_price)
        most, best = tl.max(worth, axis=0, return_indices=True)
        is_best = (d == best) & (worth > 0.0)

        is_stored = (count > 0) & (is_best | (tl.load(length_ptr + row, mask=mask_D, other=0) == 0))
        tl.store(length_ptr + row, count, mask=is_stored)
        tl.store(base_ptr + row, tl.zeros([BLOCK_D], tl.int32) + total_len, mask=is_stored)
        tl.store(checked_ptr + row, tl.zeros([BLOCK_D], tl.int32), mask=is_stored)
        stored = is_draft & is_stored[:, None]
        tl.store(open_tokens_ptr + row[:, None] * K + k[None, :], token, mask=stored)
        tl.store(open_evidence_ptr + row[:, None] * K + k[None, :], level.to(tl.int8), mask=stored)

        is_submitted = is_draft & is_best[:, None]
        tl.store(drafts_ptr + out, tl.sum(tl.where(is_submitted, token, 0), axis=0).to(tl.int64), mask=k < K)
        tl.store(rates_ptr + out, tl.sum(tl.where(is_submitted, rate, 0.0), axis=0), mask=k < K)
        tl.store(submitted_ptr + slot, tl.sum(tl.where(is_best, count, 0), axis=0))
        if most > 0.0:
            tl.store(chosen_ptr + slot, best)


def observe(*arguments: Any) -> None:
    """Implements `board.DraftBoard.observe`; the arguments are as for `board_numba.observe`."""
    (
        slots_B, num_sampled_B, num_rejected_B, total_len_S, token_ids_SL, *tables, edges_C, verified_DCK2, request_S2,
        step_D2, witness,
    ) = arguments  # fmt: skip
    factor_weight_D2, calibration_2, evidence_DE2, position_DK2 = tables[6:10]
    rates_DE = evidence_DE2.new_empty(evidence_DE2.shape[:2])
    num_kinds, num_positions = rates_DE.numel(), position_DK2.numel() // 2
    _begin_step[(1,)](
        evidence_DE2, position_DK2, factor_weight_D2, calibration_2, step_D2, rates_DE, DE=num_kinds, DK=num_positions,
        D2=step_D2.numel(), BLOCK=triton.next_power_of_2(max(num_kinds, num_positions)), num_warps=1,
    )  # fmt: skip
    _observe[(len(slots_B),)](
        slots_B, num_sampled_B, num_rejected_B, total_len_S, token_ids_SL, token_ids_SL.stride(0), *tables, edges_C,
        verified_DCK2, request_S2, step_D2, rates_DE, WITNESS=witness, C=len(edges_C),
        BLOCK_C=triton.next_power_of_2(len(edges_C) + 1), num_warps=1, **_sizes(position_DK2, evidence_DE2),
    )  # fmt: skip


def choose(*arguments: Any) -> None:
    """Implements `board.DraftBoard.choose`; the arguments are as for `board_numba.choose`."""
    *tensors, drafts_BK, rates_BK, outlook_S4K, model, witness, row_price = arguments
    slots_B, total_len_S, limit_S, tokens_DBK, levels_DBK, found_DB, *tables = tensors
    evidence_DE2, position_DK2 = tables[8:10]
    _choose[(len(slots_B),)](
        slots_B, total_len_S, limit_S, tokens_DBK, levels_DBK, found_DB, tokens_DBK.stride(0), found_DB.stride(0), *tables,
        drafts_BK, rates_BK, outlook_S4K, row_price, MODEL=model, WITNESS=witness, num_warps=1,
        **_sizes(position_DK2, evidence_DE2),
    )  # fmt: skip


def _sizes(position_DK2: torch.Tensor, evidence_DE2: torch.Tensor) -> dict[str, Any]:
    num_drafters, num_positions, _ = position_DK2.shape
    return {
        "D": num_drafters,
        "K": num_positions,
        "E": evidence_DE2.shape[1],
        "BLOCK_D": triton.next_power_of_2(num_drafters),
        "BLOCK_K": triton.next_power_of_2(num_positions),
    }
