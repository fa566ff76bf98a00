# SPDX-License-Identifier: Apache-2.0
"""The kernels of the draft board for a CPU. `board.py` says what they compute; `board_triton.py` has the same functions.

Shapes: S request slots, B requests of the batch, D drafters, K draft positions, L longest sequence. E kinds of evidence,
C classes of context length. A last dimension of 2 holds (hits, trials).
"""

import numpy as np
from numba import njit

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
from nemo_specrollout.sampling.numba_common import on_tensors

F32 = np.float32


@njit(cache=True, nogil=True)
def _fade(evidence_DE2, position_DK2):  # type: ignore[no-untyped-def]
    """Scales hits and trials down to the evidence window. Evidence that is not tried keeps its counts. All draft positions of
    a drafter are scaled like its first position."""
    for d in range(evidence_DE2.shape[0]):
        for e in range(evidence_DE2.shape[1]):
            if evidence_DE2[d, e, 1] > EVIDENCE_WINDOW:
                evidence_DE2[d, e] *= F32(EVIDENCE_WINDOW) / evidence_DE2[d, e, 1]
        if position_DK2[d, 0, 1] > EVIDENCE_WINDOW:
            position_DK2[d] *= F32(EVIDENCE_WINDOW) / position_DK2[d, 0, 1]


@njit(cache=True, nogil=True)
def _count_verified(  # type: ignore[no-untyped-def]
    slot, drafter, num_verified, num_accepted, context_len, edges_C, verified_DCK2, request_S2, step_D2
):
    """Adds the drafts that the step verified, and those that it accepted, to all counts."""
    length_class = 0
    for c in range(len(edges_C)):
        length_class += context_len >= edges_C[c]
    for k in range(num_verified):
        verified_DCK2[drafter, length_class, k, 0] += 1
        verified_DCK2[drafter, length_class, k, 1] += k < num_accepted
    step_D2[drafter, 0] += num_verified
    step_D2[drafter, 1] += num_accepted
    request_S2[slot, 0] += num_verified
    request_S2[slot, 1] += num_accepted


@njit(cache=True, nogil=True)
def _predict_hits(calibration_2, rates_E, evidence_K, factor):  # type: ignore[no-untyped-def]
    """Adds the hits that the evidence of verified drafts predicts to the calibration of text drafts."""
    survival = F32(1)
    for evidence in evidence_K:
        survival *= min(rates_E[evidence] * factor, F32(MAX_RATE))
        calibration_2[1] += survival


@on_tensors
@njit(cache=True, nogil=True)
def observe(  # type: ignore[no-untyped-def]
    slots_B, num_sampled_B, num_rejected_B, total_len_S, token_ids_SL, tokens_SDK, evidence_SDK, length_SD, base_SD,
    checked_SD, factor_SD2, factor_weight_D2, calibration_2, evidence_DE2, position_DK2, chosen_S, submitted_S, edges_C,
    verified_DCK2, request_S2, step_D2, witness,
):  # fmt: skip
    rates_DE = evidence_DE2[..., 0] / evidence_DE2[..., 1]
    _fade(evidence_DE2, position_DK2)
    factor_weight_D2 *= F32(FACTOR_WEIGHT_DECAY)
    calibration_2 *= F32(CALIBRATION_DECAY)
    step_D2[:] = 0
    for b in range(len(slots_B)):
        slot = slots_B[b]
        if slot < 0 or num_sampled_B[b] == 0:
            continue
        drafter, total_len = chosen_S[slot], total_len_S[slot]
        num_verified = min(num_sampled_B[b] - 1 + num_rejected_B[b], submitted_S[slot])
        num_accepted = min(num_sampled_B[b] - 1, num_verified)
        submitted_S[slot] = 0
        if num_verified > 0:
            _count_verified(
                slot, drafter, num_verified, num_accepted, total_len - num_sampled_B[b], edges_C, verified_DCK2, request_S2,
                step_D2,
            )  # fmt: skip
            if drafter != witness and evidence_SDK[slot, drafter, 0] < NUM_LEVELS:
                factor = _factor(factor_SD2[slot, drafter], factor_weight_D2[drafter])
                calibration_2[0] += num_accepted
                _predict_hits(calibration_2, rates_DE[drafter], evidence_SDK[slot, drafter, :num_verified], factor)
        # Not a function of its own: passing all these arrays for each proposal would double the time.
        for d in range(length_SD.shape[1]):
            excess = _raw_factor(factor_SD2[slot, d]) - F32(1)
            while length_SD[slot, d] > 0:
                k = checked_SD[slot, d]
                position = base_SD[slot, d] + k
                if position >= total_len:
                    break
                is_hit = token_ids_SL[slot, position] == tokens_SDK[slot, d, k]
                evidence = evidence_SDK[slot, d, k]
                rate = rates_DE[d, evidence]
                factor_weight_D2[d, 0] += excess * (F32(is_hit) - rate)
                factor_weight_D2[d, 1] += excess * excess * rate
                factor_SD2[slot, d, 0] = factor_SD2[slot, d, 0] * REQUEST_DECAY + is_hit
                factor_SD2[slot, d, 1] = factor_SD2[slot, d, 1] * REQUEST_DECAY + rate
                evidence_DE2[d, evidence, 0] += is_hit
                evidence_DE2[d, evidence, 1] += 1.0
                position_DK2[d, k, 0] += is_hit
                position_DK2[d, k, 1] += 1.0
                checked_SD[slot, d] = k + 1
                if not is_hit or k + 1 == length_SD[slot, d]:
                    length_SD[slot, d] = 0


@njit(cache=True, nogil=True)
def _raw_factor(factor_2):  # type: ignore[no-untyped-def]
    """Returns a request's hits over the hits that its evidence predicted, with a prior of 1."""
    return (factor_2[0] + F32(PRIOR_STRENGTH)) / (factor_2[1] + F32(PRIOR_STRENGTH))


@njit(cache=True, nogil=True)
def _factor(factor_2, weight_2):  # type: ignore[no-untyped-def]
    """Returns the factor for new drafts: the raw factor, weighted by how well factors have predicted hits."""
    weight = min(max((weight_2[0] + F32(1)) / (weight_2[1] + F32(1)), F32(0)), F32(1))
    return F32(1) + weight * (_raw_factor(factor_2) - F32(1))


@njit(cache=True, nogil=True)
def _relate(tokens_DK, found_D, max_drafts, witness, relation_DK):  # type: ignore[no-untyped-def]
    """Writes the relation of each token to the proposal of the other side (`NUM_RELATIONS`). The witness is one side."""
    relation_DK[:] = 0
    if witness < 0:
        return
    witness_count = min(found_D[witness], max_drafts)
    for d in range(len(found_D)):
        if d != witness and min(found_D[d], max_drafts) > 0:
            relation_DK[witness] = 3
            if witness_count > 0:
                relation_DK[d] = 3
    for d in range(len(found_D)):
        count = min(found_D[d], max_drafts)
        if d == witness or count == 0:
            continue
        for k in range(min(count, witness_count)):
            if tokens_DK[d, k] != tokens_DK[witness, k]:
                relation_DK[d, k] = 2
                if relation_DK[witness, k] != 1:
                    relation_DK[witness, k] = 2
                break
            relation_DK[d, k] = 1
            relation_DK[witness, k] = 1


@njit(cache=True, nogil=True)
def _rate(tried_2, factor):  # type: ignore[no-untyped-def]
    """Returns the rate of a draft token from the hits and trials of its evidence and the request's factor."""
    return min(tried_2[0] / tried_2[1] * factor, MAX_RATE)


@njit(cache=True, nogil=True)
def _worth(rate_K, row_price):  # type: ignore[no-untyped-def]
    """Returns the worth of a proposal, in tokens, from the rates of its tokens."""
    worth, survival = F32(0), F32(1)
    for rate in rate_K:
        survival *= rate
        worth += max(survival - F32(row_price), survival * F32(MIN_WORTH_SHARE))
    return worth


@njit(cache=True, nogil=True)
def _over_relations(evidence_E2, level):  # type: ignore[no-untyped-def]
    """Returns the hits and trials of a level, summed over relations."""
    tried_2 = np.zeros(2, np.float32)
    for e in range(level, len(evidence_E2), NUM_LEVELS):
        tried_2 += evidence_E2[e]
    return tried_2


@njit(cache=True, nogil=True)
def _write_model_outlook(outlook_4K, rate_K, count, max_drafts, factor, position_K2):  # type: ignore[no-untyped-def]
    """Writes rows 1 and 3 of a request's outlook. Positions that the model did not draft have the rate of their position."""
    is_new = outlook_4K[1, 0] == 0.0
    usual, expected, position_rate = F32(1), F32(1), F32(PRIOR_RATE)
    for k in range(len(rate_K)):
        hits, trials = position_K2[k]
        position_rate = (hits + F32(PRIOR_STRENGTH) * position_rate) / (trials + F32(PRIOR_STRENGTH))
        by_position = min(position_rate * factor, F32(MAX_RATE)) if k < max_drafts else F32(0)
        usual *= by_position
        expected *= rate_K[k] if k < count else by_position
        before = usual if is_new else outlook_4K[1, k]
        after = expected if count > 0 else usual
        outlook_4K[1, k] = before + F32(1 - (OUTLOOK_DECAY if count > 0 else OUTLOOK_RETURN)) * (after - before)
        outlook_4K[3, k] = expected if k < count else F32(0)


@njit(cache=True, nogil=True)
def _write_outlook(  # type: ignore[no-untyped-def]
    outlook_4K, levels_DK, found_D, max_drafts, factor_D2, factor_weight_D2, calibration_2, evidence_DE2, position_DK2,
    model, row_price, rate_K, survival_K,
):  # fmt: skip
    """Writes the mean and latest survival of the best text proposal and of the model's drafts (`board.outlook_S4K`)."""
    is_silent = min(found_D[model], max_drafts) == 0
    most = F32(0)
    survival_K[:] = 0.0
    for d in range(len(found_D)):
        factor, count = _factor(factor_D2[d], factor_weight_D2[d]), min(found_D[d], max_drafts)
        for k in range(count):
            level = levels_DK[d, k]
            rate_K[k] = _rate(evidence_DE2[d, level] if is_silent else _over_relations(evidence_DE2[d], level), factor)
        if d == model:
            _write_model_outlook(outlook_4K, rate_K, count, max_drafts, factor, position_DK2[d])
            continue
        worth = _worth(rate_K[:count], row_price)
        if worth > most:
            most, survival_K[:] = worth, F32(0)
            survival_K[:count] = np.cumprod(rate_K[:count])
    calibration = (calibration_2[0] + F32(PRIOR_STRENGTH)) / (calibration_2[1] + F32(PRIOR_STRENGTH))
    survival_K[:] = np.minimum(survival_K * calibration, F32(1))
    outlook_4K[0] += F32(1 - OUTLOOK_DECAY) * (survival_K - outlook_4K[0])
    outlook_4K[2] = survival_K


@on_tensors
@njit(cache=True, nogil=True)
def choose(  # type: ignore[no-untyped-def]
    slots_B, total_len_S, limit_S, tokens_DBK, levels_DBK, found_DB, tokens_SDK, evidence_SDK, length_SD, base_SD,
    checked_SD, factor_SD2, factor_weight_D2, calibration_2, evidence_DE2, position_DK2, chosen_S, submitted_S, drafts_BK,
    rates_BK, outlook_S4K, model, witness, row_price,
):  # fmt: skip
    num_drafters, num_positions = tokens_DBK.shape[0], tokens_DBK.shape[2]
    evidence_DK = np.empty((num_drafters, num_positions), np.int8)
    rate_K, survival_K = np.empty((2, num_positions), np.float32)
    for b in range(len(slots_B)):
        slot = slots_B[b]
        drafts_BK[b] = 0
        rates_BK[b] = 0.0
        if slot < 0:
            continue
        max_drafts = min(max(limit_S[slot] - total_len_S[slot] - 1, 0), num_positions)
        _relate(tokens_DBK[:, b], found_DB[:, b], max_drafts, witness, evidence_DK)
        evidence_DK *= NUM_LEVELS
        evidence_DK += levels_DBK[:, b]
        if model >= 0:
            _write_outlook(
                outlook_S4K[slot], levels_DBK[:, b], found_DB[:, b], max_drafts, factor_SD2[slot], factor_weight_D2,
                calibration_2, evidence_DE2, position_DK2, model, row_price, rate_K, survival_K,
            )  # fmt: skip
        submitted_S[slot] = 0
        most, best = F32(0), -1
        for d in range(num_drafters):
            factor = _factor(factor_SD2[slot, d], factor_weight_D2[d])
            count = min(found_DB[d, b], max_drafts)
            for k in range(count):
                rate_K[k] = _rate(evidence_DE2[d, evidence_DK[d, k]], factor)
            worth = _worth(rate_K[:count], row_price)
            if worth > most:
                most, best = worth, d
                submitted_S[slot] = count
                drafts_BK[b] = 0
                rates_BK[b] = 0.0
                drafts_BK[b, :count] = tokens_DBK[d, b, :count]
                rates_BK[b, :count] = rate_K[:count]
        if best >= 0:
            chosen_S[slot] = best
        for d in range(num_drafters):
            count = min(found_DB[d, b], max_drafts)
            if count == 0 or (length_SD[slot, d] > 0 and d != best):
                continue
            length_SD[slot, d] = count
            base_SD[slot, d] = total_len_S[slot]
            checked_SD[slot, d] = 0
            tokens_SDK[slot, d, :count] = tokens_DBK[d, b, :count]
            evidence_SDK[slot, d, :count] = evidence_DK[d, :count]
