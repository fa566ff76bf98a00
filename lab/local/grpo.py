# SPDX-License-Identifier: Apache-2.0
"""Advantages and the clipped policy loss of GRPO, with the semantics and the names of NeMo-RL.

All functions are pure. Shapes: B sequences, T positions, G samples of a group. A log-prob at position t is that of token t
given the tokens before it. The mask is true where token t was generated. Positions outside the mask have no influence.

Source of the semantics: NeMo-RL, `GRPOAdvantageEstimator`, `calculate_kl` and `ClippedPGLossFn`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lab.local.run_sections import LossConfig

STD_EPSILON = 1e-6
"""Constant that is added to a standard deviation before dividing by it."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of the loss that stay constant during a training step. Each tensor has one row for each sequence."""

    mask_BT: Tensor
    advantages_B: Tensor
    prev_logprobs_BT: Tensor | None
    """Log-probs that the trainer computed before the step, or None if the training pass computes them
    (`force_on_policy_ratio`)."""
    generation_logprobs_BT: Tensor
    """Log-probs that the engine returned with the tokens."""
    reference_logprobs_BT: Tensor | None = None

    def rows(self, rows_b: Tensor, num_positions: int | None = None) -> "LossInputs":
        """Returns the given rows, cut to the first `num_positions` positions if that is not None."""

        def pick(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[rows_b] if value.dim() == 1 else value[rows_b, :num_positions]

        return self._each(pick)

    def to(self, device: torch.device) -> "LossInputs":
        """Returns a copy whose tensors are on `device`."""
        return self._each(lambda value: None if value is None else value.to(device))

    def _each(self, change: Callable[[Tensor | None], Tensor | None]) -> "LossInputs":
        return LossInputs(**{field.name: change(getattr(self, field.name)) for field in fields(self)})  # type: ignore[arg-type]


def group_normalized_advantages(rewards_B: Tensor, group_B: Tensor, leave_one_out: bool, normalize: bool) -> Tensor:
    """Returns each reward minus the mean of its group, divided by the group's standard deviation, float32 [B].

    With `leave_one_out`, a sample's mean and deviation are those of the *other* samples of its group. The variance is
    Bessel-corrected. Nothing is divided without `normalize`, or where the variance is zero or undefined. It is undefined in
    groups of one, and with `leave_one_out` in groups of two. A group of one has advantage 0.
    """
    rewards_B = rewards_B.float()
    advantages_B = torch.zeros_like(rewards_B)
    for group in group_B.unique():
        members = (group_B == group).nonzero().squeeze(1)
        if len(members) > 1:
            advantages_B[members] = _group_advantages(rewards_B[members], leave_one_out, normalize)
    return advantages_B


def _group_advantages(rewards_G: Tensor, leave_one_out: bool, normalize: bool) -> Tensor:
    weights_GG = torch.ones(len(rewards_G), len(rewards_G)) - (torch.eye(len(rewards_G)) if leave_one_out else 0)
    count = torch.tensor(float(len(rewards_G) - leave_one_out))
    mean_G = weights_GG @ rewards_G / count
    advantages_G = rewards_G - mean_G
    if not normalize:
        return advantages_G
    variance_G = (weights_GG @ rewards_G.square() / count - mean_G.square()) * (count / (count - 1))
    std_G = variance_G.sqrt().nan_to_num(0)
    return torch.where(std_G > 0, advantages_G / (std_G + STD_EPSILON), advantages_G)


def kl_estimate(log_ratio: Tensor, kl_type: str) -> Tensor:
    """Returns an estimate of KL(p || q) for each token that was sampled from p. `log_ratio` is log(q / p).

    Nothing is clamped.
    """
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - 1 - log_ratio


def reference_kl(logprobs_BT: Tensor, reference_BT: Tensor, cfg: LossConfig) -> Tensor:
    """Returns the clamped KL estimate of each token [B, T]. Its gradient is an estimate of the gradient of the *expected* KL.

    The expectation is over samples of the policy that is trained, so it also changes with the policy. Therefore each estimate
    is multiplied by a weight whose value is 1 and whose gradient is the score function (arXiv 2506.09477). A clamped token
    contributes no gradient.
    """
    log_ratio_BT = reference_BT - logprobs_BT
    weight_BT = (logprobs_BT - logprobs_BT.detach()).exp()
    if (limit := cfg.kl_input_clamp_value) is not None:
        clamped_BT = log_ratio_BT.clamp(-limit, limit)
        weight_BT = torch.where(log_ratio_BT == clamped_BT, weight_BT, weight_BT.detach())
        log_ratio_BT = clamped_BT
    kl_BT = weight_BT * kl_estimate(log_ratio_BT, cfg.reference_policy_kl_type)
    limit = cfg.kl_output_clamp_value
    return kl_BT if limit is None else kl_BT.clamp(-limit, limit)


def clipped_policy_loss(
    logprobs_BT: Tensor, inputs: LossInputs, cfg: LossConfig, global_mask_BT: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Returns PPO's clipped loss with GRPO's advantages plus the KL penalty, and a dict of metrics.

    Loss and metrics of a micro batch are divided by the counts of the global batch. So their sums over all micro batches are
    the loss and the metrics of the global batch.

    Args:
        logprobs_BT: Log-probs under the current weights. Only this tensor carries a gradient.
        global_mask_BT: Mask of the global batch, or None if `inputs` are the whole global batch.

    Raises:
        ValueError: There is a KL penalty, but no reference log-probs.
    """
    mask_BT = inputs.mask_BT
    whole_BT = mask_BT if global_mask_BT is None else global_mask_BT
    num_tokens = max(float(whole_BT.sum()), 1.0)
    now_BT = logprobs_BT.where(mask_BT, 0.0)
    generation_BT = inputs.generation_logprobs_BT.where(mask_BT, 0.0)
    prev_BT = now_BT.detach() if inputs.prev_logprobs_BT is None else inputs.prev_logprobs_BT.where(mask_BT, 0.0)

    def mean(values_BT: Tensor) -> Tensor:
        if cfg.token_level_loss:
            return (values_BT * mask_BT).sum() / num_tokens
        return ((values_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)).sum() / len(whole_BT)

    ratio_BT, clamped_BT = _ratios(now_BT, prev_BT, cfg)
    loss_BT = _clip_loss(inputs.advantages_B.unsqueeze(1), ratio_BT, clamped_BT, cfg.ratio_clip_c)
    if cfg.use_importance_sampling_correction:
        loss_BT = loss_BT * (prev_BT - generation_BT).exp().nan_to_num(0, posinf=0)
    loss = mean(loss_BT)
    kl = loss.new_zeros(())
    if cfg.reference_policy_kl_penalty:
        if inputs.reference_logprobs_BT is None:
            raise ValueError("reference_policy_kl_penalty is not 0: give reference_logprobs_BT, or set it to 0")
        kl = mean(reference_kl(now_BT, inputs.reference_logprobs_BT.where(mask_BT, 0.0), cfg))
        loss = loss + cfg.reference_policy_kl_penalty * kl
    by_token = _metrics_by_token(now_BT, prev_BT, generation_BT, cfg)
    metrics = {name: float((values_BT * mask_BT).sum()) / num_tokens for name, values_BT in by_token.items()}
    return loss, {"loss": float(loss.detach()), "kl_penalty": float(kl.detach()), **metrics}


def _ratios(now_BT: Tensor, prev_BT: Tensor, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """Returns each token's probability now divided by its probability before the step, and this ratio after clipping."""
    ratio_BT = (now_BT - prev_BT).exp()
    return ratio_BT, ratio_BT.clamp(1.0 - cfg.ratio_clip_min, 1.0 + cfg.ratio_clip_max)


def _clip_loss(advantages_B1: Tensor, ratio_BT: Tensor, clamped_BT: Tensor, ratio_clip_c: float | None) -> Tensor:
    loss_BT = torch.maximum(-advantages_B1 * ratio_BT, -advantages_B1 * clamped_BT)
    if ratio_clip_c is None:
        return loss_BT
    return torch.where(advantages_B1 < 0, torch.minimum(loss_BT, -advantages_B1 * ratio_clip_c), loss_BT)


@torch.no_grad()
def _metrics_by_token(now_BT: Tensor, prev_BT: Tensor, generation_BT: Tensor, cfg: LossConfig) -> dict[str, Tensor]:
    """Returns the value of each metric for each token, [B, T]. docs/reference/metrics.md says what the metrics mean."""
    ratio_BT, clamped_BT = _ratios(now_BT, prev_BT, cfg)
    off_engine_BT = prev_BT - generation_BT
    return {
        "probs_ratio": ratio_BT,
        "probs_ratio_clamped": clamped_BT,
        "clip_fraction": ratio_BT != clamped_BT,
        "approx_kl": kl_estimate(now_BT - prev_BT, "k3"),
        "approx_entropy": -(now_BT - generation_BT).exp() * now_BT,
        "gen_kl_error": kl_estimate(off_engine_BT, cfg.reference_policy_kl_type),
        "token_mult_prob_error": off_engine_BT.abs().exp(),
        "sampling_importance_ratio": off_engine_BT.exp(),
    }
