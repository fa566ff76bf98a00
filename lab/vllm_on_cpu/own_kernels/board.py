# SPDX-License-Identifier: Apache-2.0
"""The kernels of the draft board on a CPU. `drafters/board.py` says what they compute.

In all functions, `t` are the board's tables. Shapes: as in `drafters/board.py`, and L = NUM_LEVELS.

Some tables are shared by all requests. What an engine step adds to them is summed separately, and added at the end. So no
request reads what another request of the same step has learned, and the order of the requests does not matter. Results are
then the same as on a GPU, where all requests are computed at the same time.
"""

import numpy as np
from numba import njit

from lab.vllm_on_cpu.own_kernels.tensors import on_tensors
from nemo_specrollout.drafters import base
from nemo_specrollout.drafters.base import NUM_LEVELS

F32 = np.float32
MAX_RATE = F32(base.MAX_RATE)
PRIOR_STRENGTH = F32(base.PRIOR_STRENGTH)


@njit(cache=True, nogil=True)
def _fade_and_add(t, new_evidence_DE2, new_weight_D2, new_calibration_D2, new_alone_2):  # type: ignore[no-untyped-def]
    """Scales old hits and trials down to the evidence window, and then adds the hits and trials of the engine step.

    Evidence with fewer trials than the window keeps its counts.
    """
    window = F32(base.EVIDENCE_WINDOW)
    for d in range(t.evidence_DE2.shape[0]):
        for e in range(t.evidence_DE2.shape[1]):
            if t.evidence_DE2[d, e, 1] > window:
                t.evidence_DE2[d, e] *= window / t.evidence_DE2[d, e, 1]
    t.evidence_DE2[:] += new_evidence_DE2
    t.factor_weight_D2[:] = t.factor_weight_D2 * F32(base.FACTOR_WEIGHT_DECAY) + new_weight_D2
    t.calibration_D2[:] = t.calibration_D2 * F32(base.CALIBRATION_DECAY) + new_calibration_D2
    t.alone_2[:] = t.alone_2 * F32(base.CALIBRATION_DECAY) + new_alone_2
    t.spread_FQ[:] = 0


@njit(cache=True, nogil=True)
def _raw_factor(factor_2):  # type: ignore[no-untyped-def]
    """Returns a request's hits divided by the hits that the evidence of its drafts predicted, with a prior of 1."""
    return (factor_2[0] + PRIOR_STRENGTH) / (factor_2[1] + PRIOR_STRENGTH)


@njit(cache=True, nogil=True)
def _factor(factor_2, weight_2):  # type: ignore[no-untyped-def]
    """Returns the factor by which the acceptance rates of a request's new drafts are multiplied.

    The factor is between 1 and `_raw_factor`. It is close to `_raw_factor` if raw factors have predicted hits well so far.
    """
    weight = min(max((weight_2[0] + F32(1)) / (weight_2[1] + F32(1)), F32(0)), F32(1))
    return F32(1) + weight * (_raw_factor(factor_2) - F32(1))


@njit(cache=True, nogil=True)
def _count_verified(t, slot, step, num_verified, num_accepted):  # type: ignore[no-untyped-def]
    """Adds the number of a request's drafts that this engine step verified, and the number of accepted ones, to all counts."""
    d = t.chosen_S[slot]
    if not t.is_early_S[slot]:
        t.verified_DK2[d, :num_verified, 0] += 1
        t.verified_DK2[d, :num_accepted, 1] += 1
    t.steps_TD2[step, d, 0] += num_verified
    t.steps_TD2[step, d, 1] += num_accepted
    t.request_S2[slot, 0] += num_verified
    t.request_S2[slot, 1] += num_accepted


@njit(cache=True, nogil=True)
def _judge(t, slot, text_L, rates_DE, new_evidence_DE2, new_weight_D2):  # type: ignore[no-untyped-def]
    """Compares all drafters' open proposals for a request with its text.

    A proposal is compared up to its first miss, or up to the end of the text so far.
    """
    # Fields are read once into local names, because numba counts references at each access to a field.
    length_D, base_D, checked_D, factor_D2 = t.length_SD[slot], t.base_SD[slot], t.checked_SD[slot], t.factor_SD2[slot]
    tokens_DK, evidence_DK = t.tokens_SDK[slot], t.evidence_SDK[slot]
    for d in range(len(length_D)):
        excess = _raw_factor(factor_D2[d]) - F32(1)
        while length_D[d] > 0:
            k = checked_D[d]
            if base_D[d] + k >= len(text_L):
                break
            is_hit = text_L[base_D[d] + k] == tokens_DK[d, k]
            evidence = evidence_DK[d, k]
            rate = rates_DE[d, evidence]
            new_weight_D2[d, 0] += excess * (F32(is_hit) - rate)
            new_weight_D2[d, 1] += excess * excess * rate
            factor_D2[d, 0] = factor_D2[d, 0] * base.REQUEST_DECAY + is_hit
            factor_D2[d, 1] = factor_D2[d, 1] * base.REQUEST_DECAY + rate
            new_evidence_DE2[d, evidence, 0] += is_hit
            new_evidence_DE2[d, evidence, 1] += 1
            checked_D[d] = k + 1
            if not is_hit or k + 1 == length_D[d]:
                length_D[d] = 0


@on_tensors
@njit(cache=True, nogil=True)
def observe(texts, num_sampled_B, num_rejected_B, t, step):  # type: ignore[no-untyped-def]
    rates_DE = t.evidence_DE2[..., 0] / t.evidence_DE2[..., 1]
    new_evidence_DE2 = np.zeros_like(t.evidence_DE2)
    new_weight_D2, new_calibration_D2 = np.zeros_like(t.factor_weight_D2), np.zeros_like(t.calibration_D2)
    new_alone_2 = np.zeros_like(t.alone_2)
    t.steps_TD2[step] = 0
    for b in range(len(texts.slots_B)):
        slot = texts.slots_B[b]
        if slot < 0 or num_sampled_B[b] == 0:
            continue
        d, total_len = t.chosen_S[slot], texts.total_len_S[slot]
        num_verified = min(num_sampled_B[b] - 1 + num_rejected_B[b], t.submitted_S[slot])
        num_accepted = min(num_sampled_B[b] - 1, num_verified)
        t.submitted_S[slot] = 0
        if num_verified > 0:
            _count_verified(t, slot, step, num_verified, num_accepted)
            factor, survival = _factor(t.factor_SD2[slot, d], t.factor_weight_D2[d]), F32(1)
            new_calibration_D2[d, 0] += num_accepted
            for evidence in t.evidence_SDK[slot, d, :num_verified]:
                survival *= min(rates_DE[d, evidence] * factor, MAX_RATE)
                new_calibration_D2[d, 1] += survival
        if t.alone_token_S[slot] >= 0:
            new_alone_2[0] += texts.token_ids_SL[slot, total_len - num_sampled_B[b]] == t.alone_token_S[slot]
            new_alone_2[1] += t.alone_rate_S[slot]
        text_L = texts.token_ids_SL[slot, :total_len]
        _judge(t, slot, text_L, rates_DE, new_evidence_DE2, new_weight_D2)
    _fade_and_add(t, new_evidence_DE2, new_weight_D2, new_calibration_D2, new_alone_2)


@njit(cache=True, nogil=True)
def _relate(tokens_DK, count_D, reference, relation_DK):  # type: ignore[no-untyped-def]
    """Writes how each draft token relates to the proposal of the other side (`NUM_RELATIONS`).

    One side is the drafter `reference`, and the other side is all other drafters.
    """
    relation_DK[:] = 0
    if reference < 0:
        return
    relation_DK[:] = 3 if count_D[reference] > 0 else 0
    relation_DK[reference] = 3 if count_D.sum() > count_D[reference] else 0
    for d in range(len(count_D)):
        for k in range(min(count_D[d], count_D[reference]) if d != reference else 0):
            is_same = tokens_DK[d, k] == tokens_DK[reference, k]
            relation_DK[d, k] = 1 if is_same else 2
            relation_DK[reference, k] = min(relation_DK[reference, k], relation_DK[d, k])
            if not is_same:
                break


@njit(cache=True, nogil=True)
def _worth(survival, price):  # type: ignore[no-untyped-def]
    """Returns what it is worth to verify a draft token, in tokens. `price` is the cost of its row, in tokens."""
    return max(survival - price, survival * F32(base.MIN_WORTH_SHARE))


@njit(cache=True, nogil=True)
def _rate(rates_DE, evidence_DK, count_D, factor_D, price, rate_DK, worth_D):  # type: ignore[no-untyped-def]
    """Writes the expected acceptance rate of each draft token, and the worth of each drafter's proposal."""
    worth_D[:] = 0
    for d in range(len(count_D)):
        survival = F32(1)
        for k in range(count_D[d]):
            rate_DK[d, k] = min(rates_DE[d, evidence_DK[d, k]] * factor_D[d], MAX_RATE)
            survival *= rate_DK[d, k]
            worth_D[d] += _worth(survival, price)


@njit(cache=True, nogil=True)
def _best(worth_D, count_D):  # type: ignore[no-untyped-def]
    """Returns the drafter whose proposal is worth most, and the number of its draft tokens, or 0 if none is worth anything."""
    best = worth_D.argmax()
    return best, count_D[best] if worth_D[best] > 0 else 0


@njit(cache=True, nogil=True)
def _count(spread_Q, rate_K, calibration_2):  # type: ignore[no-untyped-def]
    """Adds the draft tokens of a proposal to `spread_Q`, which is a row of the histogram `spread_FQ` of survivals.

    `rate_K` has the acceptance rate of each draft token.
    """
    calibration = (calibration_2[0] + PRIOR_STRENGTH) / (calibration_2[1] + PRIOR_STRENGTH)
    survival = F32(1)
    for rate in rate_K:
        survival *= rate
        spread_Q[min(int(survival * calibration * base.NUM_BINS), base.NUM_BINS - 1)] += 1


@njit(cache=True, nogil=True)
def _count_depths(t, depth, most, model, worth_D, count_D, price, rate_DK):  # type: ignore[no-untyped-def]
    """Fills the histogram `spread_FQ`, whose row k + 1 is for the case that the model drafts k + 1 tokens.

    Each row gets the survivals of the draft tokens that the request would submit in that case. The model has really drafted
    `depth` tokens, and cases of up to 2 * depth + 1 tokens are counted. A token that was not drafted gets the acceptance rate
    of the last token that was. `worth_D` has the worth of each other drafter's proposal. At most `most` draft tokens may be
    submitted.
    """
    other, other_count = _best(worth_D, count_D)
    worth, survival = F32(0), F32(1)
    for k in range(min(2 * depth + 1, rate_DK.shape[1]) if depth > 0 else 0):
        if k < most:
            if k >= count_D[model]:
                rate_DK[model, k] = rate_DK[model, k - 1]
            survival *= rate_DK[model, k]
            worth += _worth(survival, price)
        d, count = (model, min(k + 1, most)) if worth > worth_D[other] else (other, other_count)
        _count(t.spread_FQ[k + 1], rate_DK[d, :count], t.calibration_D2[d])
        t.spread_FQ[k + 1, base.NUM_BINS] += k < depth


@njit(cache=True, nogil=True)
def _write_rates(rates_K, rate_K, price, mean_price):  # type: ignore[no-untyped-def]
    """Writes the acceptance rates of a request's submitted draft tokens to `rates_K`.

    The first rate is multiplied by the mean price of a row, divided by the price of this request's rows.
    """
    rates_K[: len(rate_K)] = rate_K
    if min(price, mean_price) > F32(base.LEAST_PRICE):
        rates_K[0] *= mean_price / price


@on_tensors
@njit(cache=True, nogil=True)
def choose(texts, t, model, reference, row_price, context_price, mean_price, most):  # type: ignore[no-untyped-def]
    num_drafters, _, num_positions = t.tokens_DBK.shape
    rates_DE = t.evidence_DE2[..., 0] / t.evidence_DE2[..., 1]
    tried_DL2 = t.evidence_DE2.reshape(num_drafters, -1, NUM_LEVELS, 2).sum(1)
    rates_DL = tried_DL2[..., 0] / tried_DL2[..., 1]
    evidence_DK = np.empty((num_drafters, num_positions), np.int8)
    rate_DK = np.empty((num_drafters, num_positions), np.float32)
    count_D, factor_D = np.empty(num_drafters, np.int32), np.empty(num_drafters, np.float32)
    worth_D = np.empty(num_drafters, np.float32)
    t.spread_FQ[:] = 0
    for b in range(len(texts.slots_B)):
        slot = texts.slots_B[b]
        t.drafts_BK[b] = 0
        if slot < 0:
            continue
        t.rates_SK[slot] = 0
        price = F32(row_price) + F32(context_price) * F32(texts.total_len_S[slot])
        max_drafts = min(max(t.limit_S[slot] - texts.total_len_S[slot] - 1, 0), most)
        for d in range(num_drafters):
            count_D[d] = max(min(t.found_DB[d, b], max_drafts), 0)
            factor_D[d] = _factor(t.factor_SD2[slot, d], t.factor_weight_D2[d])
        # Without the model's drafts, text drafts have no relation to them.
        has_model_drafts = model >= 0 and count_D[model] > 0
        t.alone_token_S[slot] = -1
        if has_model_drafts:
            _rate(rates_DL, t.levels_DBK[:, b], count_D, factor_D, price, rate_DK, worth_D)
            worth_D[model] = 0
            best, count = _best(worth_D, count_D)
            _count(t.spread_FQ[0], rate_DK[best, :count], t.alone_2)
            if count > 0:
                t.alone_token_S[slot], t.alone_rate_S[slot] = t.tokens_DBK[best, b, 0], rate_DK[best, 0]
        _relate(t.tokens_DBK[:, b], count_D, reference, evidence_DK)
        evidence_DK *= NUM_LEVELS
        evidence_DK += t.levels_DBK[:, b]
        _rate(rates_DE, evidence_DK, count_D, factor_D, price, rate_DK, worth_D)
        best, count = _best(worth_D, count_D)
        _count(t.spread_FQ[num_positions + 1], rate_DK[best, :count], t.calibration_D2[best])
        t.spread_FQ[0, base.NUM_BINS] += 1
        t.spread_FQ[num_positions + 1, base.NUM_BINS] += 1
        if not has_model_drafts:
            _count(t.spread_FQ[0], rate_DK[best, :count], t.calibration_D2[best])
        t.submitted_S[slot] = count
        if count > 0:
            t.chosen_S[slot] = best
            t.drafts_BK[b, :count] = t.tokens_DBK[best, b, :count]
            _write_rates(t.rates_SK[slot], rate_DK[best, :count], price, F32(mean_price))
        for d in range(num_drafters):
            count = count_D[d]
            if count > 0 and (t.length_SD[slot, d] == 0 or d == best):
                t.length_SD[slot, d], t.base_SD[slot, d], t.checked_SD[slot, d] = count, texts.total_len_S[slot], 0
                t.tokens_SDK[slot, d, :count] = t.tokens_DBK[d, b, :count]
                t.evidence_SDK[slot, d, :count] = evidence_DK[d, :count]
        if model >= 0:  # last, because rates of tokens that were not drafted are written
            worth_D[model] = 0
            _count_depths(t, t.found_DB[model, b], max_drafts, model, worth_D, count_D, price, rate_DK)
