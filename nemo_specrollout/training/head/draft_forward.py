# SPDX-License-Identifier: Apache-2.0
"""Forward passes of an EAGLE-3 head: the first on the policy's states, each further one on the head's own states.

All later passes attend to the keys of the first pass. Only the row that made a key of a later pass attends to it.

Shapes: S rows of a packed batch, R rows that draft, C columns that they attend to. D draft vocabulary, H hidden size,
F = auxiliary layers * H.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from nemo_specrollout.training.head.packing import PackedBatch

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Returns the loss of each row, [R], from the head's logits and the policy's probabilities, both [R, D]."""


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


def training_loss(model: Any, batch: PackedBatch, num_positions: int, step_decay: float, loss: RowLoss) -> Tensor:
    """Returns the loss of `speculators`' training forward, a scalar, with less work.

    `speculators` passes every row through every draft position and computes logits, loss and arg-max of each. Here, later
    passes have only the rows with a target to come, and logits are computed only at targets.
    """
    is_target_S = batch.loss_mask_1S[0].bool()
    num_rows = len(is_target_S)
    # A draft that crosses into the next piece has no target there, because `pack` leaves a piece's first rows out.
    rows_R = _is_target_ahead(is_target_S, num_positions).nonzero()[:, 0]
    hidden_1RH = projected(model, batch.hidden_states_1SF)
    if len(rows_R) == 0:  # the batch holds prompts only
        return 0.0 * hidden_1RH.sum()
    with torch.no_grad(), torch.autocast(hidden_1RH.device.type, enabled=False):
        targets_SD = torch.softmax(model.verifier_lm_head(batch.final_1SH[0]).float(), dim=-1)
    documents_S, positions_1S = batch.document_ids_1S[0], batch.position_ids_1S
    mask_RC = (documents_S[:, None] == documents_S).tril()
    own_RR = torch.eye(len(rows_R), dtype=torch.bool, device=mask_RC.device)
    keys, total = DynamicCache(), torch.zeros((), device=hidden_1RH.device)
    ahead_R = torch.arange(num_rows, device=mask_RC.device)
    for k in range(num_positions):
        tokens_1R = batch.input_ids_1S[:, ahead_R.clamp(max=num_rows - 1)]
        places_1R = positions_1S + k if k == 0 else positions_1S[:, rows_R] + k
        hidden_1RH = draft_pass(model, tokens_1R, hidden_1RH, places_1R, mask_RC, keys)
        if k == 0:
            hidden_1RH, mask_RC = hidden_1RH[:, rows_R], mask_RC[rows_R]
        normed_RH = model.norm(hidden_1RH)[0]
        target_R = (rows_R + k).clamp(max=num_rows - 1)
        counts_R = is_target_S[target_R] & (rows_R + k < num_rows)
        losses = loss(model.lm_head(normed_RH[counts_R]).float(), targets_SD[target_R[counts_R]])
        total = total + step_decay**k * losses.mean() if len(losses) else total
        hidden_1RH = normed_RH[None] if model.config.norm_output else hidden_1RH
        mask_RC = torch.cat([mask_RC, own_RR], dim=1)
        ahead_R = rows_R + k + 1
    return total


def _is_target_ahead(is_target_S: Tensor, num_positions: int) -> Tensor:
    """Returns whether the row or one of the `num_positions` - 1 rows after it is a target, bool [S]."""
    found_S = is_target_S.clone()
    for k in range(1, min(num_positions, len(is_target_S))):
        found_S[:-k] |= is_target_S[k:]
    return found_S


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
