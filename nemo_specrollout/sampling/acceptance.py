# SPDX-License-Identifier: Apache-2.0
"""Accept by equality: a draft token stands iff it is the token that the policy samples at that position.

Rows are laid out request by request: for n drafts, n + 1 rows, row j sampled after the first j drafts.
Shapes: B requests, R rows (sum of n + 1), D drafts (sum of n), S = max n + 1 output columns.
"""

import torch

PLACEHOLDER = -1


def accept_by_equality(
    tokens_R: torch.Tensor, drafts_D: torch.Tensor, num_drafts_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that each request emits, [B, S] padded with -1, and the row that each came from, [B, S] clamped.

    A request emits its sampled tokens up to and including the first that differs from its draft. On a CPU a compiled
    loop does it; `accept_by_equality_torch` is the definition, and what runs on a GPU.
    """
    if tokens_R.is_cuda:
        return accept_by_equality_torch(tokens_R, drafts_D, num_drafts_B)
    from nemo_specrollout.sampling.cpu_kernel import accept_rows

    shape = (len(num_drafts_B), int(num_drafts_B.max()) + 1)
    emitted_BS, rows_BS = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
    accept_rows(tokens_R.numpy(), drafts_D.numpy(), num_drafts_B.numpy(), emitted_BS.numpy(), rows_BS.numpy())
    return emitted_BS, rows_BS


def accept_by_equality_torch(
    tokens_R: torch.Tensor, drafts_D: torch.Tensor, num_drafts_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accept_by_equality` as it is defined, on any device, without a loop."""
    num_drafts_B = num_drafts_B.to(torch.int64)
    ends_B = num_drafts_B.cumsum(0)
    draft_starts_B = ends_B - num_drafts_B
    row_starts_B = draft_starts_B + torch.arange(len(num_drafts_B), device=tokens_R.device)
    offsets_S = torch.arange(int(num_drafts_B.max()) + 1, device=tokens_R.device)

    rows_BS = (row_starts_B[:, None] + offsets_S).clamp_(max=len(tokens_R) - 1)
    sampled_BS = tokens_R[rows_BS]
    if len(offsets_S) == 1:
        return sampled_BS, rows_BS
    draft_offsets = offsets_S[:-1]
    drafts = drafts_D[(draft_starts_B[:, None] + draft_offsets).clamp_(max=len(drafts_D) - 1)]
    matches = (sampled_BS[:, :-1] == drafts) & (draft_offsets < num_drafts_B[:, None])
    emitted = torch.cat([torch.ones_like(matches[:, :1]), matches.to(torch.int8).cumprod(1).bool()], dim=1)
    return sampled_BS.masked_fill(~emitted, PLACEHOLDER), rows_BS
