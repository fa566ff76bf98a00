# SPDX-License-Identifier: Apache-2.0
"""Accepts a draft token if and only if the policy samples the same token at its position.

A request with n drafts has n + 1 consecutive rows. In row j, counted from 0, the policy samples the token after the request's
first j drafts.

Shapes: B requests, R rows, K draft positions.
"""

import torch

from nemo_specrollout.sampling.platforms import KernelModule, kernels_for


def accept_by_equality(
    sampled_R: torch.Tensor, inputs_R: torch.Tensor, starts_B1: torch.Tensor, num_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens that each request emits, int64 [B, K + 1] padded with zeros, and their number, int32 [B].

    A request emits its sampled tokens up to and including the first that differs from its draft.

    Args:
        sampled_R: the token that the policy samples in each row, int64.
        inputs_R: the token that the forward pass reads in each row. A request's rows read its last token, and then its drafts.
            A row with -1 has a draft that must not be accepted.
        starts_B1: the first row of each request, and at the end the number of all rows, [B + 1].
        num_positions: most drafts of a request (K).
    """
    num_requests = len(starts_B1) - 1
    emitted_BK = sampled_R.new_empty(num_requests, num_positions + 1)
    counts_B = torch.empty(num_requests, dtype=torch.int32, device=sampled_R.device)
    kernels_for(sampled_R.device.type, KernelModule.EQUALITY).accept_rows(
        sampled_R, inputs_R, starts_B1, emitted_BK, counts_B
    )
    return emitted_BK, counts_B
