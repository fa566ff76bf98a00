# SPDX-License-Identifier: Apache-2.0
"""Packs several sequences into each training batch of a head, in the form that `speculators` trains on.

A row of a batch is one position of a sequence, with its token and the policy's hidden states.

Shapes: S rows of a packed batch, H hidden size, F = auxiliary layers * H.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_specrollout.heads.features.features import SequenceFeatures

PADDING = -1
"""Document id of the rows that only fill a batch up to its size. `speculators` calls each piece of a sequence a document."""
RECENT_BATCHES = 64
"""Number of batches to which pieces of sequences can still be added while batches are planned. These are the latest
batches."""

Batch = dict[str, Tensor]
"""Tensors [1, S, ...] of a packed batch. Their names are the argument names of the training forward pass of `speculators`."""


@dataclass(frozen=True)
class Piece:
    """A part of a sequence, from token `start` up to but excluding token `stop`."""

    sequence: int
    """Index of the sequence in the list of all sequences."""
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Number of rows that the piece takes in a batch.

        It is one less than the number of tokens, because a row has the states at one token and the id of the next token
        (`pack`).
        """
        return self.stop - self.start - 1


def plan_batches(lengths: Sequence[int], max_rows: int, generator: torch.Generator) -> list[list[Piece]]:
    """Distributes sequences of `lengths` tokens over batches of at most `max_rows` rows, and returns the pieces of each batch.

    A sequence of more than `max_rows` rows is cut into pieces. Neighboring pieces share a token, so that no row is lost. The
    pieces are placed in random order. Each goes into the first of the latest `RECENT_BATCHES` batches that has enough room, or
    into a new batch if none has.
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
    """Returns one batch of all `pieces`, padded to `num_rows` rows if that is given.

    As in vLLM, and in `shift_batch` of `speculators`, row t has token t+1, the auxiliary states at t and the final state at
    t+1. From this row the head learns the distribution of token t+2. The loss leaves out rows whose token t+1 belongs to the
    prompt or is the last of its sequence. It also leaves out the first `ttt_steps` - 1 rows of each piece, because
    `speculators` would compare them with draft tokens from the piece before.
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
    """Returns the rows of one piece as tensors [S, ...]. `document` is the piece's number in the batch."""
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
