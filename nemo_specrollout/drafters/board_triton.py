# SPDX-License-Identifier: Apache-2.0
"""The draft board on a GPU, as functions that the kernels in `step_triton.py` call. `board.py` says what they compute.

One program serves one request. All programs read what the board has learned, and none changes it while it observes. Each
program writes its additions to a place of its own, or adds whole numbers to shared counters. The program that finishes last
adds everything to the board's tables in a fixed order. So two runs of the same engine steps learn exactly the same.

In the functions, `t` are the board's tables. Shapes are as in `board.py`. In addition, N entries of the batch are read at a
time, and each of them has W = 4 * D + 2 sums. D and K are rounded up to powers of two where Triton needs it.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from nemo_specrollout.drafters import base
from nemo_specrollout.sampling.triton_common import is_last

_CALIBRATION_DECAY = tl.constexpr(base.CALIBRATION_DECAY)
_EVIDENCE_WINDOW = tl.constexpr(base.EVIDENCE_WINDOW)
_FACTOR_WEIGHT_DECAY = tl.constexpr(base.FACTOR_WEIGHT_DECAY)
_LOG2_REQUEST_DECAY = tl.constexpr(math.log2(base.REQUEST_DECAY))
_MAX_RATE = tl.constexpr(base.MAX_RATE)
_LEAST_PRICE = tl.constexpr(base.LEAST_PRICE)
_MIN_WORTH_SHARE = tl.constexpr(base.MIN_WORTH_SHARE)
_NUM_BINS = tl.constexpr(base.NUM_BINS)
_NUM_LEVELS = tl.constexpr(base.NUM_LEVELS)
_PRIOR_STRENGTH = tl.constexpr(base.PRIOR_STRENGTH)
_ROWS = tl.constexpr(32)


class Sums(NamedTuple):
    """What one engine step adds to those tables of the board that all requests share."""

    evidence_DE2: Any
    """Number of right draft tokens (hits) and of judged ones, for each kind of evidence, int32. This field, `steps_D2` and
    `finished` are 0 between engine steps."""
    steps_D2: Any
    """Number of verified and of accepted draft tokens of each drafter, int32."""
    finished: Any
    """Number of programs of the present launch that have finished, int32."""
    weight_BW: Any
    """What each entry of the batch adds to `factor_weight_D2`, then to `calibration_D2`, then to `alone_2`, float32. An entry
    without a request adds 0."""


@triton.jit
def fade_and_add(t, sums, step, num_rows, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reduces the weight of what the board has learned so far, and adds the sums of the present engine step.

    All programs of the engine step must have finished.
    """
    e = tl.arange(0, triton.next_power_of_2(D * E))
    mask = e < D * E
    trials = tl.load(t.evidence_DE2 + 2 * e + 1, mask=mask, other=1.0)
    left = tl.where(trials > _EVIDENCE_WINDOW, _EVIDENCE_WINDOW / trials, 1.0)
    hits = tl.load(t.evidence_DE2 + 2 * e, mask=mask, other=0.0) * left
    new_hits = tl.load(sums.evidence_DE2 + 2 * e, mask=mask, other=0)
    new_trials = tl.load(sums.evidence_DE2 + 2 * e + 1, mask=mask, other=0)
    tl.store(t.evidence_DE2 + 2 * e, hits + new_hits, mask=mask)
    tl.store(t.evidence_DE2 + 2 * e + 1, trials * left + new_trials, mask=mask)
    tl.store(sums.evidence_DE2 + 2 * e, tl.zeros_like(e), mask=mask)
    tl.store(sums.evidence_DE2 + 2 * e + 1, tl.zeros_like(e), mask=mask)

    width: tl.constexpr = 4 * D + 2
    w = tl.arange(0, triton.next_power_of_2(width))
    n = tl.arange(0, _ROWS)[:, None]
    total_NW = tl.zeros((_ROWS, triton.next_power_of_2(width)), tl.float32)
    for first in range(0, num_rows, _ROWS):
        is_row = (first + n < num_rows) & (w < width)[None, :]
        total_NW += tl.load(sums.weight_BW + (first + n) * width + w[None, :], mask=is_row, other=0.0)
    total = tl.sum(total_NW, axis=0)
    is_calibration = (w >= 2 * D) & (w < 4 * D)
    is_alone = (w >= 4 * D) & (w < width)
    weight = tl.load(t.factor_weight_D2 + w, mask=w < 2 * D, other=0.0)
    calibration = tl.load(t.calibration_D2 + w - 2 * D, mask=is_calibration, other=0.0)
    alone = tl.load(t.alone_2 + w - 4 * D, mask=is_alone, other=0.0)
    counts = tl.load(sums.steps_D2 + w, mask=w < 2 * D, other=0)
    tl.debug_barrier()  # all lanes have read the tables and the sums
    tl.store(t.factor_weight_D2 + w, weight * _FACTOR_WEIGHT_DECAY + total, mask=w < 2 * D)
    tl.store(t.calibration_D2 + w - 2 * D, calibration * _CALIBRATION_DECAY + total, mask=is_calibration)
    tl.store(t.alone_2 + w - 4 * D, alone * _CALIBRATION_DECAY + total, mask=is_alone)
    tl.store(t.steps_TD2 + step * 2 * D + w, counts, mask=w < 2 * D)
    tl.store(sums.steps_D2 + w, tl.zeros_like(w), mask=w < 2 * D)
    tl.store(sums.finished, 0)
    column = tl.arange(0, 2 * _NUM_BINS)
    for row in range(K + 2):
        tl.store(t.spread_FQ + row * (_NUM_BINS + 1) + column, tl.zeros_like(column), mask=column <= _NUM_BINS)


@triton.jit
def _raw_factor(t, row, mask):  # type: ignore[no-untyped-def]
    """Returns a request's right draft tokens divided by those that were predicted from its evidence.

    A prior draws the result towards 1.
    """
    hits = tl.load(t.factor_SD2 + 2 * row, mask=mask, other=0.0) + _PRIOR_STRENGTH
    return hits / (tl.load(t.factor_SD2 + 2 * row + 1, mask=mask, other=0.0) + _PRIOR_STRENGTH)


@triton.jit
def _factor(t, row, d, mask):  # type: ignore[no-untyped-def]
    """Returns the factor by which the acceptance rates of a request's new drafts are multiplied.

    It is `_raw_factor`, drawn towards 1 if the factors of requests have predicted badly so far.
    """
    products = tl.load(t.factor_weight_D2 + 2 * d, mask=mask, other=0.0) + 1.0
    weight = products / (tl.load(t.factor_weight_D2 + 2 * d + 1, mask=mask, other=0.0) + 1.0)
    return 1.0 + tl.minimum(tl.maximum(weight, 0.0), 1.0) * (_raw_factor(t, row, mask) - 1.0)


@triton.jit
def _rate(counts_ptr, mask):  # type: ignore[no-untyped-def]
    """Returns acceptance rates, which are hits divided by judged draft tokens. `counts_ptr` points to pairs of these."""
    return tl.load(counts_ptr, mask=mask, other=0.0) / tl.load(counts_ptr + 1, mask=mask, other=1.0)


@triton.jit
def level_rates(t, d, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the acceptance rate of each evidence level of drafter `d`, whatever the other drafters propose, [NUM_LEVELS]."""
    level = tl.arange(0, _NUM_LEVELS)
    counts_ptr = t.evidence_DE2 + 2 * (d * E + level)
    hits = tl.zeros(level.shape, tl.float32)
    trials = tl.zeros(level.shape, tl.float32)
    for relation in tl.static_range(E // _NUM_LEVELS):
        hits += tl.load(counts_ptr + 2 * _NUM_LEVELS * relation)
        trials += tl.load(counts_ptr + 2 * _NUM_LEVELS * relation + 1)
    return hits / trials


@triton.jit
def _count_verified(t, sums, slot, num_sampled, num_rejected, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts how many drafts of a request the engine step has verified, and how many of these were accepted.

    Returns the drafter of these drafts, the number of accepted ones, and how many were predicted to be accepted.
    """
    drafter = tl.minimum(tl.maximum(tl.load(t.chosen_S + slot), 0), D - 1)
    submitted = tl.minimum(tl.load(t.submitted_S + slot), K)
    num_verified = tl.minimum(num_sampled - 1 + num_rejected, submitted)
    num_accepted = tl.minimum(num_sampled - 1, num_verified)
    k = tl.arange(0, triton.next_power_of_2(K))
    counts_ptr = t.verified_DK2 + 2 * (drafter * K + k)
    one = tl.full(k.shape, 1, tl.int64)
    is_own = 1 - tl.load(t.is_early_S + slot).to(tl.int32)
    tl.atomic_add(counts_ptr, one, mask=k < num_verified * is_own, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, one, mask=k < num_accepted * is_own, sem="relaxed")
    hits, predicted = 0.0, 0.0
    if num_verified > 0:
        tl.atomic_add(sums.steps_D2 + 2 * drafter, num_verified, sem="relaxed")
        tl.atomic_add(sums.steps_D2 + 2 * drafter + 1, num_accepted, sem="relaxed")
        tl.atomic_add(t.request_S2 + 2 * slot, num_verified, sem="relaxed")
        tl.atomic_add(t.request_S2 + 2 * slot + 1, num_accepted, sem="relaxed")
        row = slot * D + drafter
        evidence = tl.load(t.evidence_SDK + row * K + k, mask=k < num_verified, other=0).to(tl.int32)
        evidence = tl.minimum(tl.maximum(evidence, 0), E - 1)
        rate = _rate(t.evidence_DE2 + 2 * (drafter * E + evidence), k < num_verified)
        factor = _factor(t, row, drafter, True)
        hits = num_accepted + 0.0
        predicted = tl.sum(tl.cumprod(tl.minimum(rate * factor, _MAX_RATE), axis=0))
    tl.debug_barrier()  # all lanes have read the number of submitted drafts
    tl.store(t.submitted_S + slot, 0)
    return drafter, hits, predicted


@triton.jit
def _judge(t, sums, text_ptr, slot, total_len, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compares the open proposals for a request with its text, each up to its first wrong token or the end of the text.

    Returns what the request adds to the two columns of `factor_weight_D2`.
    """
    d = tl.arange(0, triton.next_power_of_2(D))
    k = tl.arange(0, triton.next_power_of_2(K))[None, :]
    row = slot * D + d
    mask_D = d < D
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
    rate = _rate(t.evidence_DE2 + 2 * evidence, judged)
    excess = _raw_factor(t, row, mask_D) - 1.0

    num_judged = tl.sum(judged.to(tl.int32), axis=1)
    end = checked + num_judged
    weight = tl.where(judged, tl.exp2((end[:, None] - 1 - k).to(tl.float32) * _LOG2_REQUEST_DECAY), 0.0)
    left = tl.exp2(num_judged.to(tl.float32) * _LOG2_REQUEST_DECAY)
    any_D = num_judged > 0
    hits = tl.load(t.factor_SD2 + 2 * row, mask=any_D, other=0.0) * left + tl.sum(tl.where(hit, weight, 0.0), axis=1)
    predicted = tl.load(t.factor_SD2 + 2 * row + 1, mask=any_D, other=0.0) * left + tl.sum(weight * rate, axis=1)
    tl.debug_barrier()  # all lanes have read the request's rows
    tl.store(t.factor_SD2 + 2 * row, hits, mask=any_D)
    tl.store(t.factor_SD2 + 2 * row + 1, predicted, mask=any_D)
    tl.store(t.checked_SD + row, end, mask=any_D)
    tl.store(t.length_SD + row, tl.zeros_like(row).to(tl.int32), mask=any_D & ((first_miss < K) | (end == length)))

    one = tl.full(judged.shape, 1, tl.int32)
    tl.atomic_add(sums.evidence_DE2 + 2 * evidence, one, mask=hit, sem="relaxed")
    tl.atomic_add(sums.evidence_DE2 + 2 * evidence + 1, one, mask=judged, sem="relaxed")
    beyond = tl.sum(tl.where(hit, 1.0, 0.0) - rate, axis=1)
    return tl.where(any_D, excess * beyond, 0.0), tl.where(any_D, excess * excess * tl.sum(rate, axis=1), 0.0)


@triton.jit
def observe_request(  # type: ignore[no-untyped-def]
    texts, row_stride, outcomes, t, sums, request, num_requests, step, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """Learns from the tokens that the engine step sampled for a request.

    The program that finishes last adds the sums of all programs to the board's tables.
    """
    slot = tl.load(texts.slots_B + request).to(tl.int64)
    num_sampled_ptr, num_rejected_ptr = outcomes
    num_sampled = tl.load(num_sampled_ptr + request)
    d = tl.arange(0, triton.next_power_of_2(D))
    products = tl.zeros(d.shape, tl.float32)
    squares = tl.zeros(d.shape, tl.float32)
    drafter, hits, predicted, alone_hits, alone_predicted = 0, 0.0, 0.0, 0.0, 0.0
    if (slot >= 0) & (num_sampled > 0):
        total_len = tl.load(texts.total_len_S + slot)
        num_rejected = tl.load(num_rejected_ptr + request)
        drafter, hits, predicted = _count_verified(t, sums, slot, num_sampled, num_rejected, D, K, E)
        text_ptr = texts.token_ids_SL + slot * row_stride
        alone = tl.load(t.alone_token_S + slot)
        if alone >= 0:
            alone_hits = (tl.load(text_ptr + total_len - num_sampled) == alone).to(tl.float32)
            alone_predicted = tl.load(t.alone_rate_S + slot)
        products, squares = _judge(t, sums, text_ptr, slot, total_len, D, K, E)
    row_ptr = sums.weight_BW + request * (4 * D + 2)
    weight_ptr = row_ptr + 2 * d
    tl.store(weight_ptr, products, mask=d < D)
    tl.store(weight_ptr + 1, squares, mask=d < D)
    tl.store(weight_ptr + 2 * D, tl.where(d == drafter, hits, 0.0), mask=d < D)
    tl.store(weight_ptr + 2 * D + 1, tl.where(d == drafter, predicted, 0.0), mask=d < D)
    tl.store(row_ptr + 4 * D, alone_hits)
    tl.store(row_ptr + 4 * D + 1, alone_predicted)
    if is_last(sums.finished, num_requests):
        fade_and_add(t, sums, step, num_requests, D, K, E)


@triton.jit
def _relation(token, is_draft, count, d, k, REFERENCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the relation of each draft token to the proposal of the other side, int32 [D, K].

    One side is the reference drafter, which has weights, and the other side is all other drafters. `NUM_RELATIONS` explains
    the numbers.
    """
    is_reference = d == REFERENCE
    reference_count = tl.sum(tl.where(is_reference, count, 0), axis=0)
    reference_token = tl.sum(tl.where(is_reference[:, None], token, 0), axis=0)
    both = is_draft & (k < reference_count)[None, :] & (is_reference == 0)[:, None]
    alike = tl.cumprod(tl.where(both & (token == reference_token[None, :]), 1.0, 0.0), axis=1) > 0.0
    num_alike = tl.sum(alike.to(tl.int32), axis=1)
    differs = both & (k[None, :] == num_alike[:, None])
    text_count = tl.max(tl.where(is_reference, 0, count), axis=0)
    text_relation = tl.where(alike, 1, tl.where(differs, 2, tl.where(reference_count > 0, 3, 0)))
    agreed = tl.max(alike.to(tl.int32), axis=0)
    contradicted = tl.max(differs.to(tl.int32), axis=0)
    reference_relation = tl.where(agreed > 0, 1, tl.where(contradicted > 0, 2, tl.where(text_count > 0, 3, 0)))
    return tl.where(is_reference[:, None], reference_relation[None, :], text_relation)


@triton.jit
def _worth(survival, price):  # type: ignore[no-untyped-def]
    """Returns the worth of draft tokens, which is their survival minus the price of a row.

    It is at least a tiny share of the survival, so that tokens which cost more than they win can be ranked too.
    """
    return tl.maximum(survival - price, survival * _MIN_WORTH_SHARE)


@triton.jit
def _cheapness(k, price, mean_price):  # type: ignore[no-untyped-def]
    """Returns the factors for a request's rates in `rates_SK`, [K]. All but the first of them are 1.

    The first is the mean price of a row divided by the price of this request's rows.
    """
    is_priced = tl.minimum(price, mean_price) > _LEAST_PRICE
    factor = tl.where(is_priced, mean_price / tl.maximum(price, _LEAST_PRICE), 1.0)
    return tl.where(k == 0, factor, 1.0)


@triton.jit
def _best(worth, count, d):  # type: ignore[no-untyped-def]
    """Returns the drafter whose proposal has the highest worth, this worth, and the number of the proposal's draft tokens."""
    most, best = tl.max(worth, axis=0, return_indices=True)
    return best, most, tl.sum(tl.where((d == best) & (worth > 0.0), count, 0), axis=0)


@triton.jit
def _count(t, row, survival, count, num_requests, k):  # type: ignore[no-untyped-def]
    """Counts the first `count` draft tokens of a request in a row of the histogram `spread_FQ`, by their `survival`, [K].

    Adds `num_requests` to the row's last column, which counts requests.
    """
    row_ptr = t.spread_FQ + row * (_NUM_BINS + 1)
    bins = tl.minimum((survival * _NUM_BINS).to(tl.int32), _NUM_BINS - 1)
    tl.atomic_add(row_ptr + bins, tl.full(k.shape, 1, tl.int32), mask=k < count, sem="relaxed")
    tl.atomic_add(row_ptr + _NUM_BINS, num_requests, sem="relaxed")


@triton.jit
def _of(d, drafter, values):  # type: ignore[no-untyped-def]
    """Returns the values of one drafter, [K], from the values of all drafters, [D, K]."""
    return tl.sum(tl.where((d == drafter)[:, None], values, 0.0), axis=0)


@triton.jit
def _level_rates(t, entry, is_draft, factor, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the acceptance rates of draft tokens by their evidence levels, whatever the other drafters propose, [D, K]."""
    hits = tl.load(t.evidence_DE2 + entry, mask=is_draft, other=0.0)
    trials = tl.load(t.evidence_DE2 + entry + 1, mask=is_draft, other=1.0)
    for relation in tl.static_range(1, E // _NUM_LEVELS):
        hits += tl.load(t.evidence_DE2 + entry + 2 * _NUM_LEVELS * relation, mask=is_draft, other=0.0)
        trials += tl.load(t.evidence_DE2 + entry + 2 * _NUM_LEVELS * relation + 1, mask=is_draft, other=0.0)
    return tl.minimum(hits / trials * factor, _MAX_RATE)


@triton.jit
def _calibration(t, d, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the factor that corrects each drafter's survival in the histogram for the host, [D, 1].

    It is the number of accepted draft tokens divided by the number that was predicted.
    """
    hits = tl.load(t.calibration_D2 + 2 * d, mask=d < D, other=0.0) + _PRIOR_STRENGTH
    predicted = tl.load(t.calibration_D2 + 2 * d + 1, mask=d < D, other=0.0) + _PRIOR_STRENGTH
    return (hits / predicted)[:, None]


@triton.jit
def _count_without_model(t, slot, d, k, token, count, survival, price, MODEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts which tokens would be submitted for a request without the drafter with weights (the model).

    Writes the first of these tokens to `alone_token_S`. If the model has not drafted for the request, it counts nothing and
    writes -1.
    """
    worth = tl.where(d == MODEL, 0.0, tl.sum(_worth(survival, price), axis=1))
    other, _, other_count = _best(worth, count, d)
    first_token = -1
    if tl.sum(tl.where(d == MODEL, count, 0), axis=0) > 0:
        expected = _of(d, other, survival)
        hits = (tl.load(t.alone_2) + _PRIOR_STRENGTH) / (tl.load(t.alone_2 + 1) + _PRIOR_STRENGTH)
        _count(t, 0, expected * hits, other_count, 1, k)
        if other_count > 0:
            first_token = tl.sum(tl.where((d == other)[:, None] & (k == 0)[None, :], token, 0))
            tl.store(t.alone_rate_S + slot, tl.sum(tl.where(k == 0, expected, 0.0), axis=0))
    tl.store(t.alone_token_S + slot, first_token)


@triton.jit
def _count_choice(  # type: ignore[no-untyped-def]
    t, d, k, found, count, most, rate, is_draft, price, MODEL: tl.constexpr, D: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Counts in `spread_FQ` what is submitted, and what would be submitted if the model had drafted to each possible depth.

    The model is the drafter with weights. If it has drafted d tokens, the result is known for depths up to d, and foreseen for
    depths up to 2 * d + 1. A token that it did not draft is assumed to have the acceptance rate of its last draft token. The
    laboratory's kernel for a CPU is `_count_depths`.
    """
    survival = tl.where(is_draft, tl.cumprod(rate, axis=1), 0.0)
    calibration = _calibration(t, d, D)
    worth = tl.sum(_worth(survival, price), axis=1)
    best, _, best_count = _best(worth, count, d)
    submitted = _of(d, best, survival * calibration)
    model_count = tl.sum(tl.where(d == MODEL, count, 0), axis=0)
    _count(t, K + 1, submitted, best_count, 1, k)
    if model_count == 0:
        _count(t, 0, submitted, best_count, 1, k)
    if MODEL >= 0:
        other, other_worth, other_count = _best(tl.where(d == MODEL, 0.0, worth), count, d)
        of_other = _of(d, other, survival * calibration)
        drafted = _of(d, MODEL, rate)
        last = tl.sum(tl.where(k == model_count - 1, drafted, 0.0), axis=0)
        foreseen = tl.where(k < most, tl.cumprod(tl.where(k < model_count, drafted, last), axis=0), 0.0)
        of_model = foreseen * tl.sum(tl.where((d == MODEL)[:, None], calibration, 0.0))
        depth = tl.sum(tl.where(d == MODEL, found, 0), axis=0)
        for f in range(1, tl.where(depth > 0, tl.minimum(2 * depth + 1, K), 0) + 1):
            worth_f = tl.sum(tl.where(k < tl.minimum(f, most), _worth(foreseen, price), 0.0), axis=0)
            of_f = tl.where(worth_f > other_worth, of_model, of_other)
            count_f = tl.where(worth_f > other_worth, tl.minimum(f, most), other_count)
            _count(t, f, of_f, count_f, (f <= depth).to(tl.int32), k)


@triton.jit
def choose_for_request(  # type: ignore[no-untyped-def]
    texts, t, request, row_price, context_price, mean_price, most_drafts, MODEL: tl.constexpr, REFERENCE: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Submits the proposal with the highest worth for a request, so that the next engine step may verify it."""
    slot = tl.load(texts.slots_B + request).to(tl.int64)
    d = tl.arange(0, triton.next_power_of_2(D))
    k = tl.arange(0, triton.next_power_of_2(K))
    out = request * K + k
    if slot < 0:
        tl.store(t.drafts_BK + out, tl.zeros(k.shape, tl.int64), mask=k < K)
    else:
        row = slot * D + d
        mask_D = d < D
        total_len = tl.load(texts.total_len_S + slot)
        price = row_price + context_price * total_len.to(tl.float32)
        max_drafts = tl.minimum(tl.maximum(tl.load(t.limit_S + slot) - total_len - 1, 0), most_drafts)
        found = tl.load(t.found_DB + d * S + request, mask=mask_D, other=0)
        count = tl.maximum(tl.minimum(found, max_drafts), 0)
        is_draft = k[None, :] < count[:, None]
        source = d[:, None] * S * K + out[None, :]
        token = tl.load(t.tokens_DBK + source, mask=is_draft, other=0)
        level = tl.load(t.levels_DBK + source, mask=is_draft, other=0)
        level = tl.minimum(tl.maximum(level.to(tl.int32), 0), _NUM_LEVELS - 1)
        entry = 2 * (d[:, None] * E + level)
        factor = _factor(t, row, d, mask_D)[:, None]
        if MODEL >= 0:  # text drafts have no relation to a model that does not draft
            survival = tl.where(is_draft, tl.cumprod(_level_rates(t, entry, is_draft, factor, E), axis=1), 0.0)
            _count_without_model(t, slot, d, k, token, count, survival, price, MODEL)
        if REFERENCE >= 0:
            level += _NUM_LEVELS * _relation(token, is_draft, count, d, k, REFERENCE)
            entry = 2 * (d[:, None] * E + level)
        rate = tl.minimum(_rate(t.evidence_DE2 + entry, is_draft) * factor, _MAX_RATE)
        survival = tl.where(is_draft, tl.cumprod(rate, axis=1), 0.0)
        worth = tl.sum(_worth(survival, price), axis=1)
        best, most, best_count = _best(worth, count, d)
        _count_choice(t, d, k, found, count, max_drafts, rate, is_draft, price, MODEL, D, K)
        is_best = (d == best) & (worth > 0.0)
        is_stored = (count > 0) & (is_best | (tl.load(t.length_SD + row, mask=mask_D, other=0) == 0))
        tl.debug_barrier()  # all lanes have read which proposals are open
        tl.store(t.length_SD + row, count, mask=is_stored)
        tl.store(t.base_SD + row, tl.zeros_like(count) + total_len, mask=is_stored)
        tl.store(t.checked_SD + row, tl.zeros_like(count), mask=is_stored)
        stored = is_draft & is_stored[:, None]
        tl.store(t.tokens_SDK + row[:, None] * K + k[None, :], token, mask=stored)
        tl.store(t.evidence_SDK + row[:, None] * K + k[None, :], level.to(tl.int8), mask=stored)

        is_submitted = is_draft & is_best[:, None]
        tl.store(t.drafts_BK + out, tl.sum(tl.where(is_submitted, token, 0), axis=0).to(tl.int64), mask=k < K)
        submitted_rate = tl.sum(tl.where(is_submitted, rate, 0.0), axis=0) * _cheapness(k, price, mean_price)
        tl.store(t.rates_SK + slot * K + k, submitted_rate, mask=k < K)
        tl.store(t.submitted_S + slot, best_count)
        if most > 0.0:
            tl.store(t.chosen_S + slot, best)
