# SPDX-License-Identifier: Apache-2.0
"""Accept by equality: a draft token stands iff it is the token that the policy samples at that position.

Rows are laid out request by request: for n drafts n + 1 rows, row j sampled after the first j drafts.
Shapes: B requests, R rows, K most drafts of a request.
"""

import torch
from numba import njit

from nemo_specrollout.sampling.on_tensors import on_tensors


def accept_by_equality(
    sampled_R: torch.Tensor, inputs_R: torch.Tensor, starts_B1: torch.Tensor, num_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that each request emits, int64 [B, K + 1], and how many they are, int32 [B]; zeros follow them.

    Args:
        sampled_R: int64 token that the policy samples in each row.
        inputs_R: token that each row's forward pass read: a request's last token, then its drafts.
        starts_B1: the first row of each request, and the number of rows at the end, [B + 1].
        num_positions: K.

    A request emits its sampled tokens up to and including the first that differs from its draft.
    """
    num_requests = len(starts_B1) - 1
    emitted_BK = sampled_R.new_empty(num_requests, num_positions + 1)
    counts_B = torch.empty(num_requests, dtype=torch.int32, device=sampled_R.device)
    if sampled_R.is_cuda:
        from nemo_specrollout.sampling.equality_triton import accept_rows

        accept_rows(sampled_R, inputs_R, starts_B1, emitted_BK, counts_B)
    else:
        _accept_rows(sampled_R, inputs_R, starts_B1, emitted_BK, counts_B)
    return emitted_BK, counts_B


@on_tensors
@njit(cache=True, nogil=True)
def _accept_rows(sampled_R, inputs_R, starts_B1, emitted_BK, counts_B):  # type: ignore[no-untyped-def]
    for b in range(len(counts_B)):
        emitted_BK[b] = 0
        count = 0
        for row in range(starts_B1[b], starts_B1[b + 1]):
            emitted_BK[b, count] = sampled_R[row]
            count += 1
            if row + 1 == starts_B1[b + 1] or inputs_R[row + 1] != sampled_R[row]:
                break
        counts_B[b] = count
