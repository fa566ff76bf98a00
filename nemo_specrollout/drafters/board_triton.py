# SPDX-License-Identifier: Apache-2.0
"""The kernels of the draft board for a GPU: one program for each request. `board.py` says what they compute.

Learning takes two launches, because the tables must fade before anything is added to them. Choosing takes a third. Programs
share only the tables and counts, and add to them atomically. So their order changes a result only by the rounding of sums.

`t` are the board's tables. Shapes: as in `board.py`. A block's D and K are rounded up to powers of two.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from nemo_specrollout.drafters import base
from nemo_specrollout.drafters.base import Texts

_CALIBRATION_DECAY = tl.constexpr(base.CALIBRATION_DECAY)
_EVIDENCE_WINDOW = tl.constexpr(base.EVIDENCE_WINDOW)
_FACTOR_WEIGHT_DECAY = tl.constexpr(base.FACTOR_WEIGHT_DECAY)
_LOG2_REQUEST_DECAY = tl.constexpr(math.log2(base.REQUEST_DECAY))
_MAX_RATE = tl.constexpr(base.MAX_RATE)
_MIN_WORTH_SHARE = tl.constexpr(base.MIN_WORTH_SHARE)
_NUM_LEVELS = tl.constexpr(base.NUM_LEVELS)
_OUTLOOK_DECAY = tl.constexpr(base.OUTLOOK_DECAY)
_OUTLOOK_RETURN = tl.constexpr(base.OUTLOOK_RETURN)
_PRIOR_RATE = tl.constexpr(base.PRIOR_RATE)
_PRIOR_STRENGTH = tl.constexpr(base.PRIOR_STRENGTH)


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


@triton.jit(do_not_specialize=["step"])
def _begin_step(t, rates_ptr, step, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fades what was learned, clears the step's counts, and stores the rate of each kind of evidence before that."""
    rows = tl.arange(0, triton.next_power_of_2(D * E if E > K else D * K))
    hits, trials = _fade(t.evidence_DE2, rows, rows, D * E)
    tl.store(rates_ptr + rows, hits / trials, mask=rows < D * E)
    _fade(t.position_DK2, rows, rows - rows % K, D * K)
    factor_weight = tl.load(t.factor_weight_D2 + rows, mask=rows < 2 * D, other=0.0)
    tl.store(t.factor_weight_D2 + rows, factor_weight * _FACTOR_WEIGHT_DECAY, mask=rows < 2 * D)
    calibration = tl.load(t.calibration_2 + rows, mask=rows < 2, other=0.0)
    tl.store(t.calibration_2 + rows, calibration * _CALIBRATION_DECAY, mask=rows < 2)
    tl.store(t.steps_TD2 + step * 2 * D + rows, tl.zeros_like(rows), mask=rows < 2 * D)


@triton.jit
def _raw_factor(t, row, mask):  # type: ignore[no-untyped-def]
    """Returns a request's hits over the hits that its evidence predicted, with a prior of 1."""
    hits = tl.load(t.factor_SD2 + 2 * row, mask=mask, other=0.0) + _PRIOR_STRENGTH
    return hits / (tl.load(t.factor_SD2 + 2 * row + 1, mask=mask, other=0.0) + _PRIOR_STRENGTH)


@triton.jit
def _factor(t, row, d, mask):  # type: ignore[no-untyped-def]
    """Returns the factor for new drafts: the raw factor, weighted by how well factors have predicted hits."""
    products = tl.load(t.factor_weight_D2 + 2 * d, mask=mask, other=0.0) + 1.0
    weight = products / (tl.load(t.factor_weight_D2 + 2 * d + 1, mask=mask, other=0.0) + 1.0)
    return 1.0 + tl.minimum(tl.maximum(weight, 0.0), 1.0) * (_raw_factor(t, row, mask) - 1.0)


@triton.jit
def _count_verified(  # type: ignore[no-untyped-def]
    t, rates_ptr, step, slot, num_sampled, num_rejected, total_len,
    WITNESS: tl.constexpr, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Adds the drafts that the step verified, and those that it accepted, to all counts."""
    drafter = tl.minimum(tl.maximum(tl.load(t.chosen_S + slot), 0), D - 1)
    submitted = tl.minimum(tl.load(t.submitted_S + slot), K)
    num_verified = tl.minimum(num_sampled - 1 + num_rejected, submitted)
    num_accepted = tl.minimum(num_sampled - 1, num_verified)
    x, k = tl.arange(0, triton.next_power_of_2(X + 1)), tl.arange(0, triton.next_power_of_2(K))
    edges = tl.load(t.edges_X + x, mask=x < X, other=0)
    length_class = tl.sum(((x < X) & (total_len - num_sampled >= edges)).to(tl.int32), axis=0)
    counts_ptr = t.verified_DCK2 + 2 * ((drafter * (X + 1) + length_class) * K + k)
    one = tl.full(k.shape, 1, tl.int64)
    tl.atomic_add(counts_ptr, one, mask=k < num_verified, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, one, mask=k < num_accepted, sem="relaxed")
    if num_verified > 0:
        step_ptr = t.steps_TD2 + 2 * (step * D + drafter)
        tl.atomic_add(step_ptr, num_verified, sem="relaxed")
        tl.atomic_add(step_ptr + 1, num_accepted, sem="relaxed")
        tl.store(t.request_S2 + 2 * slot, tl.load(t.request_S2 + 2 * slot) + num_verified)
        tl.store(t.request_S2 + 2 * slot + 1, tl.load(t.request_S2 + 2 * slot + 1) + num_accepted)
        row = slot * D + drafter
        evidence = tl.load(t.evidence_SDK + row * K + k, mask=k < num_verified, other=0).to(tl.int32)
        evidence = tl.minimum(tl.maximum(evidence, 0), E - 1)
        if (drafter != WITNESS) & (tl.sum(tl.where(k == 0, evidence, 0)) < _NUM_LEVELS):
            factor = _factor(t, row, drafter, True)
            rate = tl.load(rates_ptr + drafter * E + evidence, mask=k < num_verified, other=0.0)
            predicted = tl.sum(tl.cumprod(tl.minimum(rate * factor, _MAX_RATE), axis=0))
            tl.atomic_add(t.calibration_2, num_accepted.to(tl.float32), sem="relaxed")
            tl.atomic_add(t.calibration_2 + 1, predicted, sem="relaxed")
    tl.store(t.submitted_S + slot, 0)


@triton.jit
def _judge(  # type: ignore[no-untyped-def]
    t, rates_ptr, text_ptr, slot, total_len, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr
):
    """Compares the proposals of a request with its text, each up to its first miss or the end of the text."""
    d, k = tl.arange(0, triton.next_power_of_2(D)), tl.arange(0, triton.next_power_of_2(K))[None, :]
    row, mask_D = slot * D + d, d < D
    length = tl.minimum(tl.load(t.length_SD + row, mask=mask_D, other=0), K)
    start = tl.load(t.base_SD + row, mask=mask_D, other=0)
    checked = tl.load(t.checked_SD + row, mask=mask_D, other=0)
    position = start[:, None] + k
    is_known = (k >= checked[:, None]) & (k < length[:, None]) & (position < total_len)
    token = tl.load(text_ptr + position, mask=is_known, other=0)
    is_hit = tl.load(t.tokens_SDK + row[:, None] * K + k, mask=is_known, other=-1) == token
    first_miss = tl.min(tl.where(is_known & (is_hit == 0), k, K), axis=1)
    judged = is_known & (k <= first_miss[:, None])
    hit = judged & is_hit
    evidence = tl.load(t.evidence_SDK + row[:, None] * K + k, mask=judged, other=0).to(tl.int32)
    evidence = d[:, None] * E + tl.minimum(tl.maximum(evidence, 0), E - 1)
    rate = tl.load(rates_ptr + evidence, mask=judged, other=0.0)
    excess = _raw_factor(t, row, mask_D) - 1.0

    num_judged = tl.sum(judged.to(tl.int32), axis=1)
    end = checked + num_judged
    weight = tl.where(judged, tl.exp2((end[:, None] - 1 - k).to(tl.float32) * _LOG2_REQUEST_DECAY), 0.0)
    left = tl.exp2(num_judged.to(tl.float32) * _LOG2_REQUEST_DECAY)
    any_D = num_judged > 0
    hits = tl.load(t.factor_SD2 + 2 * row, mask=any_D, other=0.0) * left + tl.sum(tl.where(hit, weight, 0.0), axis=1)
    predicted = tl.load(t.factor_SD2 + 2 * row + 1, mask=any_D, other=0.0) * left + tl.sum(weight * rate, axis=1)
    beyond = tl.sum(tl.where(hit, 1.0, 0.0) - rate, axis=1)
    tl.atomic_add(t.factor_weight_D2 + 2 * d, excess * beyond, mask=any_D, sem="relaxed")
    tl.atomic_add(t.factor_weight_D2 + 2 * d + 1, excess * excess * tl.sum(rate, axis=1), mask=any_D, sem="relaxed")
    tl.store(t.factor_SD2 + 2 * row, hits, mask=any_D)
    tl.store(t.factor_SD2 + 2 * row + 1, predicted, mask=any_D)
    tl.store(t.checked_SD + row, end, mask=any_D)
    tl.store(t.length_SD + row, tl.zeros_like(row).to(tl.int32), mask=any_D & ((first_miss < K) | (end == length)))

    one = tl.full(judged.shape, 1.0, tl.float32)
    tl.atomic_add(t.evidence_DE2 + 2 * evidence, one, mask=hit, sem="relaxed")
    tl.atomic_add(t.evidence_DE2 + 2 * evidence + 1, one, mask=judged, sem="relaxed")
    counts_ptr = t.position_DK2 + 2 * (d[:, None] * K + k)
    tl.atomic_add(counts_ptr, one, mask=hit, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, one, mask=judged, sem="relaxed")


@triton.jit(do_not_specialize=["step"])
def _observe(  # type: ignore[no-untyped-def]
    texts, text_stride, num_sampled_ptr, num_rejected_ptr, t, rates_ptr, step,
    WITNESS: tl.constexpr, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    slot = tl.load(texts.slots_B + request).to(tl.int64)
    num_sampled = tl.load(num_sampled_ptr + request)
    if (slot >= 0) & (num_sampled > 0):
        total_len, num_rejected = tl.load(texts.total_len_S + slot), tl.load(num_rejected_ptr + request)
        _count_verified(t, rates_ptr, step, slot, num_sampled, num_rejected, total_len, WITNESS, D, K, E, X)
        _judge(t, rates_ptr, texts.token_ids_SL + slot * text_stride, slot, total_len, D, K, E)


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
    t, slot, entry, count, factor, is_draft, row_price, max_drafts,
    MODEL: tl.constexpr, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Stores the mean and latest survival of the best text proposal and of the model's drafts (`Tables.outlook_S4K`)."""
    d, k = tl.arange(0, triton.next_power_of_2(D)), tl.arange(0, triton.next_power_of_2(K))
    is_model, mask_K, outlook_ptr = d == MODEL, k < K, t.outlook_S4K + slot * 4 * K
    model_count = tl.sum(tl.where(is_model, count, 0), axis=0)
    hits = tl.load(t.evidence_DE2 + entry, mask=is_draft, other=0.0)
    trials = tl.load(t.evidence_DE2 + entry + 1, mask=is_draft, other=1.0)
    if model_count > 0:
        for relation in tl.static_range(1, E // _NUM_LEVELS):
            hits += tl.load(t.evidence_DE2 + entry + 2 * _NUM_LEVELS * relation, mask=is_draft, other=0.0)
            trials += tl.load(t.evidence_DE2 + entry + 2 * _NUM_LEVELS * relation + 1, mask=is_draft, other=0.0)
    rate = tl.minimum(hits / trials * factor, _MAX_RATE)

    worth = tl.where(is_model, 0.0, _worth(rate, is_draft, row_price))
    _, best = tl.max(worth, axis=0, return_indices=True)
    is_best = is_draft & ((d == best) & (worth > 0.0))[:, None]
    calibration = (tl.load(t.calibration_2) + _PRIOR_STRENGTH) / (tl.load(t.calibration_2 + 1) + _PRIOR_STRENGTH)
    survival = tl.sum(tl.where(is_best, tl.cumprod(rate, axis=1), 0.0), axis=0)
    survival = tl.minimum(survival * calibration, 1.0)
    before = tl.load(outlook_ptr + k, mask=mask_K, other=0.0)
    tl.store(outlook_ptr + k, before + (1 - _OUTLOOK_DECAY) * (survival - before), mask=mask_K)
    tl.store(outlook_ptr + 2 * K + k, survival, mask=mask_K)

    by_position, position_rate = tl.zeros(k.shape, tl.float32), _PRIOR_RATE
    for j in tl.static_range(K):
        place = t.position_DK2 + 2 * (MODEL * K + j)
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
    texts, t, row_price, MODEL: tl.constexpr, WITNESS: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(texts.slots_B + request).to(tl.int64)
    d, k = tl.arange(0, triton.next_power_of_2(D)), tl.arange(0, triton.next_power_of_2(K))
    out = request * K + k
    if slot < 0:
        tl.store(t.drafts_BK + out, tl.zeros(k.shape, tl.int64), mask=k < K)
        tl.store(t.rates_BK + out, tl.zeros(k.shape, tl.float32), mask=k < K)
    else:
        row, mask_D = slot * D + d, d < D
        total_len = tl.load(texts.total_len_S + slot)
        max_drafts = tl.minimum(tl.maximum(tl.load(t.limit_S + slot) - total_len - 1, 0), K)
        count = tl.minimum(tl.load(t.found_DB + d * S + request, mask=mask_D, other=0), max_drafts)
        is_draft = k[None, :] < count[:, None]
        source = d[:, None] * S * K + out[None, :]
        token = tl.load(t.tokens_DBK + source, mask=is_draft, other=0)
        level = tl.load(t.levels_DBK + source, mask=is_draft, other=0)
        level = tl.minimum(tl.maximum(level.to(tl.int32), 0), _NUM_LEVELS - 1)
        entry = 2 * (d[:, None] * E + level)
        factor = _factor(t, row, d, mask_D)[:, None]
        if MODEL >= 0:
            _store_outlook(t, slot, entry, count, factor, is_draft, row_price, max_drafts, MODEL, D, K, E)
        if WITNESS >= 0:
            level += _NUM_LEVELS * _relation(token, is_draft, count, d, k, WITNESS)
            entry = 2 * (d[:, None] * E + level)
        hits = tl.load(t.evidence_DE2 + entry, mask=is_draft, other=0.0)
        rate = tl.minimum(hits / tl.load(t.evidence_DE2 + entry + 1, mask=is_draft, other=1.0) * factor, _MAX_RATE)
        worth = _worth(rate, is_draft, row_price)
        most, best = tl.max(worth, axis=0, return_indices=True)
        is_best = (d == best) & (worth > 0.0)

        is_stored = (count > 0) & (is_best | (tl.load(t.length_SD + row, mask=mask_D, other=0) == 0))
        tl.store(t.length_SD + row, count, mask=is_stored)
        tl.store(t.base_SD + row, tl.zeros_like(count) + total_len, mask=is_stored)
        tl.store(t.checked_SD + row, tl.zeros_like(count), mask=is_stored)
        stored = is_draft & is_stored[:, None]
        tl.store(t.tokens_SDK + row[:, None] * K + k[None, :], token, mask=stored)
        tl.store(t.evidence_SDK + row[:, None] * K + k[None, :], level.to(tl.int8), mask=stored)

        is_submitted = is_draft & is_best[:, None]
        tl.store(t.drafts_BK + out, tl.sum(tl.where(is_submitted, token, 0), axis=0).to(tl.int64), mask=k < K)
        tl.store(t.rates_BK + out, tl.sum(tl.where(is_submitted, rate, 0.0), axis=0), mask=k < K)
        tl.store(t.submitted_S + slot, tl.sum(tl.where(is_best, count, 0), axis=0))
        if most > 0.0:
            tl.store(t.chosen_S + slot, best)


def observe(
    texts: Texts, num_sampled_B: torch.Tensor, num_rejected_B: torch.Tensor, t: Any, step: int, witness: int
) -> None:
    """Implements `DraftBoard.observe`."""
    rates_DE, sizes = torch.empty_like(t.evidence_DE2[..., 0]), _sizes(t)
    _begin_step[(1,)](t, rates_DE, step, num_warps=1, **sizes)
    _observe[(len(texts.slots_B),)](
        texts, texts.token_ids_SL.stride(0), num_sampled_B, num_rejected_B, t, rates_DE, step, WITNESS=witness,
        X=len(t.edges_X), num_warps=1, **sizes,
    )  # fmt: skip


def choose(texts: Texts, t: Any, model: int, witness: int, row_price: float) -> None:
    """Implements `DraftBoard.choose`."""
    grid, num_slots = (len(texts.slots_B),), len(t.limit_S)
    _choose[grid](texts, t, row_price, MODEL=model, WITNESS=witness, S=num_slots, num_warps=1, **_sizes(t))


def _sizes(t: Any) -> dict[str, int]:
    num_drafters, num_kinds, _ = t.evidence_DE2.shape
    return {"D": num_drafters, "K": t.position_DK2.shape[1], "E": num_kinds}
