# SPDX-License-Identifier: Apache-2.0
"""Samples draft tokens with the request's own noise, and grades each by the gap between the two best scores.

The score of a token is its logit divided by the temperature, plus noise. The policy will sample with the same noise at this
position. So the policy samples the draft token too, unless its scores differ from the drafter's by more than the gap. The
wider the gap, the more often the draft is right.

Shapes: R rows of logits, V vocabulary of the drafter, S request slots, K draft positions.
"""

import numpy as np
import torch

from nemo_specrollout.drafters.base import NUM_LEVELS
from nemo_specrollout.sampling.platforms import KernelModule, kernels_for

POSITION_PRIORS = np.linspace(0.8, 0.4, NUM_LEVELS)
"""Acceptance rates that are assumed at first for drafts that are sampled greedily. Their draft position serves as their
evidence level, so there is a rate for each position."""
SHARED_NOISE_PRIORS = np.linspace(0.4, 0.97, NUM_LEVELS)
"""Acceptance rates that are assumed at first for the evidence levels of a drafter that samples with the request's own
noise."""


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
    """Returns the draft token of each row, int64 [R], as vLLM's `gumbel_sample` would draw it, and writes its evidence level.

    Args:
        logits_RV: Logits of the drafter, before division by the temperature.
        slots_R: Request slot of each row, negative in rows that pad a CUDA graph.
        temperature_S: Temperature of each request, 0 for greedy sampling.
        seeds_S: Seed of each request's noise.
        positions_R: Position of the token before the one to be drafted.
        levels_RK: Evidence levels, int8, of which one column is written.
        column: Index of the column of `levels_RK` that is written, as an integer tensor on the device.
        token_ids_V: The policy's token id for each column of the logits, int64 and ascending. None if column v is token v.
    """
    tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    if token_ids_V is None:
        token_ids_V = tokens_R[:0]
    kernels_for(logits_RV.device.type, KernelModule.DRAFT_SAMPLING).sample_rows(
        logits_RV, slots_R, temperature_S, seeds_S, positions_R, tokens_R, levels_RK, column, token_ids_V
    )
    return tokens_R
