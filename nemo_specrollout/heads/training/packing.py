# SPDX-License-Identifier: Apache-2.0
"""Packs several sequences into each batch of the training forward of `speculators`.

A row of a batch is one position of a sequence, with its token and the policy's states.

Shapes: S rows of a packed batch, H hidden size, F = auxiliary layers * H.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_specrollout.heads.features.features import SequenceFeatures

PADDING = -1
"""Document id of the rows that only fill up a batch."""
RECENT_BATCHES = 64
"""Number of the latest batches that may still receive a piece."""

Batch = dict[str, Tensor]
"""Tensors [1, S, ...] by the argument names of `speculators`' training forward (`pack`)."""


@dataclass(frozen=True)
class Piece:
    """The tokens from `start` up to but excluding `stop` of a sequence, which is given by its index."""

    sequence: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Number of rows that the piece takes. It is one less than its tokens, because a row pairs two of them (`pack`)."""
        return self.stop - self.start - 1


def plan_batches(lengths: Sequence[int], max_rows: int, generator: torch.Generator) -> list[list[Piece]]:
    """Returns the pieces of each batch of at most `max_rows` rows, for sequences of `lengths` tokens.

    In random order, each piece goes into the first of the latest `RECENT_BATCHES` batches that has room for it. Sequences of
    more than `max_rows` rows are cut into pieces. Neighboring pieces share a token, so that no row is lost.
    """
    pieces = [
        Piece(i, start, min(start + max_rows + 1, length))
        for i, length in enumerate(lengths)
        for start in range(0, length - 1, max_rows)
    ]
    batches: list[list[Piece]] = []
    free_rows: list[int] = []
    for index in torch.randperm(len(pieces), generator=generator).tolist():
        num_rows = pieces[index].num_rows
        recent = range(max(0, len(batches) - RECENT_BATCHES), len(batches))
        b = next((b for b in recent if free_rows[b] >= num_rows), len(batches))
        if b == len(batches):
            batches.append([])
            free_rows.append(max_rows)
        batches[b].append(pieces[index])
        free_rows[b] -= num_rows
    return batches


def pack(
    sequences: Sequence[SequenceFeatures], pieces: Sequence[Piece], ttt_steps: int, num_rows: int | None = None
) -> Batch:
    """Returns the batch of `pieces`, padded to `num_rows` rows if given.

    As in vLLM (`shift_batch` of `speculators`), row t has token t+1, the auxiliary states at t and the final state at t+1.
    From it the head learns the distribution of token t+2. The loss leaves out rows whose token belongs to the prompt or is the
    last of its sequence. It also leaves out the first `ttt_steps` - 1 rows of a piece, because `speculators` would compare
    them with drafts from the piece before.
    """
    parts = [_rows(sequences[piece.sequence], piece, document, ttt_steps) for document, piece in enumerate(pieces)]
    batch = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
    surplus = 0 if num_rows is None else num_rows - batch["input_ids"].shape[1]
    if surplus > 0:
        for name, tensor in batch.items():
            filling = tensor.new_full((1, surplus, *tensor.shape[2:]), PADDING if name == "document_ids" else 0)
            batch[name] = torch.cat([tensor, filling], dim=1)
    return batch


def _rows(features: SequenceFeatures, piece: Piece, document: int, ttt_steps: int) -> Batch:
    """Returns the piece's part of a batch, without the first dimension."""
    start = piece.start
    stop = piece.stop
    index_S = torch.arange(start + 1, stop)
    position_S = index_S + features.first_position
    is_target_S = (position_S >= features.prompt_length) & (index_S < features.num_tokens - 1)
    is_target_S[: ttt_steps - 1] = False
    return {
        "hidden_states": features.aux_TF[start : stop - 1].float(),
        "input_ids": features.token_ids_T[start + 1 : stop].long(),
        "document_ids": torch.full_like(index_S, document),
        "loss_mask": is_target_S,
        "position_ids": position_S,
        "verifier_last_hidden_states": features.final_TH[start + 1 : stop].float(),
    }
