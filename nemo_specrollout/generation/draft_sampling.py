# SPDX-License-Identifier: Apache-2.0
"""Samples draft tokens with the target's noise, and says how sure each is: by how much its score beat the runner-up's.

A drafter that samples with the target's noise is the likelier to be right the larger that margin: it says how far the
target's logits may differ before another token wins.

Shapes: R rows of logits, V vocabulary of the drafter, S request slots, K draft positions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from nemo_specrollout.drafters.base import NUM_LEVELS
from nemo_specrollout.generation import compat
from vllm_v2_cpu.kernels.floats import (
    F32,
    LOWEST_KEY,
    U32,
    order_key,
    row_of,
    value_of,
    value_of_key,
)
from vllm_v2_cpu.kernels.kernel_launch import view
from vllm_v2_cpu.kernels.noise import gumbel_bound, gumbel_of, row_state, token_bits, uniform_of

MARGIN_EDGES = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.75, 3.5, 4.5, 5.5, 7.0, 8.5, 10.0, 12.0, 15.0)
"""Margins, in nats, at which the next evidence level begins: wide, because most drafts of a good head are nearly sure."""
MARGIN_PRIORS = np.linspace(0.4, 0.97, NUM_LEVELS)
"""Rates believed of the levels before anything was seen."""
POSITION_PRIORS = np.linspace(0.8, 0.4, NUM_LEVELS)
"""The same of draft positions, which are the levels of a drafter whose drafts come without margins."""
SHARED_NOISE_PRIORS = MARGIN_PRIORS if compat.HAS_MARGINS else POSITION_PRIORS
_BLOCK = 1024


def sample_with_margin(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    temperature_S: torch.Tensor,
    seeds_S: torch.Tensor,
    positions_R: torch.Tensor,
    levels_RK: torch.Tensor,
    column: torch.Tensor,
    token_ids_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """The token of each row, int64 [R], as vLLM's `gumbel_sample` draws it; writes evidence levels to a column.

    Args:
        positions_R: of the token before the one to be drafted.
        levels_RK: int8, of which `column`, a number on the device, is written.
        token_ids_V: The target's token of each column of logits, int64, ascending; None: column v is token v.
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


_EDGES = np.array(MARGIN_EDGES, np.float32)


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
    """The best token of a row, and by how much its score beats the next. Most tokens are ruled out by a bound."""
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
        tokens_R[r], margin = _best_two(row, temperature, state, token_ids_V, scores_N, bounds_N, ids_N)
        levels_RK[r, column.ravel()[0]] = np.searchsorted(edges, margin)


def share_noise(
    speculator: Any, levels_RK: torch.Tensor, only_reads: Callable[[], bool], column: torch.Tensor | None = None
) -> None:
    """Makes a drafter with weights sample its own logits with the noise that the target will draw at each position.

    `levels_RK` gets the evidence levels of its draft tokens, where this vLLM's noise has margins: in `column`, or in that of
    the draft step. Nothing is sampled where the drafter `only_reads`.
    """

    def sample_draft(
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        **_: Any,
    ) -> torch.Tensor:
        if only_reads():
            return torch.zeros(len(hidden_states), dtype=torch.int64, device=hidden_states.device)
        logits, places, token_ids = compat.draft_logits_and_positions(
            speculator, hidden_states, positions, spec_step_idx
        )
        rows = (logits, idx_mapping, temperature, seeds, places)
        if compat.HAS_MARGINS:
            return sample_with_margin(*rows, levels_RK, draft_step if column is None else column, token_ids)
        return compat.draw(*rows, apply_temperature=True)

    speculator.sample_draft = sample_draft
