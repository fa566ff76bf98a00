# SPDX-License-Identifier: Apache-2.0
"""Records of a GRPO step: its line of `metrics.jsonl`, its samples, and its alarms."""

from dataclasses import dataclass
from typing import Any

import torch

from nemo_specrollout.local.grpo import LossInputs
from nemo_specrollout.local.megatron_model import TokenBatch
from nemo_specrollout.local.step_rollout import StepRollout


@dataclass(frozen=True)
class Scored:
    """A rollout as the trainer sees it: B samples in request order, T positions."""

    batch: TokenBatch
    rewards_B: torch.Tensor
    inputs: LossInputs
    """`prev_logprobs_BT` is None before training if the training pass computes it."""
    logprob_s: float
    """Seconds of computing `prev_logprobs_BT`."""

    @property
    def gap_BT(self) -> torch.Tensor:
        """|log p(engine) - log p(trainer)| of each token, [B, T], in nats; known after training."""
        assert self.inputs.prev_logprobs_BT is not None
        return (self.inputs.generation_logprobs_BT - self.inputs.prev_logprobs_BT).abs()


def generation_logprobs(rollout: StepRollout, batch: TokenBatch) -> torch.Tensor:
    """Returns the engine's log-probs at the positions of the batch, [B, T]; 0 outside the responses."""
    result_BT = torch.zeros(batch.tokens_BT.shape)
    for row, (request, response) in enumerate(zip(rollout.prompts.requests, rollout.rollouts, strict=True)):
        start = len(request.prompt_token_ids)
        result_BT[row, start : start + len(response.token_ids)] = torch.tensor(response.logprobs)
    return result_BT


def sample_lines(rollout: StepRollout, scored: Scored) -> list[dict[str, Any]]:
    """Returns the samples of a line of `samples.jsonl`; docs/reference/metrics.md names every key."""
    rows = zip(rollout.prompts.requests, rollout.rollouts, scored.rewards_B.tolist(), rollout.sample_stats, strict=True)
    return [
        {
            "prompt": request.prompt_index,
            "sample": request.sample_index,
            "reward": reward,
            "tokens": len(response.token_ids),
            "finish": response.finish_reason,
            **(stats or {}),
        }
        for request, response, reward, stats in rows
    ]


def step_record(
    step: int, rollout: StepRollout, scored: Scored, trained: dict[str, float], train_s: float, refit_s: float
) -> dict[str, Any]:
    """Returns a line of `metrics.jsonl`; docs/reference/metrics.md names every key."""
    stats, gap = rollout.stats, scored.gap_BT[scored.batch.response_mask_BT]
    lengths = sorted(len(r.token_ids) for r in rollout.rollouts)
    return {
        "step": step,
        "reward": float(scored.rewards_B.mean()),
        "num_samples": len(lengths),
        "response_length": {
            "mean": sum(lengths) / len(lengths),
            "median": lengths[len(lengths) // 2],
            "max": lengths[-1],
        },
        **stats.metrics(),
        "logprob_s": scored.logprob_s,
        "train_s": train_s,
        "refit_s": refit_s,
        "verify_s": rollout.verify_s,
        "logprob_gap": {"mean": float(gap.mean()), "max": float(gap.max())},
        **rollout.figures,
        **_gap_on_policy(rollout, scored),
        "tokens_checked": rollout.tokens_checked,
        "tokens_equal": rollout.tokens_equal,
        **trained,
    }


def _gap_on_policy(rollout: StepRollout, scored: Scored) -> dict[str, float | None]:
    """Returns the mean gap over the tokens of the step's own policy, None without any; nothing in a synchronous step."""
    if rollout.num_older_B is None:
        return {}
    gaps = []
    for row, (request, num_older) in enumerate(zip(rollout.prompts.requests, rollout.num_older_B, strict=True)):
        start = len(request.prompt_token_ids)
        gaps.append(scored.gap_BT[row, start + num_older : start + len(rollout.rollouts[row].token_ids)])
    own = torch.cat(gaps)
    return {"logprob_gap_on_policy": float(own.mean()) if len(own) else None}


def alarms(record: dict[str, Any], logprob_gap_bound: float) -> list[str]:
    """Returns sentences about what must not happen in a sound run."""
    found = []
    gap = record.get("logprob_gap_on_policy", record["logprob_gap"]["mean"])
    if gap is not None and not gap <= logprob_gap_bound:  # NaN is an alarm, too
        found.append(
            f"log-prob gap {gap:.4f} is above {logprob_gap_bound}: engine and trainer do not hold the same policy"
        )
    if record["tokens_equal"] != record["tokens_checked"]:
        found.append(f"{record['tokens_checked'] - record['tokens_equal']} tokens differ from plain decoding")
    return found
