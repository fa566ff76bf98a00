# SPDX-License-Identifier: Apache-2.0
"""The kernels that sample draft tokens with the target model's noise, on a CPU (`generation/drafting/draft_sampling.py`).

Shapes: R rows of logits, V vocabulary of the drafter, N tokens of a block, S request slots, K draft positions.
"""

from typing import Any

import numpy as np
from numba import njit

from lab.vllm_on_cpu.kernels.floats import F32, LOWEST_KEY, U32, order_key, row_of, value_of, value_of_key
from lab.vllm_on_cpu.kernels.kernel_launch import view
from lab.vllm_on_cpu.kernels.noise import (
    gumbel_bound,
    gumbel_of,
    philox_gumbel,
    philox_row_state,
    row_state,
    token_bits,
    uniform_of,
)
from nemo_specrollout.drafters.base import SCORE_GAP_EDGES
from nemo_specrollout.generation.engine.compat import HAS_MURMUR_NOISE

_BLOCK = 1024
"""Number of tokens of a row that are scored at a time."""
_EDGES = np.array(SCORE_GAP_EDGES, np.float32)


@njit(cache=True, error_model="numpy")
def _scan(state, ids_N, is_noisy, is_murmur, scores_N, bounds_N, best, second, token, runner_up):  # type: ignore[no-untyped-def]
    for i in range(len(scores_N)):
        if bounds_N[i] <= second:
            continue
        score = scores_N[i]
        if is_noisy:
            noise = gumbel_of(uniform_of(token_bits(state, ids_N[i]))) if is_murmur else philox_gumbel(state, ids_N[i])
            score += noise
        key = order_key(score)
        if key > best:
            best, second, token, runner_up = key, best, np.int64(ids_N[i]), token
        elif key > second:
            second, runner_up = key, np.int64(ids_N[i])
    return best, second, token, runner_up


@njit(cache=True, error_model="numpy")
def _bound(state, token, is_murmur):  # type: ignore[no-untyped-def]
    """Returns an upper bound on a token's noise. With murmur3 the bound is cheaper to compute than the noise."""
    return gumbel_bound(token_bits(state, token)) if is_murmur else philox_gumbel(state, token)


@njit(cache=True, error_model="numpy")
def best_two(logits_V, divisor, is_noisy, state, is_murmur, token_ids_V, scores_N, bounds_N, ids_N):  # type: ignore[no-untyped-def]
    """Returns the best token of a row, its score gap in nats, and the second-best token.

    An upper bound on the noise rules out most tokens cheaply.
    """
    best, second, token, runner_up = LOWEST_KEY, LOWEST_KEY, np.int64(0), np.int64(0)
    for first in range(0, len(logits_V), len(scores_N)):
        scores = scores_N[: min(len(scores_N), len(logits_V) - first)]
        bound = LOWEST_KEY
        if len(token_ids_V) > 0:
            for i in range(len(scores)):
                ids_N[i] = U32(token_ids_V[first + i])
        else:
            for i in range(len(scores)):
                ids_N[i] = U32(first + i)
        for i in range(len(scores)):
            scores[i] = value_of(logits_V[first + i]) / divisor + F32(0)
        for i in range(len(scores)):
            noise = _bound(state, ids_N[i], is_murmur) if is_noisy else F32(0)
            bounds_N[i] = order_key(scores[i] + noise)
            bound = max(bound, bounds_N[i])
        if bound > second:
            best, second, token, runner_up = _scan(
                state, ids_N, is_noisy, is_murmur, scores, bounds_N, best, second, token, runner_up
            )
    return token, value_of_key(best) - value_of_key(second), runner_up


def sample_rows(*arguments: Any) -> None:
    """Implements `draft_sampling_triton.sample_rows` on a CPU."""
    _sample_rows(*map(view, arguments), _EDGES, HAS_MURMUR_NOISE)


@njit(cache=True, error_model="numpy")
def _sample_rows(  # type: ignore[no-untyped-def]
    logits_RV, slots_R, temperature_S, seeds_S, positions_R, tokens_R, levels_RK, column, token_ids_V, edges, is_murmur
):
    scores_N, ids_N = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.uint32)
    bounds_N = np.empty(_BLOCK, np.int32)
    for r in range(len(tokens_R)):
        slot = slots_R[r]
        temperature = F32(temperature_S[slot]) if slot >= 0 else F32(0)
        seed = seeds_S[slot] if slot >= 0 else np.int64(0)
        state = row_state(seed, positions_R[r]) if is_murmur else philox_row_state(seed, positions_R[r])
        row = row_of(logits_RV, r, logits_RV.shape[1])
        is_noisy = temperature != F32(0)
        divisor = temperature if is_noisy else F32(1)
        tokens_R[r], gap, _ = best_two(row, divisor, is_noisy, state, is_murmur, token_ids_V, scores_N, bounds_N, ids_N)
        levels_RK[r, column.ravel()[0]] = np.searchsorted(edges, gap)


def record_ties(logits_RV: Any, divides: bool, keys: Any, ties: Any) -> None:
    """Writes the score gap and the second-best token of each row whose request wants them.

    `row_sampling_triton.draw_rows` does the same on a GPU.
    """
    _record_ties(*map(view, (logits_RV, *keys, *ties)), divides, HAS_MURMUR_NOISE)


@njit(cache=True, error_model="numpy")
def _record_ties(  # type: ignore[no-untyped-def]
    logits_RV, slots_R, temperature_S, seeds_S, positions_R, gap_SL, runner_up_SL, wanted_S, divides, is_murmur
):
    scores_N, ids_N = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.uint32)
    bounds_N, all_tokens = np.empty(_BLOCK, np.int32), np.empty(0, np.int64)
    for r in range(len(slots_R)):
        slot, place = slots_R[r], positions_R[r] + 1
        if slot < 0 or not wanted_S[slot] or place >= gap_SL.shape[1]:
            continue
        seed = seeds_S[slot]
        state = row_state(seed, positions_R[r]) if is_murmur else philox_row_state(seed, positions_R[r])
        row = row_of(logits_RV, r, logits_RV.shape[1])
        temperature = F32(temperature_S[slot])
        is_noisy = temperature != F32(0)
        divisor = temperature if is_noisy and divides else F32(1)
        found = best_two(row, divisor, is_noisy, state, is_murmur, all_tokens, scores_N, bounds_N, ids_N)
        gap_SL[slot, place], runner_up_SL[slot, place] = found[1], found[2]
