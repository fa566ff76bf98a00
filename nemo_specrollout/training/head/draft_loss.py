# SPDX-License-Identifier: Apache-2.0
"""Forward passes and training loss of an EAGLE-3 head, on sequences that are packed into one long row.

The first pass runs on the policy's states, each further one on the head's own states. All later passes attend to the keys of
the first pass. Only the row that made a key of a later pass attends to it.

Shapes: S rows of a packed batch, R rows that draft, C columns that they attend to, K draft positions.
D draft vocabulary, H hidden size, F = auxiliary layers * H.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from nemo_specrollout.training.features.features import SequenceFeatures

PADDING = -1
"""Document id of rows that only fill a batch."""
_GROUP_BATCHES = 64
"""Approximate number of batches that are planned together. Each group is sorted by length, then packed."""

Batch = dict[str, Tensor]
"""Tensors [1, S, ...] by the argument names of `speculators`' training forward (`pack`)."""
RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Returns the loss of each row, [R], from the head's logits and the policy's probabilities, both [R, D]."""


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


def plan_batches(lengths: Sequence[int], max_rows: int, generator: torch.Generator) -> list[list[Piece]]:
    """Returns the pieces of each batch: shuffled, packed first-fit decreasing within groups, and shuffled again.

    Sequences of more than `max_rows` rows are cut into pieces that share a token, so that no row is lost.
    """
    pieces = [
        Piece(i, start, min(start + max_rows + 1, length))
        for i, length in enumerate(lengths)
        for start in range(0, length - 1, max_rows)
    ]
    batches: list[list[Piece]] = []
    group: list[Piece] = []
    group_rows = 0
    for piece in _shuffled(pieces, generator):
        group.append(piece)
        group_rows += piece.num_rows
        if group_rows >= _GROUP_BATCHES * max_rows:
            batches += _first_fit(group, max_rows)
            group, group_rows = [], 0
    return _shuffled(batches + _first_fit(group, max_rows), generator)


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


def _shuffled(items: list[Any], generator: torch.Generator) -> list[Any]:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


def pack(
    sequences: Sequence[SequenceFeatures], pieces: Sequence[Piece], ttt_steps: int, num_rows: int | None = None
) -> Batch:
    """Returns the batch of `pieces`, padded to `num_rows` rows if given.

    A row holds token t+1, the auxiliary states at t and the final hidden state at t+1. The head thus reads what it reads in
    vLLM (`shift_batch` of `speculators`) and learns the distribution of token t+2. Sequences do not attend to each other.

    The loss leaves out prompts, and the distribution after a sequence's last token. It also leaves out the first
    `ttt_steps` - 1 rows of a piece, which `speculators` would compare with drafts from the piece before. These rows lie
    in the prompt if it has at least `ttt_steps` tokens.
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
    start, stop = piece.start, piece.stop
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


def projected(model: Any, aux_1SF: Tensor) -> Tensor:
    """Returns the head's first hidden states, [1, S, H], from the policy's auxiliary states."""
    if model.input_norm is not None:
        aux_1SF = model.input_norm(aux_1SF)
    elif model.fc_norm is not None:
        parts = aux_1SF.chunk(len(model.fc_norm), dim=-1)
        aux_1SF = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], dim=-1)
    return model.fc(aux_1SF)


def draft_pass(
    model: Any, tokens_1R: Tensor, hidden_1RH: Tensor, positions_1R: Tensor, mask_RC: Tensor, keys: DynamicCache
) -> Tensor:
    """Returns the hidden states after the head's layers, [1, R, H].

    Appends the rows' keys to `keys`. `mask_RC` says which keys of all passes so far a row attends to.
    """
    states = torch.cat([model.embed_tokens(tokens_1R), hidden_1RH], dim=-1)
    rotary = model.rotary_emb(states, positions_1R)
    for layer in model.layers:
        states = layer(
            states,
            attention_mask=mask_RC[None, None],
            position_ids=positions_1R,
            past_key_values=keys,
            position_embeddings=rotary,
        )
    return states


def training_loss(model: Any, batch: Batch, num_positions: int, loss: RowLoss) -> Tensor:
    """Returns the loss of `speculators`' training forward, a scalar, with less work.

    `speculators` passes every row through every draft position and computes logits, loss and arg-max of each. Here, later
    passes have only the rows with a target to come, and logits are computed only at targets.
    """
    is_target_S = batch["loss_mask"][0].bool()
    num_rows = len(is_target_S)
    # A draft that crosses into the next piece has no target there, because `pack` leaves a piece's first rows out.
    ahead_KS = torch.stack([F.pad(is_target_S, (0, k))[k:] for k in range(num_positions)])
    rows_R = ahead_KS.any(0).nonzero()[:, 0]
    hidden_1RH = projected(model, batch["hidden_states"])
    if len(rows_R) == 0:  # the batch holds prompts only
        return 0.0 * hidden_1RH.sum()
    with torch.no_grad(), torch.autocast(hidden_1RH.device.type, enabled=False):
        final_SH = batch["verifier_last_hidden_states"][0]
        targets_SD = torch.softmax(model.verifier_lm_head(final_SH).float(), dim=-1)
    documents_S, positions_1S = batch["document_ids"][0], batch["position_ids"]
    mask_RC = (documents_S[:, None] == documents_S).tril()
    own_RR = torch.eye(len(rows_R), dtype=torch.bool, device=mask_RC.device)
    keys, total = DynamicCache(), torch.zeros((), device=hidden_1RH.device)
    ahead_R = torch.arange(num_rows, device=mask_RC.device)
    for k in range(num_positions):
        tokens_1R = batch["input_ids"][:, ahead_R.clamp(max=num_rows - 1)]
        places_1R = positions_1S + k if k == 0 else positions_1S[:, rows_R] + k
        hidden_1RH = draft_pass(model, tokens_1R, hidden_1RH, places_1R, mask_RC, keys)
        if k == 0:
            hidden_1RH, mask_RC = hidden_1RH[:, rows_R], mask_RC[rows_R]
        normed_RH = model.norm(hidden_1RH)[0]
        target_R = (rows_R + k).clamp(max=num_rows - 1)
        counts_R = is_target_S[target_R] & (rows_R + k < num_rows)
        losses = loss(model.lm_head(normed_RH[counts_R]).float(), targets_SD[target_R[counts_R]])
        total = total + losses.mean() if len(losses) else total
        hidden_1RH = normed_RH[None] if model.config.norm_output else hidden_1RH
        mask_RC = torch.cat([mask_RC, own_RR], dim=1)
        ahead_R = rows_R + k + 1
    return total


def row_loss(weights: Mapping[str, tuple[Any, float]]) -> RowLoss:
    """Returns a loss config of `speculators` as a `RowLoss`.

    The KL divergence and the total variation have their gradients in closed form, which reads the vocabulary a few times
    instead of about twenty times.
    """
    if weights.keys() <= {"kl_div", "tv"}:
        kl, tv = (weights.get(name, (None, 0.0))[1] for name in ("kl_div", "tv"))
        return lambda logits_RD, target_RD: _KlTv.apply(logits_RD, target_RD, kl, tv)

    def by_speculators(logits_RD: Tensor, target_RD: Tensor) -> Tensor:
        target_logits_RD = target_RD.clamp_min(torch.finfo(torch.float32).tiny).log()
        terms = [weight * function(logits_RD[None], target_logits_RD[None])[0] for function, weight in weights.values()]
        return torch.stack(terms).sum(0)

    return by_speculators


class _KlTv(torch.autograd.Function):
    """Loss kl * KL(p || q) + tv * TV(p, q) of each row, from logits of q and probabilities p."""

    @staticmethod
    def forward(ctx: Any, logits_RD: Tensor, target_RD: Tensor, kl: float, tv: float) -> Tensor:
        log_q_RD = torch.log_softmax(logits_RD, dim=-1)
        q_RD = log_q_RD.exp()
        loss_R = logits_RD.new_zeros(len(logits_RD))
        gradient_RD = torch.zeros_like(q_RD)
        if kl:
            loss_R += kl * (torch.special.xlogy(target_RD, target_RD) - target_RD * log_q_RD).sum(-1)
            gradient_RD += kl * (q_RD - target_RD)
        if tv:
            loss_R += tv * (1.0 - torch.minimum(q_RD, target_RD).sum(-1))
            # d TV / d logit_v = -q_v ([q_v < p_v] - sum of q where q < p)
            below_RD = torch.where(q_RD < target_RD, q_RD, 0.0)
            gradient_RD += tv * (q_RD * below_RD.sum(-1, keepdim=True) - below_RD)
        ctx.save_for_backward(gradient_RD)
        return loss_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_RD,) = ctx.saved_tensors
        return gradient_RD * grads[0][:, None], None, None, None
