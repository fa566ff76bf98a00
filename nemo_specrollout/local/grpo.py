# SPDX-License-Identifier: Apache-2.0
"""GRPO's arithmetic, with NeMo-RL's semantics and names: advantages within a group, and the clipped policy loss.

Pure functions of tensors. Shapes: B sequences, T positions. A log-prob at position t belongs to token t given its
prefix. The mask is true where token t was generated. Positions outside the mask never influence anything.

Source of the semantics: NeMo-RL, `GRPOAdvantageEstimator`, `calculate_kl` and `ClippedPGLossFn`.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nemo_specrollout.config.run_sections import LossConfig

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True)
class LossInputs:
    """Constants of a training step, row by row."""

    mask_BT: Tensor
    advantages_B: Tensor
    prev_logprobs_BT: Tensor | None
    """By the trainer before the step. None: use the log-probs of the training pass (`force_on_policy_ratio`)."""
    generation_logprobs_BT: Tensor
    """By the engine while it generated."""
    reference_logprobs_BT: Tensor | None = None

    def rows(self, rows_b: Tensor, num_positions: int) -> "LossInputs":
        """Returns the given rows, cut to the first `num_positions` positions: a micro batch."""

        def pick(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[rows_b] if value.dim() == 1 else value[rows_b, :num_positions]

        return LossInputs(**{field.name: pick(getattr(self, field.name)) for field in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Normalizer:
    """Divisors of the loss: counts of the global batch, so that the losses of micro batches add up."""

    num_valid_tokens: float
    num_valid_sequences: float

    @classmethod
    def of(cls, mask_BT: Tensor) -> "Normalizer":
        """Returns the counts of a whole batch, in which every sequence is valid."""
        return cls(float(mask_BT.sum()), float(mask_BT.shape[0]))


@dataclass(frozen=True)
class LossMetrics:
    """Diagnostics of a (micro) batch. Each is divided by the counts of the global batch, so micro batches add up."""

    loss: float
    kl_penalty: float
    """Mean KL to the reference policy, before its weight."""
    probs_ratio: float
    """Mean of p(now) / p(before the step); 1 on the first step after a rollout."""
    probs_ratio_clamped: float
    clip_fraction: float
    """Share of valid tokens whose ratio lies outside the clip range."""
    approx_kl: float
    """k3 estimate of KL(policy before the step || policy now)."""
    approx_entropy: float
    """Entropy estimate, importance-weighted from the engine's samples, in nats a token."""
    gen_kl_error: float
    """Estimate, of the configured type, of KL(engine || trainer before the step); 0 when the two agree."""
    token_mult_prob_error: float
    """Mean of exp(|log p(engine) - log p(trainer)|); 1 when they agree."""
    sampling_importance_ratio: float
    """Mean of p(trainer before the step) / p(engine)."""

    @classmethod
    def zero(cls) -> "LossMetrics":
        """Returns the neutral element of `+`."""
        return cls(*(0.0 for _ in fields(cls)))

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        return LossMetrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def group_normalized_advantages(rewards_B: Tensor, group_B: Tensor, leave_one_out: bool, normalize: bool) -> Tensor:
    """Returns reward minus the group's mean, over the group's standard deviation, float32 [B].

    With `leave_one_out`, both statistics of a sample are taken over the *other* samples of its group. The variance is
    Bessel-corrected. If it is zero or undefined (groups of one, or of two with leave-one-out), the advantage is not
    divided. A group of one has advantage 0.
    """
    rewards_B = rewards_B.float()
    advantages_B = torch.zeros_like(rewards_B)
    for group in group_B.unique():
        members = (group_B == group).nonzero().squeeze(1)
        if len(members) > 1:
            advantages_B[members] = _group_advantages(rewards_B[members], leave_one_out, normalize)
    return advantages_B


def _group_advantages(rewards_G: Tensor, leave_one_out: bool, normalize: bool) -> Tensor:
    """Returns the advantages of one group's G >= 2 samples."""
    weights_GG = torch.ones(len(rewards_G), len(rewards_G)) - (torch.eye(len(rewards_G)) if leave_one_out else 0)
    count = torch.tensor(float(len(rewards_G) - leave_one_out))
    mean_G = weights_GG @ rewards_G / count
    advantages_G = rewards_G - mean_G
    if not normalize:
        return advantages_G
    variance_G = (weights_GG @ rewards_G.square() / count - mean_G.square()) * (count / (count - 1))
    std_G = variance_G.sqrt().nan_to_num(0)
    return torch.where(std_G > 0, advantages_G / (std_G + STD_EPSILON), advantages_G)


def kl_estimate(logprobs: Tensor, reference: Tensor, kl_type: str) -> Tensor:
    """Returns the estimate of KL(policy || reference) for each token sampled from the policy, without clamps."""
    return _kl_of_log_ratio(reference - logprobs, kl_type)


def _kl_of_log_ratio(log_ratio: Tensor, kl_type: str) -> Tensor:
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - 1 - log_ratio


def reference_kl(logprobs_BT: Tensor, reference_BT: Tensor, cfg: LossConfig) -> Tensor:
    """Returns the clamped KL estimate [B, T], whose gradient estimates the gradient of the *expected* KL.

    The samples come from the policy being trained. So each estimate carries a weight with value 1 and the score function
    as its gradient (arXiv 2506.09477). A clamped token contributes no gradient.
    """
    log_ratio_BT = reference_BT - logprobs_BT
    weight_BT = (logprobs_BT - logprobs_BT.detach()).exp()
    if (limit := cfg.kl_input_clamp_value) is not None:
        clamped_BT = log_ratio_BT.clamp(-limit, limit)
        weight_BT = torch.where(log_ratio_BT == clamped_BT, weight_BT, weight_BT.detach())
        log_ratio_BT = clamped_BT
    kl_BT = weight_BT * _kl_of_log_ratio(log_ratio_BT, cfg.reference_policy_kl_type)
    limit = cfg.kl_output_clamp_value
    return kl_BT if limit is None else kl_BT.clamp(-limit, limit)


def clipped_policy_loss(
    logprobs_BT: Tensor, inputs: LossInputs, cfg: LossConfig, normalizer: Normalizer | None = None
) -> tuple[Tensor, LossMetrics]:
    """Returns PPO's clipped loss with GRPO's advantage for each sequence, plus the reference KL, and diagnostics.

    Args:
        logprobs_BT: By the current weights; the only tensor that carries a gradient.
        normalizer: Counts of the global batch; None if this is the global batch.

    Raises:
        ValueError: There is a KL penalty, but no reference log-probs.
    """
    normalizer = normalizer or Normalizer.of(inputs.mask_BT)
    masked = _Masked.of(logprobs_BT, inputs)
    ratio_BT, clamped_BT = _ratios(masked, cfg)
    clip_loss_BT = _clip_loss(inputs.advantages_B.unsqueeze(1), ratio_BT, clamped_BT, cfg.ratio_clip_c)
    if cfg.use_importance_sampling_correction:
        clip_loss_BT = clip_loss_BT * (masked.prev - masked.generation).exp().nan_to_num(0, posinf=0)
    loss, kl = _reduce(clip_loss_BT, inputs.mask_BT, cfg, normalizer), torch.zeros(())
    if cfg.reference_policy_kl_penalty:
        kl = _reduce(reference_kl(masked.now, masked.required_reference(), cfg), inputs.mask_BT, cfg, normalizer)
        loss = loss + cfg.reference_policy_kl_penalty * kl
    return loss, _metrics(loss, kl, masked, cfg, normalizer)


@dataclass(frozen=True)
class _Masked:
    """Log-probs, zero outside the mask, so that nothing there can reach a result or a gradient."""

    mask: Tensor
    now: Tensor
    prev: Tensor
    generation: Tensor
    reference: Tensor | None

    @classmethod
    def of(cls, logprobs_BT: Tensor, inputs: LossInputs) -> "_Masked":
        keep = inputs.mask_BT.bool()
        prev_BT = inputs.prev_logprobs_BT
        given = (
            logprobs_BT,
            logprobs_BT.detach() if prev_BT is None else prev_BT,
            inputs.generation_logprobs_BT,
            inputs.reference_logprobs_BT,
        )
        return cls(keep, *(None if x is None else x.where(keep, 0.0) for x in given))  # type: ignore[arg-type]

    def required_reference(self) -> Tensor:
        if self.reference is None:
            raise ValueError("reference_policy_kl_penalty is not 0: give reference_logprobs_BT, or set it to 0")
        return self.reference


def _ratios(masked: _Masked, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """Returns p(now) / p(before the step) of each token, and the same clipped."""
    ratio_BT = (masked.now - masked.prev).exp()
    return ratio_BT, ratio_BT.clamp(1.0 - cfg.ratio_clip_min, 1.0 + cfg.ratio_clip_max)


def _clip_loss(advantages_B1: Tensor, ratio_BT: Tensor, clamped_BT: Tensor, ratio_clip_c: float | None) -> Tensor:
    loss_BT = torch.maximum(-advantages_B1 * ratio_BT, -advantages_B1 * clamped_BT)
    if ratio_clip_c is None:
        return loss_BT
    return torch.where(advantages_B1 < 0, torch.minimum(loss_BT, -advantages_B1 * ratio_clip_c), loss_BT)


def _reduce(values_BT: Tensor, mask_BT: Tensor, cfg: LossConfig, normalizer: Normalizer) -> Tensor:
    mask_BT = mask_BT.to(values_BT.dtype)
    if cfg.token_level_loss:
        return (values_BT * mask_BT).sum() / max(normalizer.num_valid_tokens, 1.0)
    mean_B = (values_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)
    return mean_B.sum() / max(normalizer.num_valid_sequences, 1.0)


@torch.no_grad()
def _metrics(loss: Tensor, kl: Tensor, masked: _Masked, cfg: LossConfig, normalizer: Normalizer) -> LossMetrics:
    def mean(values_BT: Tensor) -> float:
        return float((values_BT * masked.mask).sum()) / max(normalizer.num_valid_tokens, 1.0)

    ratio_BT, clamped_BT = _ratios(masked, cfg)
    off_engine_BT = masked.prev - masked.generation
    return LossMetrics(
        loss=float(loss),
        kl_penalty=float(kl),
        probs_ratio=mean(ratio_BT),
        probs_ratio_clamped=mean(clamped_BT),
        clip_fraction=mean((ratio_BT != clamped_BT).float()),
        approx_kl=mean(kl_estimate(masked.prev, masked.now, "k3")),
        approx_entropy=-mean((masked.now - masked.generation).exp() * masked.now),
        gen_kl_error=mean(kl_estimate(masked.generation, masked.prev, cfg.reference_policy_kl_type)),
        token_mult_prob_error=mean(off_engine_BT.abs().exp()),
        sampling_importance_ratio=mean(off_engine_BT.exp()),
    )
