# SPDX-License-Identifier: Apache-2.0
"""GRPO on one machine: vLLM rolls out, Megatron-Core trains, weights go back by name, every step leaves a record."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_specrollout.config.run_config import RunConfig
from nemo_specrollout.generation.engine import RolloutEngine
from nemo_specrollout.local.fleet import RolloutFleet
from nemo_specrollout.local.grpo import group_normalized_advantages
from nemo_specrollout.local.megatron_model import TokenBatch
from nemo_specrollout.local.policy import MegatronPolicy
from nemo_specrollout.local.progress import Progress
from nemo_specrollout.local.run_directory import RunDirectory
from nemo_specrollout.local.step_rollout import StepPrompts, StepRollout, load_tokenizer, roll_out, step_prompts
from nemo_specrollout.local.tasks import build_task

if TYPE_CHECKING:
    from nemo_specrollout.local.head_refresh_step import LocalRefresher


@dataclass(frozen=True)
class Scored:
    """A rollout as the trainer sees it: rows in request order, [B] and [B, T]."""

    batch: TokenBatch
    rewards_B: torch.Tensor
    advantages_B: torch.Tensor
    generation_logprobs_BT: torch.Tensor
    prev_logprobs_BT: torch.Tensor | None
    """None before training, where the training pass itself computes them (`force_on_policy_ratio`)."""
    reference_logprobs_BT: torch.Tensor | None
    logprob_s: float

    @property
    def gap_BT(self) -> torch.Tensor:
        """|log p(engine) - log p(trainer)| of each token, [B, T], in nats; after training."""
        assert self.prev_logprobs_BT is not None
        return (self.generation_logprobs_BT - self.prev_logprobs_BT).abs()


class GrpoRunner:
    """Runs GRPO from a config in a run directory; owns the engine, the policy and the directory.

    Invariant: before step s the engine holds the policy's weights after s optimizer updates, so that a run resumed at s
    generates the very samples that it would have generated uninterrupted.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, progress: Progress) -> None:
        self.config = config
        self.directory = directory
        self.progress = progress
        self.model = Path(config.policy.model_name)
        self.tokenizer = load_tokenizer(self.model)
        self.task = build_task(config.data, self.tokenizer)
        self.refresher: LocalRefresher | None = None
        with progress.phase("starting vLLM (the first start after an install compiles kernels, some 15 s)"):
            self.engine = self._start_engine()
        try:
            self._start()
        except BaseException:
            self.engine.close()
            raise
        self.begin()
        self.refresher = self._build_refresher()

    def _start(self) -> None:
        """Builds the policy, and brings it and the engine to where the run goes on."""
        self.directory.engine_facts = self.engine.facts()
        self.progress.engine_started(self.directory.engine_facts)
        with self.progress.phase("building the Megatron-Core policy"):
            self.policy, self.reference = self._load_policy(), self._load_reference()
        if self.directory.checkpoint is not None:
            self.policy.load(self.directory.checkpoint)
            self._load_weights(self.directory.next_step)

    def begin(self) -> None:
        """Engine and policy are there, and hold the same weights."""

    def run(self, before_step: Callable[[], None] = lambda: None) -> None:
        """All steps that are left; what `before_step` raises ends the run between two of them."""
        for step in range(self.directory.next_step, self.config.grpo.max_num_steps):
            before_step()
            record = self.step(step)
            self.progress.step_done(record)

    def step(self, step: int) -> dict[str, Any]:
        """One GRPO step; returns its line of metrics."""
        started = time.perf_counter()
        rollout = self.roll_out(step)
        if self.refresher is not None:
            self.refresher.policy_moves(step, self.policy.hf_tensors())
        with self.progress.phase(f"step {step}: log-probs"):
            scored = self.score(rollout)
        with self.progress.phase(f"step {step}: training"):
            (trained, scored), train_s = timed(lambda: self.train(scored))
        _, refit_s = timed(lambda: self.refit(step + 1))
        rollout = self.measured(rollout)
        record = step_record(step, rollout, scored, trained, train_s, refit_s)
        record["alarms"] = alarms(record, self.config.policy.generation.specrollout.logprob_gap_alarm)
        record["alarms"] += [alarm["sentence"] for alarm in self.engine.take_alarms()]
        deaths = self.engine.take_deaths()
        record["deaths"], record["alarms"] = len(deaths), record["alarms"] + deaths
        if self.refresher is not None:
            with self.progress.phase(f"step {step}: draft head"):
                elapsed_s = time.perf_counter() - started
                record["draft_refresh"] = self.refresher.after_step(step, rollout.stats, elapsed_s)
        self._keep(step, record, rollout, scored)
        return record

    def prompts(self, step: int) -> StepPrompts:
        """Those of a step."""
        return step_prompts(self.config, step, self.task)

    def roll_out(self, step: int) -> StepRollout:
        """The responses that a step trains on."""
        prompts = self.prompts(step)
        with self.progress.rollout(step, len(prompts.requests)) as on_finished:
            return roll_out(self.engine, prompts, self.config, on_finished)

    def refit(self, version: int) -> None:
        """The engine generates by the policy of `version` from now on."""
        self._load_weights(version)

    def measured(self, rollout: StepRollout) -> StepRollout:
        """With what engines did; a rollout that began and ended in the step has it already."""
        return rollout

    def score(self, rollout: StepRollout) -> Scored:
        """Rewards by rule, advantages within each group, log-probs by the trainer's weights."""
        requests, responses = rollout.prompts.requests, [r.token_ids for r in rollout.rollouts]
        pad_id = self.tokenizer.pad_token_id
        batch = TokenBatch.from_sequences([list(r.prompt_token_ids) for r in requests], responses, pad_id)
        rewards = [self.task.reward(p, r) for p, r in zip(rollout.prompts.problems, responses, strict=True)]
        rewards_B = torch.tensor(rewards)
        group_B = torch.tensor([r.prompt_index for r in requests])
        grpo = self.config.grpo
        advantages_B = group_normalized_advantages(
            rewards_B, group_B, grpo.use_leave_one_out_baseline, grpo.normalize_rewards
        )
        on_policy = self.config.loss_fn.force_on_policy_ratio
        prev_BT, logprob_s = (None, 0.0) if on_policy else timed(lambda: self._logprobs(self.policy, batch))
        reference_BT = None if self.reference is None else self._logprobs(self.reference, batch)
        return Scored(
            batch, rewards_B, advantages_B, generation_logprobs(rollout, batch), prev_BT, reference_BT, logprob_s
        )

    def train(self, scored: Scored) -> tuple[dict[str, float], Scored]:
        """Takes optimizer steps over the samples, `train_global_batch_size` at a time.

        Returns:
            Means of the steps' metrics, and the samples with log-probs by the weights before the steps.
        """
        policy = self.config.policy
        size = policy.train_global_batch_size
        results: list[dict[str, float]] = []
        prev_BT = scored.prev_logprobs_BT
        for first in range(0, len(scored.rewards_B), size):
            rows = torch.arange(first, min(first + size, len(scored.rewards_B)))
            reference = scored.reference_logprobs_BT
            figures, logprobs_BT = self.policy.train_step(
                scored.batch.select(rows),
                scored.advantages_B[rows],
                scored.generation_logprobs_BT[rows],
                None if prev_BT is None else prev_BT[rows],
                self.config.loss_fn,
                temperature=self._temperature,
                reference_logprobs_BT=None if reference is None else reference[rows],
                micro_batch_tokens=policy.train_micro_batch_size * policy.max_total_sequence_length,
            )
            results.append(figures)
        means = {key: sum(r[key] for r in results) / len(results) for key in results[0]}
        if prev_BT is None:  # There was one optimizer step, whose log-probs are by the weights before it.
            scored = replace(scored, prev_logprobs_BT=logprobs_BT)
        return means, scored

    def close(self) -> None:
        """Stops the engine."""
        if self.refresher is not None:
            self.refresher.close()
        self.engine.close()
        if isinstance(self.engine, RolloutFleet):
            self.keep_ladder(self.engine)

    def keep_ladder(self, fleet: RolloutFleet) -> None:
        """Writes what is known of draft methods by now, for runs to start from."""
        ladder = fleet.ladder_file()
        if ladder is not None and self.directory.path.is_dir():
            try:
                self.directory.write_ladder(ladder)
            except OSError as error:
                self.progress.warn(f"what is known of draft methods could not be written: {error.strerror}")

    def _start_engine(self) -> "RolloutEngine | RolloutFleet":
        if self.config.cluster.rollout_workers > 1 or self.config.grpo.async_grpo.enabled:
            return RolloutFleet(self.config, self.directory.ladder)
        return RolloutEngine(self.model, self.config.policy.generation, self.config.grpo.seed)

    def _load_weights(self, version: int) -> None:
        if isinstance(self.engine, RolloutFleet):
            self.engine.load_weights(self.policy.hf_tensors(), version)
        else:
            self.engine.load_weights(self.policy.hf_tensors())

    def _build_refresher(self) -> "LocalRefresher | None":
        if self.config.policy.generation.specrollout.draft_refresh is None:
            return None
        from nemo_specrollout.local.head_refresh_step import LocalRefresher

        with self.progress.phase("loading the draft head"):
            return LocalRefresher(self.config, self.engine, self.directory.path)

    @property
    def _temperature(self) -> float:
        """NeMo-RL trains on log-probs at the sampling temperature; greedy rollouts are scored at 1."""
        return self.config.policy.generation.temperature or 1.0

    def _logprobs(self, policy: MegatronPolicy, batch: TokenBatch) -> torch.Tensor:
        config = self.config.policy
        tokens = config.logprob_batch_size * config.max_total_sequence_length
        return policy.logprobs(batch, self._temperature, micro_batch_tokens=tokens)

    def _load_policy(self) -> MegatronPolicy:
        policy = self.config.policy
        dtype = torch.bfloat16 if policy.precision == "bfloat16" else torch.float32
        return MegatronPolicy.from_pretrained(self.model, optimizer=policy.megatron_cfg.optimizer, dtype=dtype)

    def _load_reference(self) -> MegatronPolicy | None:
        return self._load_policy() if self.config.loss_fn.reference_policy_kl_penalty > 0 else None

    def _keep(self, step: int, record: dict[str, Any], rollout: StepRollout, scored: Scored) -> None:
        """Records first, then the checkpoint that makes them count."""
        self.directory.append("metrics.jsonl", record)
        self.directory.append("samples.jsonl", {"step": step, "samples": sample_lines(rollout, scored)})
        self.directory.append("trace.jsonl", {"step": step, **rollout.stats.trace})
        if rollout.timeline is not None:
            self.directory.append("timeline.jsonl", {"step": step, **rollout.timeline})
        checkpointing = self.config.checkpointing
        is_last = step + 1 == self.config.grpo.max_num_steps
        if checkpointing.enabled and ((step + 1) % checkpointing.save_period == 0 or is_last):
            self.directory.keep_checkpoint(step, self.policy.save)


def timed(work: Any) -> tuple[Any, float]:
    """The result of `work()` and its seconds."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def generation_logprobs(rollout: StepRollout, batch: TokenBatch) -> torch.Tensor:
    """The engine's log-probs where the trainer has its own, [B, T]; 0 elsewhere."""
    result_BT = torch.zeros(batch.tokens_BT.shape)
    for row, (request, response) in enumerate(zip(rollout.prompts.requests, rollout.rollouts, strict=True)):
        start = len(request.prompt_token_ids)
        result_BT[row, start : start + len(response.token_ids)] = torch.tensor(response.logprobs)
    return result_BT


def sample_lines(rollout: StepRollout, scored: Scored) -> list[dict[str, Any]]:
    """What is known of each sample of a step; docs/reference/metrics.md names every key."""
    rows = zip(rollout.prompts.requests, rollout.rollouts, scored.rewards_B.tolist(), rollout.sample_stats, strict=True)
    return [
        {
            "prompt": request.prompt_index, "sample": request.sample_index, "reward": reward,
            "tokens": len(response.token_ids), "finish": response.finish_reason, **(sample or {}),
        }
        for request, response, reward, sample in rows
    ]  # fmt: skip


def step_record(
    step: int, rollout: StepRollout, scored: Scored, trained: dict[str, float], train_s: float, refit_s: float
) -> dict[str, Any]:
    """A line of `metrics.jsonl`; docs/reference/metrics.md names every key."""
    stats = rollout.stats
    lengths = sorted(len(r.token_ids) for r in rollout.rollouts)
    mask_BT = scored.batch.response_mask_BT
    gap = scored.gap_BT[mask_BT]
    acceptance = {n: {"proposed": stats.proposed[n], "accepted": stats.accepted[n]} for n in stats.proposed}
    of_head = {} if stats.head_is_dormant is None else {"head_dormant": int(stats.head_is_dormant)}
    of_tail = {} if stats.tail is None else {"tail": stats.tail}
    of_remote = {} if stats.draft_supply is None else {"draft_supply": stats.draft_supply}
    return {
        "step": step,
        "reward": float(scored.rewards_B.mean()),
        "num_samples": len(lengths),
        "response_length": {
            "mean": sum(lengths) / len(lengths), "median": lengths[len(lengths) // 2], "max": lengths[-1]
        },
        "num_tokens": stats.num_tokens,
        "rollout_s": stats.seconds,
        "plain_estimate_s": stats.plain_estimate_s,
        "rollout_speedup": stats.speedup_estimate,
        "logprob_s": scored.logprob_s,
        "train_s": train_s,
        "refit_s": refit_s,
        "verify_s": rollout.verify_s,
        "target_steps": stats.num_target_steps,
        "request_steps": stats.num_request_steps,
        "acceptance_length": stats.acceptance_length,
        "acceptance": acceptance,
        "num_draft_tokens": stats.num_draft_tokens,
        "share_of_steps_with_drafts": stats.num_steps_with_drafts / max(stats.num_target_steps, 1),
        "host_share": stats.host_s / stats.seconds if stats.seconds else 0.0,
        **of_head,
        **of_remote,
        **of_tail,
        "logprob_gap": {"mean": float(gap.mean()), "max": float(gap.max())},
        **rollout.figures,
        **_gap_on_policy(rollout, scored),
        "tokens_checked": rollout.tokens_checked,
        "tokens_equal": rollout.tokens_equal,
        **trained,
    }  # fmt: skip


def _gap_on_policy(rollout: StepRollout, scored: Scored) -> dict[str, float | None]:
    """The mean gap over the tokens that the step's own policy made, None if it made none; of a synchronous step nothing."""
    if rollout.num_older_B is None:
        return {}
    gaps, gap_BT = [], scored.gap_BT
    for row, (request, num_older) in enumerate(zip(rollout.prompts.requests, rollout.num_older_B, strict=True)):
        first, end = len(request.prompt_token_ids), len(request.prompt_token_ids) + len(rollout.rollouts[row].token_ids)
        gaps.append(gap_BT[row, first + num_older : end])
    own = torch.cat(gaps)
    return {"logprob_gap_on_policy": float(own.mean()) if len(own) else None}


def alarms(record: dict[str, Any], logprob_gap_bound: float) -> list[str]:
    """Sentences for what must not happen in a sound run."""
    found = []
    gap = record.get("logprob_gap_on_policy", record["logprob_gap"]["mean"])
    if gap is not None and not gap <= logprob_gap_bound:  # a gap of NaN is no small gap
        found.append(
            f"log-prob gap {gap:.4f} is above {logprob_gap_bound}: engine and trainer do not hold the same policy"
        )
    if record["tokens_equal"] != record["tokens_checked"]:
        found.append(f"{record['tokens_checked'] - record['tokens_equal']} tokens differ from plain decoding")
    return found
