# SPDX-License-Identifier: Apache-2.0
"""The kernels of the draft board for a CPU. What they compute is said in `board.py`.

Shapes: S request slots, B requests of the batch, D drafters, K draft positions, L longest sequence, E evidence levels, C
classes of context length.
"""

import numpy as np
from numba import njit

from nemo_specrollout.drafters.base import LEAST_WORTH, LEVEL_DECAY, MAX_RATE, PRIOR_STRENGTH, REQUEST_DECAY
from nemo_specrollout.sampling.on_tensors import on_tensors

F32 = np.float32


@njit(cache=True, nogil=True)
def _fade(table_DN2):  # type: ignore[no-untyped-def]
    """Lets hits and trials fade, unless few are left: of what is never tried, the last that was known stays."""
    for d in range(table_DN2.shape[0]):
        for n in range(table_DN2.shape[1]):
            if table_DN2[d, n, 1] > PRIOR_STRENGTH:
                table_DN2[d, n] *= LEVEL_DECAY


@on_tensors
@njit(cache=True, nogil=True)
def observe(  # type: ignore[no-untyped-def]
    slots_B, num_sampled_B, num_rejected_B, total_len_S, token_ids_SL,
    tokens_SDK, levels_SDK, length_SD, base_SD, checked_SD, factor_SD2, level_DE2, position_DK2,
    chosen_S, submitted_S, edges_C, verified_DCK2, request_S2, step_D2,
):  # fmt: skip
    rates_DE = level_DE2[..., 0] / level_DE2[..., 1]
    _fade(level_DE2)
    _fade(position_DK2)
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
        submitted_S[slot] = 0
        for d in range(length_SD.shape[1]):
            while length_SD[slot, d] > 0:
                k = checked_SD[slot, d]
                position = base_SD[slot, d] + k
                if position >= total_len_S[slot]:
                    break
                is_hit = token_ids_SL[slot, position] == tokens_SDK[slot, d, k]
                level = levels_SDK[slot, d, k]
                factor_SD2[slot, d, 0] = factor_SD2[slot, d, 0] * REQUEST_DECAY + is_hit
                factor_SD2[slot, d, 1] = factor_SD2[slot, d, 1] * REQUEST_DECAY + rates_DE[d, level]
                level_DE2[d, level, 0] += is_hit
                level_DE2[d, level, 1] += 1.0
                position_DK2[d, k, 0] += is_hit
                position_DK2[d, k, 1] += 1.0
                checked_SD[slot, d] = k + 1
                if not is_hit or k + 1 == length_SD[slot, d]:
                    length_SD[slot, d] = 0


@njit(cache=True, nogil=True)
def _factor(factor_2):  # type: ignore[no-untyped-def]
    """By how much a request's drafts come true more often than their levels promise."""
    return (factor_2[0] + PRIOR_STRENGTH) / (factor_2[1] + PRIOR_STRENGTH)


@njit(cache=True, nogil=True)
def _rate(tried_2, factor):  # type: ignore[no-untyped-def]
    """The rate at which a draft token comes true, by hits and trials of its like."""
    return min(tried_2[0] / tried_2[1] * factor, MAX_RATE)


@on_tensors
@njit(cache=True, nogil=True)
def choose(  # type: ignore[no-untyped-def]
    slots_B, total_len_S, limit_S, tokens_DBK, levels_DBK, found_DB,
    tokens_SDK, levels_SDK, length_SD, base_SD, checked_SD, factor_SD2, level_DE2, position_DK2,
    chosen_S, submitted_S, drafts_BK, rates_BK, outlook_S2K, model, row_price,
):  # fmt: skip
    num_drafters, num_positions = tokens_DBK.shape[0], tokens_DBK.shape[2]
    for b in range(len(slots_B)):
        slot = slots_B[b]
        drafts_BK[b] = 0
        rates_BK[b] = 0.0
        if slot < 0:
            continue
        outlook_S2K[slot] = 0.0
        room = min(max(limit_S[slot] - total_len_S[slot] - 1, 0), num_positions)
        most, most_of_text, best = F32(0), F32(0), -1
        for d in range(num_drafters):
            worth, alive = F32(0), F32(1)
            factor = _factor(factor_SD2[slot, d])
            count = min(found_DB[d, b], room)
            for k in range(count):
                alive *= _rate(level_DE2[d, levels_DBK[d, b, k]], factor)
                worth += max(alive - F32(row_price), alive * F32(LEAST_WORTH))
            if d == model:
                for k in range(room):
                    outlook_S2K[slot, 1, k] = _rate(position_DK2[d, k], factor)
            elif worth > most_of_text:
                most_of_text = worth
                outlook_S2K[slot, 0] = 0.0
                for k in range(count):
                    outlook_S2K[slot, 0, k] = _rate(level_DE2[d, levels_DBK[d, b, k]], factor)
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
                levels_SDK[slot, d, k] = levels_DBK[d, b, k]
        if best < 0:
            continue
        factor = _factor(factor_SD2[slot, best])
        chosen_S[slot] = best
        submitted_S[slot] = min(found_DB[best, b], room)
        for k in range(submitted_S[slot]):
            drafts_BK[b, k] = tokens_DBK[best, b, k]
            rates_BK[b, k] = _rate(level_DE2[best, levels_DBK[best, b, k]], factor)
