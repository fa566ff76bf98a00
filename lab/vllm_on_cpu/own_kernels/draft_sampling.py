# SPDX-License-Identifier: Apache-2.0
"""Sampling of draft tokens with the target's noise on a CPU (`generation/drafting/draft_sampling.py`).

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
"""Tokens of a row that are scored at a time."""
_EDGES = np.array(SCORE_GAP_EDGES, np.float32)


@njit(cache=True, error_model="numpy")
def _scan(state, ids_N, is_noisy, is_murmur, scores_N, bounds_N, best, second, token):  # type: ignore[no-untyped-def]
    for i in range(len(scores_N)):
        if bounds_N[i] <= second:
            continue
        score = scores_N[i]
        if is_noisy:
            noise = gumbel_of(uniform_of(token_bits(state, ids_N[i]))) if is_murmur else philox_gumbel(state, ids_N[i])
            score += noise
        key = order_key(score)
        if key > best:
            best, second, token = key, best, np.int64(ids_N[i])
        elif key > second:
            second = key
    return best, second, token


@njit(cache=True, error_model="numpy")
def _bound(state, token, is_murmur):  # type: ignore[no-untyped-def]
    """Returns a bound on a token's noise, which is cheaper than the noise where vLLM has murmur3."""
    return gumbel_bound(token_bits(state, token)) if is_murmur else philox_gumbel(state, token)


@njit(cache=True, error_model="numpy")
def _best_two(logits_V, temperature, state, is_murmur, token_ids_V, scores_N, bounds_N, ids_N):  # type: ignore[no-untyped-def]
    """Returns the best token of a row and its score gap. A bound on the noise rules out most tokens cheaply."""
    is_noisy = temperature != F32(0)
    divisor = temperature if is_noisy else F32(1)
    best, second, token = LOWEST_KEY, LOWEST_KEY, np.int64(0)
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
            best, second, token = _scan(state, ids_N, is_noisy, is_murmur, scores, bounds_N, best, second, token)
    return token, value_of_key(best) - value_of_key(second)


def sample_rows(*arguments: Any) -> None:
    """Implements `draft_sampling_triton.sample_rows`."""
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
        tokens_R[r], gap = _best_two(row, temperature, state, is_murmur, token_ids_V, scores_N, bounds_N, ids_N)
        levels_RK[r, column.ravel()[0]] = np.searchsorted(edges, gap)
