# SPDX-License-Identifier: Apache-2.0
"""Asynchronous GRPO on one machine: workers generate for steps to come while the policy is trained, as NeMo-RL does it."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.config.run_config import RunConfig
from nemo_specrollout.local.fleet import RolloutFleet
from nemo_specrollout.local.progress import Progress
from nemo_specrollout.local.run_directory import RunDirectory
from nemo_specrollout.local.runner import GrpoRunner
from nemo_specrollout.local.statistics import stock_stats
from nemo_specrollout.local.step_rollout import StepRollout
from nemo_specrollout.local.trajectories import Trajectories, TrajectoryCollector
from nemo_specrollout.racing.responses import Response

if TYPE_CHECKING:
    from nemo_specrollout.training.features.features import SequenceFeatures


class AsyncGrpoRunner(GrpoRunner):
    """`GrpoRunner`, whose rollouts come from a collector. Owns that.

    Invariant: the policy of version s is the one after s optimizer updates, as in a synchronous run; step s trains on samples
    that were begun by a policy of version s - max_trajectory_age_steps or newer, and on nothing twice.
    """

    def begin(self) -> None:
        """From now on the workers are the collector's."""
        assert isinstance(self.engine, RolloutFleet)
        self.fleet = self.engine
        self.fleet.begin_counting()
        steps = range(self.directory.next_step, self.config.grpo.max_num_steps)
        self.collector = TrajectoryCollector(
            self.fleet.coordinator,
            self.config.grpo.async_grpo,
            self.prompts,
            self._step_rollout,
            steps,
            self.fleet.task,
        )
        self._idle_s = 0.0
        self.engine = FleetBetweenRounds(self.fleet, self.collector)  # type: ignore[assignment]

    def roll_out(self, step: int) -> StepRollout:
        """The trajectories for a step; waits for those that are not there yet."""
        started = time.perf_counter()
        with self.progress.rollout(step, self.config.grpo.samples_per_step) as on_finished:
            rollout = self.collector.take(step, on_finished)
        waited_s = time.perf_counter() - started
        return replace(rollout, figures={**rollout.figures, "exposed_generation_s": waited_s})

    def refit(self, version: int) -> None:
        """New weights for the workers, amid requests or between them."""
        self.collector.update_weights(self.policy.hf_tensors(), version, before=self._count)

    def measured(self, rollout: StepRollout) -> StepRollout:
        """With what engines did since the last weights, whichever steps it was for."""
        return replace(rollout, stats=replace(self._worked, tail=rollout.stats.tail))

    def close(self) -> None:
        """Ends collector and workers."""
        if self.refresher is not None:
            self.refresher.close()
        self.collector.close()
        self.fleet.close()
        self.keep_ladder(self.fleet)

    def _step_rollout(self, found: Trajectories) -> StepRollout:
        """In the collector's thread."""
        rollouts = [r.rollout for r in found.responses]
        timeline = replace(found.timeline, saved_s=None)  # paces beside a trainer are not those of a rollout alone
        stats = replace(stock_stats(rollouts, found.seconds, 0), tail=timeline.figures())
        sample_stats: list[dict[str, Any] | None] = [
            {**(sample or {}), "policy_spans": _spans(response)}
            for sample, response in zip(
                self.fleet.take_sample_stats(found.prompts.requests, found.timeline), found.responses, strict=True
            )
        ]
        num_older = [_num_older(r, found.target) for r in found.responses]
        figures, wire = self._figures(found), timeline.record()
        return StepRollout(found.prompts, rollouts, stats, 0, 0, 0.0, sample_stats, figures, num_older, wire)

    def _count(self) -> None:
        """In the collector's thread."""
        self._worked = self.fleet.worked()
        self.fleet.begin_counting()

    def _figures(self, found: Trajectories) -> dict[str, Any]:
        ages = [found.target - version for r in found.responses for version, _ in r.policy_spans]
        idle_s = self.collector.idle_s
        before, self._idle_s = self._idle_s, idle_s
        return {
            "trajectory_age": {"begun": found.age, "mean": sum(ages) / len(ages), "max": max(ages)},
            "num_updated_amid": sum(len(r.policy_spans) > 1 for r in found.responses),
            "rollout_wall_s": found.seconds,
            "collector_idle_s": idle_s - before,
        }


class FleetBetweenRounds:
    """What the trainer may ask of the workers, answered by the thread that they belong to."""

    def __init__(self, fleet: RolloutFleet, collector: TrajectoryCollector) -> None:
        self._fleet, self._collector = fleet, collector

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        """See `RolloutFleet`, here as below."""
        self._collector.call(lambda: self._fleet.load_head(folder, expected_length, num_positions))

    def take_features(self) -> list["SequenceFeatures"]:
        return self._collector.call(self._fleet.take_features)

    def capture_seconds(self) -> float:
        return self._collector.call(self._fleet.capture_seconds)

    def take_alarms(self) -> list[dict[str, Any]]:
        return self._collector.call(self._fleet.take_alarms)

    def take_deaths(self) -> list[str]:
        return self._collector.call(self._fleet.take_deaths)


def _spans(response: Response) -> list[tuple[int, int]]:
    """As sample_stats have them: positions count from the beginning of the prompt."""
    return [(version, len(response.request.prompt_token_ids) + first) for version, first in response.policy_spans]


def _num_older(response: Response, version: int) -> int:
    """Tokens before the first that the policy of `version` made."""
    return next((first for v, first in response.policy_spans if v == version), len(response.tokens))


def build_runner(config: RunConfig, directory: RunDirectory, progress: Progress) -> GrpoRunner:
    """The runner that `grpo.async_grpo` asks for."""
    return (AsyncGrpoRunner if config.grpo.async_grpo.enabled else GrpoRunner)(config, directory, progress)
