# SPDX-License-Identifier: Apache-2.0
"""Accepts a draft token if and only if the policy samples the same token at its position.

In an engine step, a request with n draft tokens has n + 1 consecutive rows of logits. From row j, counted from 0, the policy
samples the token that follows the request's first j draft tokens.

Shapes: B requests, R rows, K draft positions.
"""

import torch

from nemo_specrollout.sampling.platforms import KernelModule, kernels_for


def accept_by_equality(
    sampled_R: torch.Tensor, inputs_R: torch.Tensor, starts_B1: torch.Tensor, num_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens that each request gets in an engine step, int64 [B, K + 1], and their number, int32 [B].

    They are the request's sampled tokens up to and including the first one that differs from the draft token at its position.
    The rest of the first tensor is zeros.

    Args:
        sampled_R: the token that the policy has sampled from each row of logits, int64.
        inputs_R: the input token of each row. The rows of a request have its last token, and then its draft tokens. A draft
            token of -1 is not accepted.
        starts_B1: index of the first row of each request, and at the end the number of all rows, shape [B + 1].
        num_positions: maximum number of draft tokens of a request, K.
    """
    num_requests = len(starts_B1) - 1
    emitted_BK = sampled_R.new_empty(num_requests, num_positions + 1)
    counts_B = torch.empty(num_requests, dtype=torch.int32, device=sampled_R.device)
    kernels_for(sampled_R.device.type, KernelModule.EQUALITY).accept_rows(
        sampled_R, inputs_R, starts_B1, emitted_BK, counts_B
    )
    return emitted_BK, counts_B
