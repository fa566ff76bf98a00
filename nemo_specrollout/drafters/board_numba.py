# SPDX-License-Identifier: Apache-2.0
"""The kernels of the draft board for a CPU. What they compute is said in `board.py`.

Shapes: S request slots, B requests of the batch, D drafters, K draft positions, L longest sequence, E evidence levels
by relation, C classes of context length.
"""

import numpy as np
from numba import njit

from nemo_specrollout.drafters.base import (
    EVIDENCE_WINDOW,
    FORETOLD_DECAY,
    KEPT_DECAY,
    LEAST_WORTH,
    MAX_RATE,
    NUM_LEVELS,
    OUTLOOK_DECAY,
    OUTLOOK_RETURN,
    PRIOR_RATE,
    PRIOR_STRENGTH,
    REQUEST_DECAY,
)
from nemo_specrollout.sampling.on_tensors import on_tensors

F32 = np.float32


@njit(cache=True, nogil=True)
def _fade(level_DE2, position_DK2):  # type: ignore[no-untyped-def]
    """Scales hits and trials down to the evidence window. A level that is not tried keeps its counts. All draft positions of a
    drafter are scaled like its first one."""
    for d in range(level_DE2.shape[0]):
        for e in range(level_DE2.shape[1]):
            if level_DE2[d, e, 1] > EVIDENCE_WINDOW:
                level_DE2[d, e] *= F32(EVIDENCE_WINDOW) / level_DE2[d, e, 1]
        if position_DK2[d, 0, 1] > EVIDENCE_WINDOW:
            position_DK2[d] *= F32(EVIDENCE_WINDOW) / position_DK2[d, 0, 1]


@on_tensors
@njit(cache=True, nogil=True)
def observe(  # type: ignore[no-untyped-def]
    slots_B, num_sampled_B, num_rejected_B, total_len_S, token_ids_SL,
    tokens_SDK, levels_SDK, length_SD, base_SD, checked_SD, factor_SD2, foretold_D2, kept_2, level_DE2, position_DK2,
    chosen_S, submitted_S, edges_C, verified_DCK2, request_S2, step_D2, witness,
):  # fmt: skip
    rates_DE = level_DE2[..., 0] / level_DE2[..., 1]
    _fade(level_DE2, position_DK2)
    foretold_D2 *= F32(FORETOLD_DECAY)
    kept_2 *= F32(KEPT_DECAY)
    step_D2[:] = 0
    for b in range(len(slots_B)):
        slot = slots_B[b]
        if slot < 0 or num_sampled_B[b] == 0:
            continue
        drafter, num_accepted = chosen_S[slot], num_sampled_B[b] - 1
        num_verified = min(num_accepted + num_rejected_B[b], submitted_S[slot])
        length_class = 0
        for c in range(len(edges_C)):
            length_class += total_len_S[slot] - num_sampled_B[b] >= edges_C[c]
        for k in range(num_verified):
            is_accepted = k < num_accepted
            verified_DCK2[drafter, length_class, k, 0] += 1
            verified_DCK2[drafter, length_class, k, 1] += is_accepted
            step_D2[drafter, 0] += 1
            step_D2[drafter, 1] += is_accepted
            request_S2[slot, 0] += 1
            request_S2[slot, 1] += is_accepted
        if num_verified > 0 and drafter != witness and levels_SDK[slot, drafter, 0] < NUM_LEVELS:
            factor, alive = _factor(factor_SD2[slot, drafter], foretold_D2[drafter]), F32(1)
            for k in range(num_verified):
                alive *= min(rates_DE[drafter, levels_SDK[slot, drafter, k]] * factor, F32(MAX_RATE))
                kept_2[1] += alive
            kept_2[0] += min(num_accepted, num_verified)
        submitted_S[slot] = 0
        for d in range(length_SD.shape[1]):
            excess = _raw_factor(factor_SD2[slot, d]) - F32(1)
            while length_SD[slot, d] > 0:
                k = checked_SD[slot, d]
                position = base_SD[slot, d] + k
                if position >= total_len_S[slot]:
                    break
                is_hit = token_ids_SL[slot, position] == tokens_SDK[slot, d, k]
                level = levels_SDK[slot, d, k]
                rate = rates_DE[d, level]
                foretold_D2[d, 0] += excess * (F32(is_hit) - rate)
                foretold_D2[d, 1] += excess * excess * rate
                factor_SD2[slot, d, 0] = factor_SD2[slot, d, 0] * REQUEST_DECAY + is_hit
                factor_SD2[slot, d, 1] = factor_SD2[slot, d, 1] * REQUEST_DECAY + rate
                level_DE2[d, level, 0] += is_hit
                level_DE2[d, level, 1] += 1.0
                position_DK2[d, k, 0] += is_hit
                position_DK2[d, k, 1] += 1.0
                checked_SD[slot, d] = k + 1
                if not is_hit or k + 1 == length_SD[slot, d]:
                    length_SD[slot, d] = 0


@njit(cache=True, nogil=True)
def _raw_factor(factor_2):  # type: ignore[no-untyped-def]
    """Returns a request's hits over the hits that its evidence promised, with a prior of 1."""
    return (factor_2[0] + F32(PRIOR_STRENGTH)) / (factor_2[1] + F32(PRIOR_STRENGTH))


@njit(cache=True, nogil=True)
def _factor(factor_2, foretold_2):  # type: ignore[no-untyped-def]
    """Returns the factor for new drafts: the raw factor, weighted by how well factors have predicted hits."""
    weight = min(max((foretold_2[0] + F32(1)) / (foretold_2[1] + F32(1)), F32(0)), F32(1))
    return F32(1) + weight * (_raw_factor(factor_2) - F32(1))


@njit(cache=True, nogil=True)
def _relate(tokens_DK, found_D, room, witness, relation_DK):  # type: ignore[no-untyped-def]
    """Writes the relation of each token to the other side's proposal (`NUM_RELATIONS`). The witness is one side."""
    relation_DK[:] = 0
    if witness < 0:
        return
    of_witness = min(found_D[witness], room)
    for d in range(len(found_D)):
        if d != witness and min(found_D[d], room) > 0:
            relation_DK[witness] = 3
            if of_witness > 0:
                relation_DK[d] = 3
    for d in range(len(found_D)):
        count = min(found_D[d], room)
        if d == witness or count == 0:
            continue
        for k in range(min(count, of_witness)):
            if tokens_DK[d, k] != tokens_DK[witness, k]:
                relation_DK[d, k] = 2
                if relation_DK[witness, k] != 1:
                    relation_DK[witness, k] = 2
                break
            relation_DK[d, k] = 1
            relation_DK[witness, k] = 1


@njit(cache=True, nogil=True)
def _rate(tried_2, factor):  # type: ignore[no-untyped-def]
    """The rate at which a draft token comes true, by hits and trials of its like."""
    return min(tried_2[0] / tried_2[1] * factor, MAX_RATE)


@njit(cache=True, nogil=True)
def _worth(rate_K, row_price):  # type: ignore[no-untyped-def]
    """Returns the worth of a proposal, in tokens, from the rates of its tokens."""
    worth, alive = F32(0), F32(1)
    for rate in rate_K:
        alive *= rate
        worth += max(alive - F32(row_price), alive * F32(LEAST_WORTH))
    return worth


@njit(cache=True, nogil=True)
def _over_relations(level_E2, level):  # type: ignore[no-untyped-def]
    """Returns the hits and trials of a level, summed over relations."""
    tried_2 = np.zeros(2, np.float32)
    for e in range(level, len(level_E2), NUM_LEVELS):
        tried_2 += level_E2[e]
    return tried_2


@njit(cache=True, nogil=True)
def _write_outlook(  # type: ignore[no-untyped-def]
    outlook_4K, levels_DK, found_D, room, factor_D2, foretold_D2, kept_2, level_DE2, position_DK2, model, row_price,
    rate_K, survival_K,
):  # fmt: skip
    """Writes the mean and the latest survival of the best text proposal and of the model's drafts (`board.outlook_S4K`)."""
    is_silent = min(found_D[model], room) == 0
    most = F32(0)
    survival_K[:] = 0.0
    for d in range(len(found_D)):
        factor, count = _factor(factor_D2[d], foretold_D2[d]), min(found_D[d], room)
        for k in range(count):
            level = levels_DK[d, k]
            rate_K[k] = _rate(level_DE2[d, level] if is_silent else _over_relations(level_DE2[d], level), factor)
        if d == model:
            is_new = outlook_4K[1, 0] == 0.0
            usual, expected, place_rate = F32(1), F32(1), F32(PRIOR_RATE)
            for k in range(len(rate_K)):
                hits, trials = position_DK2[d, k]
                place_rate = (hits + F32(PRIOR_STRENGTH) * place_rate) / (trials + F32(PRIOR_STRENGTH))
                by_place = min(place_rate * factor, F32(MAX_RATE)) if k < room else F32(0)
                usual *= by_place
                expected *= rate_K[k] if k < count else by_place
                before = usual if is_new else outlook_4K[1, k]
                after = usual if is_silent else expected
                outlook_4K[1, k] = before + F32(1 - (OUTLOOK_RETURN if is_silent else OUTLOOK_DECAY)) * (after - before)
                outlook_4K[3, k] = expected if k < count else F32(0)
            continue
        worth = _worth(rate_K[:count], row_price)
        if worth > most:
            most, survival_K[:] = worth, F32(0)
            survival_K[:count] = np.cumprod(rate_K[:count])
    share_kept = (kept_2[0] + F32(PRIOR_STRENGTH)) / (kept_2[1] + F32(PRIOR_STRENGTH))
    survival_K[:] = np.minimum(survival_K * share_kept, F32(1))
    outlook_4K[0] += F32(1 - OUTLOOK_DECAY) * (survival_K - outlook_4K[0])
    outlook_4K[2] = survival_K


@on_tensors
@njit(cache=True, nogil=True)
def choose(  # type: ignore[no-untyped-def]
    slots_B, total_len_S, limit_S, tokens_DBK, levels_DBK, found_DB,
    tokens_SDK, levels_SDK, length_SD, base_SD, checked_SD, factor_SD2, foretold_D2, kept_2, level_DE2, position_DK2,
    chosen_S, submitted_S, drafts_BK, rates_BK, outlook_S4K, model, witness, row_price,
):  # fmt: skip
    num_drafters, num_positions = tokens_DBK.shape[0], tokens_DBK.shape[2]
    level_DK = np.empty((num_drafters, num_positions), np.int8)
    rate_K, survival_K = np.empty((2, num_positions), np.float32)
    for b in range(len(slots_B)):
        slot = slots_B[b]
        drafts_BK[b] = 0
        rates_BK[b] = 0.0
        if slot < 0:
            continue
        room = min(max(limit_S[slot] - total_len_S[slot] - 1, 0), num_positions)
        _relate(tokens_DBK[:, b], found_DB[:, b], room, witness, level_DK)
        level_DK *= NUM_LEVELS
        level_DK += levels_DBK[:, b]
        if model >= 0:
            _write_outlook(
                outlook_S4K[slot], levels_DBK[:, b], found_DB[:, b], room, factor_SD2[slot], foretold_D2, kept_2,
                level_DE2, position_DK2, model, row_price, rate_K, survival_K,
            )  # fmt: skip
        most, best = F32(0), -1
        for d in range(num_drafters):
            factor = _factor(factor_SD2[slot, d], foretold_D2[d])
            count = min(found_DB[d, b], room)
            for k in range(count):
                rate_K[k] = _rate(level_DE2[d, level_DK[d, k]], factor)
            worth = _worth(rate_K[:count], row_price)
            if worth > most:
                most, best = worth, d
        submitted_S[slot] = 0
        for d in range(num_drafters):
            count = min(found_DB[d, b], room)
            if count == 0 or (length_SD[slot, d] > 0 and d != best):
                continue
            length_SD[slot, d] = count
            base_SD[slot, d] = total_len_S[slot]
            checked_SD[slot, d] = 0
            for k in range(count):
                tokens_SDK[slot, d, k] = tokens_DBK[d, b, k]
                levels_SDK[slot, d, k] = level_DK[d, k]
        if best < 0:
            continue
        factor = _factor(factor_SD2[slot, best], foretold_D2[best])
        chosen_S[slot] = best
        submitted_S[slot] = min(found_DB[best, b], room)
        for k in range(submitted_S[slot]):
            drafts_BK[b, k] = tokens_DBK[best, b, k]
            rates_BK[b, k] = _rate(level_DE2[best, level_DK[best, k]], factor)
