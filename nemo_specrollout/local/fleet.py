# SPDX-License-Identifier: Apache-2.0
"""The rollout workers of a local run, which take the place of its engine: same weights, same requests, same tokens."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.config.run_config import RunConfig
from nemo_specrollout.config.versions import this_machine
from nemo_specrollout.generation.engine import Rollout, RolloutRequest
from nemo_specrollout.local.statistics import RolloutStats, draft_counts, fleet_stats, work_stats
from nemo_specrollout.racing.coordinator import Coordinator
from nemo_specrollout.racing.rollout_pool import DEAD, RolloutPool
from nemo_specrollout.racing.timeline import Outcome, Span, Timeline
from nemo_specrollout.scheduling.racing.dispatch import in_shards
from nemo_specrollout.scheduling.racing.draft_ladder import Ladder, LadderFile
from nemo_specrollout.scheduling.racing.response_lengths import LengthEstimator
from nemo_specrollout.scheduling.racing.straggler_policy import FastestOfN

if TYPE_CHECKING:
    from nemo_specrollout.training.features.features import SequenceFeatures


class RolloutFleet:
    """Owns the pool, the ladder, what is known of lengths, and the coordinators: one as configured, and one for checks, whose
    requests stay where they are dealt. Answers to what the runner asks of an engine."""

    def __init__(self, config: RunConfig, known: LadderFile | None = None) -> None:
        """Starts the workers. The ladder begins as `known`, else as the config's file has it. Raises ConfigError."""
        generation, model = config.policy.generation, Path(config.policy.model_name)
        tail = generation.specrollout.fastest_of_n or FastestOfNConfig(enabled=False)
        file = known
        if file is None and tail.ladder is not None:
            file = LadderFile.read(Path(tail.ladder), f"{BLOCK_PATH}.fastest_of_n.ladder")
        asynchronous = config.grpo.async_grpo
        recomputes = asynchronous.recompute_kv_cache_after_weight_updates or not asynchronous.in_flight_weight_updates
        self.pool = RolloutPool(
            model, generation, config.grpo.seed, config.cluster.rollout_workers, recompute_kv_cache=recomputes
        )
        self.ladder = Ladder(self.pool.method_names, file)
        self.task = config.data.dataset_name
        self._policy = config.policy.model_name
        self._acceptance = {} if file is None else {rung.method: rung.acceptance for rung in file.rungs}
        self._drafts = {method: (0, 0) for method in self.pool.method_names}
        lengths = LengthEstimator(generation.max_new_tokens)
        policy = FastestOfN(tail, self.ladder) if tail.enabled else None
        self.coordinator = Coordinator(self.pool, policy, self.ladder, lengths)
        self._plain = Coordinator(self.pool, None, Ladder(self.pool.method_names), LengthEstimator(1))
        self._timeline = Timeline(1)

    def measure(
        self, requests: Sequence[RolloutRequest], on_finished: Callable[[int], None]
    ) -> tuple[list[Rollout], RolloutStats, dict[str, Any]]:
        """The responses, what they took, and the timeline, as plain data."""
        self.begin_counting()
        started = time.perf_counter()
        rollouts, self._timeline = self.coordinator.roll_out(requests, on_finished, self.task)
        seconds = time.perf_counter() - started
        self.pool.finish_turns()
        stats = replace(self.counted(rollouts, seconds), tail=self._timeline.figures())
        return rollouts, stats, self._timeline.record()

    def begin_counting(self) -> None:
        """What engines do counts from now on."""
        self._restarts = list(self.pool.num_restarts)
        self._before = self.pool.ask_each("report", 1 << 60)

    def counted(self, rollouts: Sequence[Rollout], seconds: float) -> RolloutStats:
        """Figures of what the engines that live did since, in a rollout of `seconds`."""
        before, after = self._reports_since()
        shards = in_shards(len(rollouts), len(self.pool.methods))
        return fleet_stats(before, after, rollouts, shards, seconds, self.pool.capacity)

    def worked(self) -> RolloutStats:
        """Figures of what engines did since, where rollouts overlap: seconds are the workers' own, and so is the estimate."""
        before, after = self._reports_since()
        return work_stats(before, after, self.pool.capacity)

    def _reports_since(self) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        alive = [w for w in self._before if self.pool.is_alive(w) and self.pool.num_restarts[w] == self._restarts[w]]
        asked = {w: self.pool.ask(w, "report", self._before[w]["num_steps"]) for w in alive}
        after = {w: report for w, report in asked.items() if report is not DEAD}
        before = {w: self._before[w] for w in after}
        for w, report in after.items():
            method, counts = self.pool.method_name(w), draft_counts(before[w], report)
            self._drafts[method] = self._drafts[method][0] + counts[0], self._drafts[method][1] + counts[1]
        return before, after

    def ladder_file(self) -> LadderFile | None:
        """What is known of the draft methods by now; None where nothing was rolled out. Asks no worker."""
        shares = [
            accepted / verified if verified else self._acceptance.get(method, 0.0)
            for method, (verified, accepted) in self._drafts.items()
        ]
        return self.ladder.file(this_machine(), self._policy, shares)

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Responses, each by the worker that it is dealt to."""
        return self._plain.roll_out(requests)[0]

    def take_sample_stats(
        self, requests: Sequence[RolloutRequest], timeline: Timeline | None = None
    ) -> list[dict[str, Any] | None]:
        """What is written on each sample of a rollout, the last one if no timeline is given: the winner's sample, with the
        drafts of all who had it, who won, and who had it."""
        spans = (self._timeline if timeline is None else timeline).spans
        sample_stats = self.pool.ask_each("take_sample_stats", list(requests))
        return [
            _sample_stats(
                [s for s in spans if s.request == i], {w: s[i] for w, s in sample_stats.items() if s[i] is not None}
            )
            for i in range(len(requests))
        ]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replaces the weights of all workers, by Hugging Face names."""
        self.coordinator.load_weights(tensors, policy_version)

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        """Replaces the EAGLE-3 head of all workers that draft with it."""
        self.pool.ask_each("load_head", folder, expected_length, num_positions, drafting_by="eagle3")

    def take_features(self) -> list["SequenceFeatures"]:
        """What was captured, since last asked, for the training of a head."""
        return [f for features in self.pool.ask_each("take_features", drafting_by="eagle3").values() for f in features]

    def capture_seconds(self) -> float:
        """What capturing features has taken of the engines' time; they work side by side, so of the one that it took most."""
        return max(self.pool.ask_each("capture_seconds", drafting_by="eagle3").values(), default=0.0)

    def facts(self) -> dict[str, str | bool]:
        """What is in force in the engines: vLLM's version, model runner, scheduling, CUDA graph mode."""
        return next((facts for facts in self.pool.ask_each("facts").values() if facts), {})

    def take_alarms(self) -> list[dict[str, Any]]:
        """What the canaries raised since last asked."""
        return [a for alarms in self.pool.ask_each("take_alarms").values() for a in alarms]

    def take_deaths(self) -> list[str]:
        """A sentence for each death of a worker, or of a drafter process of one, since last asked."""
        return self.pool.take_deaths()

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()


def _sample_stats(spans: Sequence[Span], of: dict[int, dict[str, Any]]) -> dict[str, Any]:
    winner = next(s.engine for s in spans if s.outcome == Outcome.WON)
    counts = {key: sum(s[key] for s in of.values()) for key in ("num_drafted", "num_accepted") if of}
    workers = list(dict.fromkeys(s.engine for s in sorted(spans, key=lambda s: s.start_s)))
    return {**of.get(winner, {}), **counts, "won_by": winner, "workers": workers}
