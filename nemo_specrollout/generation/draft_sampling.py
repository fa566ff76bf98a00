# SPDX-License-Identifier: Apache-2.0
"""Samples draft tokens with the target's noise, and grades them by the score gap between the best two tokens.

The score of a token is its scaled logit plus the noise. The wider the gap, the further the target's logits may differ from the
drafter's before another token wins. So drafts with a wide gap are more often right.

Shapes: R rows of logits, V vocabulary of the drafter, N tokens of a block, S request slots, K draft positions.
"""

import numpy as np
import torch
from numba import njit

from lab.vllm_on_cpu.kernels.floats import (
    F32,
    LOWEST_KEY,
    U32,
    order_key,
    row_of,
    value_of,
    value_of_key,
)
from lab.vllm_on_cpu.kernels.kernel_launch import view
from lab.vllm_on_cpu.kernels.noise import gumbel_bound, gumbel_of, row_state, token_bits, uniform_of
from nemo_specrollout.drafters.base import NUM_LEVELS
from nemo_specrollout.generation import compat

SCORE_GAP_EDGES = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.75, 3.5, 4.5, 5.5, 7.0, 8.5, 10.0, 12.0, 15.0)
"""Score gaps, in nats, at which the next evidence level begins. They are wide: most drafts of a good head are nearly sure."""
POSITION_PRIORS = np.linspace(0.8, 0.4, NUM_LEVELS)
"""Acceptance rates assumed for draft positions, which serve as levels where there are no score gaps."""
SHARED_NOISE_PRIORS = np.linspace(0.4, 0.97, NUM_LEVELS) if compat.HAS_SCORE_GAPS else POSITION_PRIORS
"""Acceptance rates assumed for the levels of a drafter that samples with the target's noise."""
_BLOCK = 1024
"""Tokens of a row that are scored at a time."""
_EDGES = np.array(SCORE_GAP_EDGES, np.float32)


def sample_with_score_gap(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    temperature_S: torch.Tensor,
    seeds_S: torch.Tensor,
    positions_R: torch.Tensor,
    levels_RK: torch.Tensor,
    column: torch.Tensor,
    token_ids_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the token of each row, int64 [R], as vLLM's `gumbel_sample` draws it. Writes evidence levels to a column.

    Args:
        logits_RV: Logits of the drafter, before temperature.
        slots_R: Request slot of each row; negative in rows that pad a CUDA graph.
        temperature_S: Temperature of each request; 0 for greedy sampling.
        seeds_S: Seed of each request's noise.
        positions_R: Position of the token before the one to be drafted.
        levels_RK: Evidence levels, int8.
        column: Column of `levels_RK` to be written, an integer on the device.
        token_ids_V: The target's token of each column of logits, int64, ascending; None if column v is token v.
    """
    tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    if token_ids_V is None:
        token_ids_V = tokens_R[:0]
    arguments = (logits_RV, slots_R, temperature_S, seeds_S, positions_R, tokens_R, levels_RK, column, token_ids_V)
    if logits_RV.is_cuda:
        from nemo_specrollout.generation.draft_sampling_triton import sample_rows

        sample_rows(*arguments)
    else:
        _sample_rows(*map(view, arguments), _EDGES)
    return tokens_R


@njit(cache=True, error_model="numpy")
def _scan(state, ids_N, is_noisy, scores_N, bounds_N, best, second, token):  # type: ignore[no-untyped-def]
    for i in range(len(scores_N)):
        if bounds_N[i] <= second:
            continue
        score = scores_N[i]
        if is_noisy:
            score += gumbel_of(uniform_of(token_bits(state, ids_N[i])))
        key = order_key(score)
        if key > best:
            best, second, token = key, best, np.int64(ids_N[i])
        elif key > second:
            second = key
    return best, second, token


@njit(cache=True, error_model="numpy")
def _best_two(logits_V, temperature, state, token_ids_V, scores_N, bounds_N, ids_N):  # type: ignore[no-untyped-def]
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
            noise = gumbel_bound(token_bits(state, ids_N[i])) if is_noisy else F32(0)
            bounds_N[i] = order_key(scores[i] + noise)
            bound = max(bound, bounds_N[i])
        if bound > second:
            best, second, token = _scan(state, ids_N, is_noisy, scores, bounds_N, best, second, token)
    return token, value_of_key(best) - value_of_key(second)


@njit(cache=True, error_model="numpy")
def _sample_rows(  # type: ignore[no-untyped-def]
    logits_RV, slots_R, temperature_S, seeds_S, positions_R, tokens_R, levels_RK, column, token_ids_V, edges
):
    scores_N, ids_N = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.uint32)
    bounds_N = np.empty(_BLOCK, np.int32)
    for r in range(len(tokens_R)):
        slot = slots_R[r]
        temperature = F32(temperature_S[slot]) if slot >= 0 else F32(0)
        state = row_state(seeds_S[slot] if slot >= 0 else np.int64(0), positions_R[r])
        row = row_of(logits_RV, r, logits_RV.shape[1])
        tokens_R[r], gap = _best_two(row, temperature, state, token_ids_V, scores_N, bounds_N, ids_N)
        levels_RK[r, column.ravel()[0]] = np.searchsorted(edges, gap)
