# SPDX-License-Identifier: Apache-2.0
"""Samples draft tokens with the request's own noise, and grades them by the score gap between the two best tokens.

The score of a token is its logit divided by the temperature, plus the noise with which the policy will sample at the same
position. The wider the gap, the further the policy's logits may differ from the drafter's before another token wins. So drafts
with a wide gap are more often right.

Shapes: R rows of logits, V vocabulary of the drafter, S request slots, K draft positions.
"""

import numpy as np
import torch

from nemo_specrollout.drafters.base import NUM_LEVELS
from nemo_specrollout.sampling.platforms import KernelModule, kernels_for

POSITION_PRIORS = np.linspace(0.8, 0.4, NUM_LEVELS)
"""Acceptance rates assumed for draft positions. The positions serve as evidence levels of drafts that are sampled greedily."""
SHARED_NOISE_PRIORS = np.linspace(0.4, 0.97, NUM_LEVELS)
"""Acceptance rates assumed for the evidence levels of a drafter that samples with shared noise."""


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
        logits_RV: Logits of the drafter, before temperature.
        slots_R: Request slot of each row, negative in rows that pad a CUDA graph.
        temperature_S: Temperature of each request, 0 for greedy sampling.
        seeds_S: Seed of each request's noise.
        positions_R: Position of the token before the one to be drafted.
        levels_RK: Evidence levels, int8, of which one column is written.
        column: Number of that column, an integer on the device.
        token_ids_V: The policy's token of each column of logits, int64 and ascending, or None if column v is token v.
    """
    tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    if token_ids_V is None:
        token_ids_V = tokens_R[:0]
    kernels_for(logits_RV.device.type, KernelModule.DRAFT_SAMPLING).sample_rows(
        logits_RV, slots_R, temperature_S, seeds_S, positions_R, tokens_R, levels_RK, column, token_ids_V
    )
    return tokens_R
