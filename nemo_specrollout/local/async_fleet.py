# SPDX-License-Identifier: Apache-2.0
"""The `RolloutSource` of asynchronous GRPO: a fleet that generates for coming steps while the policy is trained."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_specrollout.config.run_config import RunConfig
from nemo_specrollout.local.fleet import RolloutFleet
from nemo_specrollout.local.rollout_source import Prompts, RolloutSource
from nemo_specrollout.local.statistics import stock_stats
from nemo_specrollout.local.step_rollout import StepRollout
from nemo_specrollout.local.trajectories import Trajectories, TrajectoryCollector
from nemo_specrollout.racing.attempts import Response
from nemo_specrollout.scheduling.racing.draft_ladder import LadderFile

if TYPE_CHECKING:
    from nemo_specrollout.training.features.features import SequenceFeatures


class AsyncFleet(RolloutSource):
    """Owns the fleet and, from `begin` on, the collector, whose thread alone may then use the fleet.

    Invariant: step s trains on samples that were begun by a policy of version s - max_trajectory_age_steps or newer, and no
    sample is used twice.
    """

    def __init__(self, config: RunConfig, prompts: Prompts, known: LadderFile | None = None) -> None:
        """Starts the engines, as `RolloutFleet` does."""
        self.fleet = RolloutFleet(config, prompts, known)
        self._config, self._prompts = config.grpo.async_grpo, prompts
        self._collector: TrajectoryCollector[StepRollout] | None = None
        self._idle_s = 0.0

    # Rollouts

    def begin(self, steps: range) -> None:
        self.fleet.begin_counting()
        self._collector = TrajectoryCollector(
            self.fleet.coordinator, self._config, self._prompts, self._step_rollout, steps, self.fleet.task
        )

    def roll_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        """Returns the trajectories for a step; waits for those that are missing."""
        assert self._collector is not None
        started = time.perf_counter()
        rollout = self._collector.take(step, on_finished)
        waited_s = time.perf_counter() - started
        return replace(rollout, figures={**rollout.figures, "exposed_generation_s": waited_s})

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replaces the weights of all engines, while requests are under way or between them."""
        if self._collector is None:
            self.fleet.load_weights(tensors, policy_version)
        else:
            self._collector.update_weights(tensors, policy_version, before=self._count)

    def complete(self, rollout: StepRollout) -> StepRollout:
        """Returns the rollout with what the engines did between the last two weights, whichever steps it was for."""
        return replace(rollout, stats=replace(self._worked, tail=rollout.stats.tail))

    def close(self) -> None:
        """Ends the collector and the engines."""
        if self._collector is not None:
            self._collector.close()
        self.fleet.close()

    # See `RolloutSource`

    def facts(self) -> dict[str, str | bool]:
        return self._call(self.fleet.facts)

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        self._call(lambda: self.fleet.load_head(folder, expected_length, num_positions))

    def take_features(self) -> "list[SequenceFeatures]":
        return self._call(self.fleet.take_features)

    def capture_seconds(self) -> float:
        return self._call(self.fleet.capture_seconds)

    def take_alarms(self) -> list[dict[str, Any]]:
        return self._call(self.fleet.take_alarms)

    def take_deaths(self) -> list[str]:
        return self._call(self.fleet.take_deaths)

    def ladder_file(self) -> LadderFile | None:
        return self.fleet.ladder_file()

    def _call(self, work: Callable[[], Any]) -> Any:
        """Does work in the thread that the fleet belongs to."""
        return work() if self._collector is None else self._collector.call(work)

    # In the collector's thread

    def _step_rollout(self, found: Trajectories) -> StepRollout:
        rollouts = [r.rollout for r in found.responses]
        timeline = replace(found.timeline, saved_s=None)  # beside a trainer, decode speeds are not comparable
        sample_stats = self.fleet.take_sample_stats(found.prompts.requests, found.timeline)
        return StepRollout(
            found.prompts,
            rollouts,
            replace(stock_stats(rollouts, found.seconds, 0), tail=timeline.figures()),
            [
                {**(stats or {}), "policy_spans": _policy_spans(response)}
                for stats, response in zip(sample_stats, found.responses, strict=True)
            ],
            figures=self._figures(found),
            num_older_B=[_num_older(r, found.target) for r in found.responses],
            timeline=timeline.record(),
        )

    def _count(self) -> None:
        self._worked = self.fleet.worked()
        self.fleet.begin_counting()

    def _figures(self, found: Trajectories) -> dict[str, Any]:
        assert self._collector is not None
        ages = [found.target - version for r in found.responses for version, _ in r.policy_spans]
        before, self._idle_s = self._idle_s, self._collector.idle_s
        return {
            "trajectory_age": {"begun": found.age, "mean": sum(ages) / len(ages), "max": max(ages)},
            "num_updated_amid": sum(len(r.policy_spans) > 1 for r in found.responses),
            "rollout_wall_s": found.seconds,
            "collector_idle_s": self._idle_s - before,
        }


def _policy_spans(response: Response) -> list[tuple[int, int]]:
    """Returns version and first position of each policy, counted from the beginning of the prompt as in sample stats."""
    return [(version, len(response.request.prompt_token_ids) + first) for version, first in response.policy_spans]


def _num_older(response: Response, version: int) -> int:
    """Returns the number of tokens before the first one of the policy of `version`."""
    return next((first for v, first in response.policy_spans if v == version), len(response.tokens))
