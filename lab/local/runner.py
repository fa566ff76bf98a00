# SPDX-License-Identifier: Apache-2.0
"""GRPO on one machine. Engines roll out, Megatron-Core trains, and the engines get the new weights after each step."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lab.local.device import CPU, engine_memory, run_device, sized_engines
from lab.local.grpo import LossInputs, group_normalized_advantages
from lab.local.megatron_model import TokenBatch
from lab.local.policy import MegatronPolicy
from lab.local.policy_shape import PolicyShape
from lab.local.progress import Progress
from lab.local.recorded_rows import audit_facts, policies_of_row, record_rows
from lab.local.run_config import RunConfig
from lab.local.run_directory import LADDER, RunDirectory
from lab.local.step_rollout import (
    LocalEngine,
    RolloutSource,
    StepRollout,
    load_tokenizer,
    step_prompts,
)
from lab.local.tasks import build_task
from nemo_specrollout.reports.records import BEGAN, METRICS, policy_lag
from nemo_specrollout.storage.files import write_atomically
from nemo_specrollout.storage.model_folder import read_object

if TYPE_CHECKING:
    from lab.local.head_refresh_step import LocalRefresher


@dataclass(frozen=True)
class Scored:
    """A rollout as the trainer needs it, with B samples in the order of their requests and T positions."""

    batch: TokenBatch
    rewards_B: torch.Tensor
    inputs: LossInputs
    """Inputs of the loss. Before training, `prev_logprobs_BT` is None if the training pass itself computes it."""
    logprob_s: float
    """Seconds of computing `prev_logprobs_BT`."""

    @property
    def gap_BT(self) -> torch.Tensor:
        """Absolute difference of each token's log-prob between engine and trainer, in nats, [B, T].

        Needs `prev_logprobs_BT`, which is always set after training.
        """
        assert self.inputs.prev_logprobs_BT is not None
        return (self.inputs.generation_logprobs_BT - self.inputs.prev_logprobs_BT).abs()


class GrpoRunner:
    """Runs GRPO as a config says, and writes into a run directory. Owns the rollout source, the policy and the head refresher.

    Invariant: before step s the policy has made s optimizer updates, and the engines have its weights. So a synchronous run
    that is resumed at step s generates the same samples as without the interruption.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, progress: Progress) -> None:
        """Starts the engines, and loads the policy from the checkpoint from which the run continues, if there is one.

        Raises ConfigError for what vLLM refuses.
        """
        self.device = run_device(config.cluster.gpus_per_node)
        self.config = _with_learned_folder(self._with_engine_memory(config), directory)
        self.directory = directory
        self.progress = progress
        self.model = Path(config.policy.model_name)
        self.tokenizer = load_tokenizer(self.model)
        self.task = build_task(config.data, self.tokenizer)
        # NeMo-RL trains on log-probs at the sampling temperature, and greedy rollouts are scored at temperature 1.
        self._temperature = config.policy.generation.temperature or 1.0
        self.refresher: LocalRefresher | None = None
        self._began: str | bool | None = None
        """Sentence that says what the engines have taken over from earlier starts. It is None once a step's record has it."""
        with progress.phase("starting vLLM (the first start after an install compiles kernels, some 15 s)"):
            self.source = self._start_source()
        try:
            self._start_policy()
            self.source.begin(range(directory.next_step, config.grpo.max_num_steps))
            self.refresher = self._build_refresher()
        except BaseException:
            self.source.close()
            raise

    def run(self, before_step: Callable[[], None] = lambda: None) -> None:
        """Does the remaining steps. `before_step` is called before each, and may end the run by an exception."""
        for step in range(self.directory.next_step, self.config.grpo.max_num_steps):
            before_step()
            record = self.step(step)
            self.progress.step_done(record)

    def step(self, step: int) -> dict[str, Any]:
        """Does one GRPO step, and returns its record, which is a line of `metrics.jsonl`."""
        started = time.perf_counter()
        rollout = self.roll_out(step)
        if self.refresher is not None:
            self.refresher.policy_moves(step, self.policy.hf_tensors())
        with self.progress.phase(f"step {step}: log-probs"):
            scored = self.score(rollout)
        with self.progress.phase(f"step {step}: training"):
            (trained, scored), train_s = timed(lambda: self.train(scored))
        _, refit_s = timed(lambda: self.refit(step + 1))
        rollout = self.source.complete(rollout)
        record = _step_record(step, rollout, scored, trained, train_s, refit_s)
        self.source.keep_learned()
        deaths = self.source.take_deaths()
        record["alarms"] = [
            *alarms(record, self.config.policy.generation.specrollout.logprob_gap_alarm),
            *(alarm["sentence"] for alarm in self.source.take_alarms()),
            *deaths,
        ]
        record["deaths"] = len(deaths)
        if self._began is not None:
            record[BEGAN] = [f"engines {self._began}"]
            self._began = None
        if self.refresher is not None:
            with self.progress.phase(f"step {step}: draft head"):
                refresh = self.refresher.after_step(step, rollout.stats, time.perf_counter() - started)
                record |= {"head_age": refresh.pop("head_age"), "draft_refresh": refresh}
        record["step_s"] = time.perf_counter() - started
        self._keep(step, record, rollout, scored)
        return record

    def roll_out(self, step: int) -> StepRollout:
        """Rolls out a step, and returns the responses on which the step trains."""
        with self.progress.rollout(step, self.config.grpo.samples_per_step) as on_finished:
            return self.source.roll_out(step, on_finished)

    def score(self, rollout: StepRollout) -> Scored:
        """Computes rewards with the task's rule, advantages within each group, and log-probs under the trainer's weights."""
        requests = rollout.prompts.requests
        responses = [r.token_ids for r in rollout.rollouts]
        pad_id = self.tokenizer.pad_token_id
        batch = TokenBatch.from_sequences([list(r.prompt_token_ids) for r in requests], responses, pad_id)
        rewards_B = torch.tensor(
            [self.task.reward(p, r) for p, r in zip(rollout.prompts.problems, responses, strict=True)]
        )
        group_B = torch.tensor([r.prompt_index for r in requests])
        grpo = self.config.grpo
        advantages_B = group_normalized_advantages(
            rewards_B, group_B, grpo.use_leave_one_out_baseline, grpo.normalize_rewards
        )
        on_policy = self.config.loss_fn.force_on_policy_ratio
        prev_BT, logprob_s = (None, 0.0) if on_policy else timed(lambda: self._logprobs(self.policy, batch))
        reference_BT = None if self.reference is None else self._logprobs(self.reference, batch)
        inputs = LossInputs(
            batch.response_mask_BT, advantages_B, prev_BT, _generation_logprobs(rollout, batch), reference_BT
        )
        return Scored(batch, rewards_B, inputs, logprob_s)

    def train(self, scored: Scored) -> tuple[dict[str, float], Scored]:
        """Takes optimizer steps on the samples, with `train_global_batch_size` samples each.

        Returns:
            The mean of each metric over the optimizer steps, and the samples. The samples have the log-probs under the
            weights before the first optimizer step.
        """
        policy = self.config.policy
        results: list[dict[str, float]] = []
        for rows in torch.arange(len(scored.rewards_B)).split(policy.train_global_batch_size):
            figures, logprobs_BT = self.policy.train_step(
                scored.batch.select(rows),
                scored.inputs.rows(rows),
                self.config.loss_fn,
                temperature=self._temperature,
                micro_batch_tokens=policy.train_micro_batch_size * policy.max_total_sequence_length,
            )
            results.append(figures)
        self.policy.wait()
        means = {key: sum(r[key] for r in results) / len(results) for key in results[0]}
        if scored.inputs.prev_logprobs_BT is None:  # one optimizer step computes them itself
            scored = replace(scored, inputs=replace(scored.inputs, prev_logprobs_BT=logprobs_BT))
        return means, scored

    def refit(self, version: int) -> None:
        """Gives the engines the policy's weights, whose version is `version`."""
        self.source.load_weights(self.policy.hf_tensors(), version)
        self.policy.wait()

    def close(self) -> None:
        """Ends the engines, and writes the decode speeds that they have learned to the run directory, for a resumed run."""
        if self.refresher is not None:
            self.refresher.close()
        self.source.close()
        ladder = self.source.ladder_file()
        if ladder is not None and self.directory.path.is_dir():
            try:
                write_atomically(self.directory.path / LADDER, ladder.to_json())
            except OSError as error:
                self.progress.warn(f"ladder.json could not be written: {error.strerror}")

    # Parts of the start

    def _with_engine_memory(self, config: RunConfig) -> RunConfig:
        """Returns a config whose engines leave room for the trainer on the GPU. Raises ConfigError if the GPU is too small."""
        if self.device == CPU:
            return config
        policy = config.policy
        shape = PolicyShape.from_hf(read_object(Path(policy.model_name) / "config.json"))
        memory = engine_memory(
            policy.generation, shape, *torch.cuda.mem_get_info(self.device), config.cluster.rollout_workers
        )
        kwargs = sized_engines(policy.generation.vllm_kwargs, memory)
        return replace(config, policy=replace(policy, generation=replace(policy.generation, vllm_kwargs=kwargs)))

    def _start_source(self) -> RolloutSource:
        prompts = partial(step_prompts, self.config, task=self.task)
        is_async = self.config.grpo.async_grpo.enabled
        generation = self.config.policy.generation
        runs_ahead = generation.specrollout.runs_ahead
        is_in_this_process = self.config.cluster.rollout_workers == 1 and generation.colocated.enabled and not is_async
        if is_in_this_process and not runs_ahead:
            return LocalEngine(self.config, prompts)
        from lab.local.ahead_fleet import AheadEngine, AheadFleet
        from lab.local.async_fleet import AsyncFleet
        from lab.local.fleet import RolloutFleet

        if is_in_this_process:
            return AheadEngine(self.config, prompts)
        kind = AsyncFleet if is_async else AheadFleet if runs_ahead else RolloutFleet
        return kind(self.config, prompts, self.directory.ladder)

    def _start_policy(self) -> None:
        """Builds the policy.

        If the run continues from a checkpoint, the policy and the engines get the checkpoint's weights.
        """
        facts = self.source.facts()
        self._began = facts.get("began") or None
        block = asdict(self.config.policy.generation.specrollout)
        self.directory.facts = {**facts, "block": block, "audit": audit_facts(self.config, self.directory.path)}
        self.progress.engine_started(facts)
        with self.progress.phase("building the Megatron-Core policy"):
            self.policy = self._load_policy()
            self.reference = self._load_policy() if self.config.loss_fn.reference_policy_kl_penalty > 0 else None
        if self.directory.checkpoint is not None:
            self.policy.load(self.directory.checkpoint)
            self.source.load_weights(self.policy.hf_tensors(), self.directory.next_step)

    def _load_policy(self) -> MegatronPolicy:
        policy = self.config.policy
        dtype = torch.bfloat16 if policy.precision == "bfloat16" else torch.float32
        optimizer = policy.megatron_cfg.optimizer
        return MegatronPolicy.from_pretrained(self.model, optimizer=optimizer, dtype=dtype, device=self.device)

    def _build_refresher(self) -> "LocalRefresher | None":
        if self.config.policy.generation.specrollout.draft_refresh is None:
            return None
        from lab.local.head_refresh_step import LocalRefresher

        with self.progress.phase("loading the draft head"):
            return LocalRefresher(self.config, self.source, self.directory.path)

    # Parts of a step

    def _logprobs(self, policy: MegatronPolicy, batch: TokenBatch) -> torch.Tensor:
        config = self.config.policy
        tokens = config.logprob_batch_size * config.max_total_sequence_length
        return policy.logprobs(batch, self._temperature, micro_batch_tokens=tokens)

    def _keep(self, step: int, record: dict[str, Any], rollout: StepRollout, scored: Scored) -> None:
        """Writes the records of a step, and then its checkpoint. A resumed run drops records of steps without a checkpoint."""
        block = self.config.policy.generation.specrollout
        self.directory.append(METRICS, record)
        self.directory.append("samples.jsonl", {"step": step, "samples": _sample_lines(rollout, scored, self.config)})
        if block.records_rows:
            record_rows(self.directory.path, step, rollout, self.config)
        self.directory.append("trace.jsonl", {"step": step, **rollout.stats.trace})
        if rollout.timeline is not None:
            self.directory.append("timeline.jsonl", {"step": step, **rollout.timeline})
        checkpointing = self.config.checkpointing
        is_last = step + 1 == self.config.grpo.max_num_steps
        if checkpointing.enabled and ((step + 1) % checkpointing.save_period == 0 or is_last):
            # With this config the checkpoint serves as the policy's weights for an audit of the next step.
            hf_config = (self.model / "config.json").read_bytes() if block.records_rows else b""
            self.directory.keep_checkpoint(step, partial(self.policy.save, hf_config=hf_config))


def _with_learned_folder(config: RunConfig, directory: RunDirectory) -> RunConfig:
    """Returns a config whose engines keep what they learn in the run's folder, unless the block names another folder."""
    generation = config.policy.generation
    block = generation.specrollout
    block = replace(block, learned=directory.with_learned(block.learned))
    return replace(config, policy=replace(config.policy, generation=replace(generation, specrollout=block)))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of `work()` and the seconds that it took."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started


# Records


def _generation_logprobs(rollout: StepRollout, batch: TokenBatch) -> torch.Tensor:
    """Returns the log-probs that the engine returned, placed at the tokens' positions in the batch, [B, T]. Others are 0."""
    result_BT = torch.zeros(batch.tokens_BT.shape)
    for row, (request, response) in enumerate(zip(rollout.prompts.requests, rollout.rollouts, strict=True)):
        start = len(request.prompt_token_ids)
        result_BT[row, start : start + len(response.token_ids)] = torch.tensor(response.logprobs)
    return result_BT


def _sample_lines(rollout: StepRollout, scored: Scored, config: RunConfig) -> list[dict[str, Any]]:
    """Returns the records of a step's samples for `samples.jsonl`. docs/reference/metrics.md explains every key."""
    rows = zip(rollout.prompts.requests, rollout.rollouts, scored.rewards_B.tolist(), rollout.sample_stats, strict=True)
    return [
        {
            "seed": request.noise_seed(config.grpo.seed),
            "prompt": request.prompt_index,
            "sample": request.sample_index,
            "reward": reward,
            "tokens": len(response.token_ids),
            "finish": response.finish_reason,
            **(stats or {}),
            **policies_of_row(request, stats, config),
        }
        for request, response, reward, stats in rows
    ]


def _step_record(
    step: int, rollout: StepRollout, scored: Scored, trained: dict[str, float], train_s: float, refit_s: float
) -> dict[str, Any]:
    """Returns the record of a step for `metrics.jsonl`. docs/reference/metrics.md explains every key."""
    stats = rollout.stats
    gap = scored.gap_BT[scored.batch.response_mask_BT]
    lengths = [len(r.token_ids) for r in rollout.rollouts]
    return {
        "step": step,
        "reward": float(scored.rewards_B.mean()),
        "num_samples": len(lengths),
        "mean_gen_tokens_per_sample": sum(lengths) / len(lengths),
        "max_gen_tokens_per_sample": max(lengths),
        **stats.metrics(),
        "generation_s": stats.seconds,
        "logprob_s": scored.logprob_s,
        "train_s": train_s,
        "refit_s": refit_s,
        "verify_s": rollout.verify_s,
        "logprob_gap": float(gap.mean()),
        "logprob_gap_max": float(gap.max()),
        **policy_lag(rollout.sample_stats, step),
        **rollout.figures,
        **_gap_on_policy(rollout, scored),
        "tokens_checked": rollout.tokens_checked,
        "tokens_equal": rollout.tokens_equal,
        **trained,
    }


def _gap_on_policy(rollout: StepRollout, scored: Scored) -> dict[str, float | None]:
    """Returns the metric `logprob_gap_on_policy` of an asynchronous step, and {} for a synchronous step.

    It is the mean log-prob gap over the tokens that the step's own policy version sampled, or None if there are none.
    """
    if rollout.num_older_B is None:
        return {}
    gaps = []
    for row, (request, num_older) in enumerate(zip(rollout.prompts.requests, rollout.num_older_B, strict=True)):
        start = len(request.prompt_token_ids)
        gaps.append(scored.gap_BT[row, start + num_older : start + len(rollout.rollouts[row].token_ids)])
    own = torch.cat(gaps)
    return {"logprob_gap_on_policy": float(own.mean()) if len(own) else None}


def alarms(record: dict[str, Any], logprob_gap_bound: float) -> list[str]:
    """Returns a sentence for each finding in a step's record that must not occur in a sound run."""
    found = []
    gap = record.get("logprob_gap_on_policy", record["logprob_gap"])
    if gap is not None and not gap <= logprob_gap_bound:  # NaN is an alarm too
        found.append(
            f"log-prob gap {gap:.4f} is above {logprob_gap_bound}: engine and trainer do not hold the same policy"
        )
    if record["tokens_equal"] != record["tokens_checked"]:
        found.append(f"{record['tokens_checked'] - record['tokens_equal']} tokens differ from plain decoding")
    return found
