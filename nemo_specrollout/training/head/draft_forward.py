# SPDX-License-Identifier: Apache-2.0
"""The passes of an EAGLE-3 head over texts: the first on the policy's states, each further one on the head's own.

The keys of the first pass stay for all later passes. The keys of a later pass belong to the rows that made them.

Shapes: S rows of a packed batch, R rows that draft, C columns that they attend to, D draft vocabulary, H hidden size, F =
auxiliary layers * H, K draft positions.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from nemo_specrollout.training.head.packing import PackedBatch

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Of the head's logits and the policy's probabilities, both [R, D], the loss of each row, [R]."""


def projected(model: Any, aux_1SF: Tensor) -> Tensor:
    """The policy's auxiliary states as the head's first hidden state, [1, S, H]."""
    if model.input_norm is not None:
        aux_1SF = model.input_norm(aux_1SF)
    elif model.fc_norm is not None:
        parts = aux_1SF.chunk(len(model.fc_norm), dim=-1)
        aux_1SF = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], dim=-1)
    return model.fc(aux_1SF)


def draft_pass(
    model: Any, tokens_1R: Tensor, hidden_1RH: Tensor, positions_1R: Tensor, mask_RC: Tensor, keys: DynamicCache
) -> Tensor:
    """Hidden states [1, R, H] after the head's layers; their keys are appended to `keys`, to which `mask_RC` applies."""
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
    """The loss of the training forward of `speculators`, a scalar, without the work that the loss does not see.

    `speculators` passes every row through every draft position and computes logits, loss and arg-max of each. Here later
    passes have only the rows that draft something to be learned, and logits are made where a loss is taken.
    """
    is_target_S = batch.loss_mask_1S[0].bool()
    num_rows = len(is_target_S)
    # Row r is of use if a draft that starts there has a target; `pack` keeps targets away from a piece's first rows.
    rows_R = _within(is_target_S, num_positions).nonzero()[:, 0]
    hidden_1RH = projected(model, batch.hidden_states_1SF)
    if len(rows_R) == 0:  # a batch of prompts
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


def _within(is_target_S: Tensor, num_positions: int) -> Tensor:
    """Whether one of the `num_positions` rows from each row on is a target."""
    found_S = is_target_S.clone()
    for k in range(1, min(num_positions, len(is_target_S))):
        found_S[:-k] |= is_target_S[k:]
    return found_S


def row_loss(weights: Mapping[str, tuple[Any, float]]) -> RowLoss:
    """A loss config of `speculators` as a `RowLoss`. KL divergence and total variation, which are what heads are trained
    with here, have their gradient in closed form: the vocabulary is read a few times instead of some twenty."""
    if weights.keys() <= {"kl_div", "tv"}:
        kl, tv = (weights.get(name, (None, 0.0))[1] for name in ("kl_div", "tv"))
        return lambda logits_RD, target_RD: _KlTv.apply(logits_RD, target_RD, kl, tv)

    def by_speculators(logits_RD: Tensor, target_RD: Tensor) -> Tensor:
        target_logits_RD = target_RD.clamp_min(torch.finfo(torch.float32).tiny).log()
        terms = [weight * function(logits_RD[None], target_logits_RD[None])[0] for function, weight in weights.values()]
        return torch.stack(terms).sum(0)

    return by_speculators


class _KlTv(torch.autograd.Function):
    """kl * KL(p || q) + tv * TV(p, q) of each row, for probabilities p and logits of q."""

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
