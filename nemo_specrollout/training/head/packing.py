# SPDX-License-Identifier: Apache-2.0
"""Packs sequences into batches of one long row, as `speculators` trains on them.

A row of a batch holds token t+1, the auxiliary states at t and the final hidden state at t+1. The head thus reads what it
reads in vLLM (`shift_batch` of `speculators`) and learns the distribution of token t+2. Sequences do not attend to each
other.

Shapes: S rows of a batch, F = auxiliary layers * H, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from nemo_specrollout.training.features.features import SequenceFeatures

PADDING = -1
"""Document id of rows that only fill a batch."""
_GROUP_BATCHES = 64
"""Approximate number of batches that are planned together. Each group is sorted by length, then packed."""


@dataclass(frozen=True)
class Piece:
    """Part of a sequence."""

    sequence: int
    """Index of the sequence."""
    start: int
    """First token."""
    stop: int
    """Token after the last one."""

    @property
    def num_rows(self) -> int:
        """Rows in a batch: one fewer than tokens."""
        return self.stop - self.start - 1


@dataclass(frozen=True)
class PackedBatch:
    """Arguments of `speculators`' training forward."""

    hidden_states_1SF: torch.Tensor
    """Auxiliary states."""
    input_ids_1S: torch.Tensor
    """Token ids."""
    document_ids_1S: torch.Tensor
    """Number of the piece of each row, or PADDING."""
    loss_mask_1S: torch.Tensor
    """Whether the head learns the draft of a row."""
    position_ids_1S: torch.Tensor
    """Position of each token in its sequence."""
    final_1SH: torch.Tensor
    """Final hidden states."""

    @property
    def num_rows(self) -> int:
        """Rows of the batch, padding included."""
        return self.input_ids_1S.shape[1]

    @property
    def num_targets(self) -> int:
        """Rows that the loss counts."""
        return int(self.loss_mask_1S.sum())

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Returns the batch on a device."""
        return PackedBatch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))

    def arguments(self) -> dict[str, Any]:
        """Returns the tensors by the argument names of `Eagle3DraftModel.forward`."""
        return {
            "hidden_states": self.hidden_states_1SF,
            "input_ids": self.input_ids_1S,
            "document_ids": self.document_ids_1S,
            "loss_mask": self.loss_mask_1S,
            "position_ids": self.position_ids_1S,
            "verifier_last_hidden_states": self.final_1SH,
        }


def plan_batches(lengths: Sequence[int], max_rows: int, generator: torch.Generator | None = None) -> list[list[Piece]]:
    """Returns the pieces of each batch: shuffled, packed first-fit decreasing within groups, and shuffled again.

    Sequences of more than `max_rows` rows are cut into pieces that share a token, so that no row is lost. Without a
    generator, nothing is shuffled. Raises ValueError if `max_rows` is not positive.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}; a batch needs at least one row")
    pieces = [piece for i, length in enumerate(lengths) for piece in _cut(i, length, max_rows)]
    batches: list[list[Piece]] = []
    for group in _groups(_shuffled(pieces, generator), _GROUP_BATCHES * max_rows):
        batches += _first_fit(group, max_rows)
    return _shuffled(batches, generator)


def pack(
    sequences: Sequence[SequenceFeatures],
    pieces: Sequence[Piece],
    ttt_steps: int,
    num_rows: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> PackedBatch:
    """Returns the batch of `pieces`, padded to `num_rows` rows if given.

    The loss leaves out prompts, and the distribution after a sequence's last token. It also leaves out the first
    `ttt_steps` - 1 rows of a piece, which `speculators` would compare with drafts from the piece before. These rows lie
    in the prompt if it has at least `ttt_steps` tokens.
    """
    columns = [_rows(sequences[p.sequence], p, document, ttt_steps, dtype) for document, p in enumerate(pieces)]
    joined = PackedBatch(*(torch.cat(parts)[None] for parts in zip(*columns, strict=True)))
    surplus = 0 if num_rows is None else num_rows - joined.num_rows
    return _pad(joined, surplus) if surplus > 0 else joined


def _rows(
    features: SequenceFeatures, piece: Piece, document: int, ttt_steps: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Returns the piece's part of every field of a batch, in the order of the fields."""
    start, stop = piece.start, piece.stop
    index_S = torch.arange(start + 1, stop)
    position_S = index_S + features.first_position
    is_target_S = (position_S >= features.prompt_length) & (index_S < features.num_tokens - 1)
    is_target_S[: ttt_steps - 1] = False
    return (
        features.aux_TF[start : stop - 1].to(dtype),
        features.token_ids_T[start + 1 : stop].long(),
        torch.full_like(index_S, document),
        is_target_S,
        position_S,
        features.final_TH[start + 1 : stop].to(dtype),
    )


def _pad(batch: PackedBatch, surplus: int) -> PackedBatch:
    def grow(tensor: torch.Tensor, value: int = 0) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((1, surplus, *tensor.shape[2:]), value)], dim=1)

    return PackedBatch(
        grow(batch.hidden_states_1SF),
        grow(batch.input_ids_1S),
        grow(batch.document_ids_1S, PADDING),
        grow(batch.loss_mask_1S),
        grow(batch.position_ids_1S),
        grow(batch.final_1SH),
    )


def _cut(sequence: int, length: int, max_rows: int) -> Iterator[Piece]:
    for start in range(0, length - 1, max_rows):
        yield Piece(sequence, start, min(start + max_rows + 1, length))


def _groups(pieces: Sequence[Piece], max_rows: int) -> Iterator[list[Piece]]:
    """Yields groups of consecutive pieces with about `max_rows` rows each."""
    group: list[Piece] = []
    num_rows = 0
    for piece in pieces:
        group.append(piece)
        num_rows += piece.num_rows
        if num_rows >= max_rows:
            yield group
            group, num_rows = [], 0
    if group:
        yield group


def _first_fit(pieces: Sequence[Piece], max_rows: int) -> list[list[Piece]]:
    """Puts the pieces, longest first, each into the first batch with enough room."""
    batches: list[list[Piece]] = []
    free_rows: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.num_rows):
        b = next((i for i, free in enumerate(free_rows) if free >= piece.num_rows), len(batches))
        if b == len(batches):
            batches.append([])
            free_rows.append(max_rows)
        batches[b].append(piece)
        free_rows[b] -= piece.num_rows
    return batches


def _shuffled(items: list[Any], generator: torch.Generator | None) -> list[Any]:
    if generator is None:
        return items
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]
