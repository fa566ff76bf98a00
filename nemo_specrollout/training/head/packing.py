# SPDX-License-Identifier: Apache-2.0
"""Sequences side by side in one row, as `speculators` trains on them: none sees another, hardly a place is wasted.

Alignment: a row of a batch holds token t+1, the auxiliary states at t and the final hidden state at t+1, so that the
head reads what vLLM gives it (`speculators`' `shift_batch`) and learns the distribution of token t+2.

Shapes: S rows of a batch, F = auxiliary layers * H, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from nemo_specrollout.training.features.features import SequenceFeatures

PADDING = -1
_GROUP_BATCHES = 64
"""Sequences are shuffled, then packed in groups of about this many batches, so that batches mix all lengths."""


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of a sequence, one row fewer."""

    sequence: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start - 1


@dataclass(frozen=True)
class PackedBatch:
    """The arguments of a training forward of `speculators`; `loss_mask_1S` is where a draft is to be learned."""

    hidden_states_1SF: torch.Tensor
    input_ids_1S: torch.Tensor
    document_ids_1S: torch.Tensor
    loss_mask_1S: torch.Tensor
    position_ids_1S: torch.Tensor
    final_1SH: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.input_ids_1S.shape[1]

    @property
    def num_targets(self) -> int:
        """Rows that the loss counts."""
        return int(self.loss_mask_1S.sum())

    def to(self, device: torch.device | str) -> "PackedBatch":
        return PackedBatch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))

    def arguments(self) -> dict[str, Any]:
        """By the names of `Eagle3DraftModel.forward`."""
        return {
            "hidden_states": self.hidden_states_1SF,
            "input_ids": self.input_ids_1S,
            "document_ids": self.document_ids_1S,
            "loss_mask": self.loss_mask_1S,
            "position_ids": self.position_ids_1S,
            "verifier_last_hidden_states": self.final_1SH,
        }


def plan_batches(lengths: Sequence[int], max_rows: int, generator: torch.Generator | None = None) -> list[list[Piece]]:
    """Which pieces go into which batch: shuffled, then first-fit decreasing within groups, then shuffled again.

    A sequence of more than `max_rows` rows is cut; pieces share a token, so that no row is lost. Without a generator
    nothing is shuffled. Raises ValueError if `max_rows` is not positive.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}; a batch needs at least one row")
    pieces = [piece for i, length in enumerate(lengths) for piece in _cut(i, length, max_rows)]
    batches: list[list[Piece]] = []
    for group in _groups(_shuffled(pieces, generator), _GROUP_BATCHES * max_rows):
        batches += _first_fit(group, max_rows)
    return _shuffled(batches, generator)


def waste_rate(batches: Sequence[Sequence[Piece]], max_rows: int) -> float:
    """Share of the places of batches of `max_rows` rows that nothing fills."""
    if not batches:
        return 0.0
    return 1.0 - sum(piece.num_rows for batch in batches for piece in batch) / (len(batches) * max_rows)


def pack(
    sequences: Sequence[SequenceFeatures],
    pieces: Sequence[Piece],
    ttt_steps: int,
    num_rows: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> PackedBatch:
    """The batch of `pieces`, padded to `num_rows` rows if given.

    The loss leaves out: what was given (prompts); the distribution after a sequence's last token, which no one drafts;
    and a piece's first `ttt_steps` - 1 rows, which `speculators` would compare with drafts made in the piece before.
    With a prompt of `ttt_steps` tokens or more the latter loses nothing.
    """
    columns = [_rows(sequences[p.sequence], p, document, ttt_steps, dtype) for document, p in enumerate(pieces)]
    joined = PackedBatch(*(torch.cat(parts)[None] for parts in zip(*columns, strict=True)))
    surplus = 0 if num_rows is None else num_rows - joined.num_rows
    return _pad(joined, surplus) if surplus > 0 else joined


def _rows(
    features: SequenceFeatures, piece: Piece, document: int, ttt_steps: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The piece's part of every field of a batch, in the order of the fields."""
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
    """Consecutive pieces of about `max_rows` rows in all."""
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
    """Longest first, each into the first batch that has room."""
    batches: list[list[Piece]] = []
    rooms: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.num_rows):
        b = next((i for i, room in enumerate(rooms) if room >= piece.num_rows), len(batches))
        if b == len(batches):
            batches.append([])
            rooms.append(max_rows)
        batches[b].append(piece)
        rooms[b] -= piece.num_rows
    return batches


def _shuffled(items: list[Any], generator: torch.Generator | None) -> list[Any]:
    if generator is None:
        return items
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]
