# SPDX-License-Identifier: Apache-2.0
"""Simulated RL step around a rollout: synchronous, or asynchronous with a lag and separate GPUs for each side."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.scheduling.racing.dispatch import in_shards
from nemo_specrollout.simulation.event_loop import RolloutResult
from nemo_specrollout.simulation.setting import Setting


@dataclass(frozen=True)
class StepResult:
    """Result of an RL step, in steady state if steps overlap."""

    variant: str
    parts_s: dict[str, float]
    """Seconds of a step by part. In asynchronous training, generation counts only as far as training waits for it."""
    rollout_s: float
    """Seconds from the start of a batch until its last request ended."""
    idle_share: float
    """Idle share of all GPUs over a step."""
    rollout: RolloutResult

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts_s.values())

    @property
    def exposed_s(self) -> float:
        """Seconds of generation for which training waits."""
        return self.parts_s["generate"]


def simulate_step(setting: Setting) -> StepResult:
    """Simulates a step of the setting."""
    if setting.fleet.scenario.training.mode == "sync":
        return _synchronous(setting)
    run = _AsynchronousRun(setting)
    run.train_all()
    return run.result()


def _synchronous(setting: Setting) -> StepResult:
    requests = setting.requests(1)
    num_requests = len(requests.length_R)
    rollout = setting.rollout(requests)
    rollout.start(np.arange(num_requests), in_shards(num_requests, len(rollout.engines)))
    rollout.run()
    result = rollout.result()
    parts_s = _with_generation(setting.parts_s(requests.num_tokens, num_requests), result.seconds)
    idle_share = result.idle_share * result.seconds / sum(parts_s.values())
    return StepResult(setting.variant.name, parts_s, result.seconds, idle_share, result)


def _with_generation(parts_s: Mapping[str, float], generate_s: float) -> dict[str, float]:
    """Returns all parts in the order of a step."""
    return {"data": parts_s["data"], "prepare": parts_s["prepare"], "generate": generate_s, **parts_s}


class _AsynchronousRun:
    """Asynchronous run: batch j may start once the weights are at most `lag` versions old for it, i.e. version j - lag.

    Owns when each batch began, was complete, and was trained.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        training = setting.fleet.scenario.training
        self.num_steps = num = training.num_steps
        self.requests = setting.requests(num)
        self.rollout = setting.rollout(self.requests)
        self.size = len(self.requests.length_R) // num
        buffer = training.buffer_batches or training.lag + 1
        self.ahead = min(training.lag, buffer - 1)
        self.left = np.full(num, self.size)
        self.began_s, self.complete_s, self.waited_s, self.trained_s = (np.zeros(num) for _ in range(4))
        self.parts_s = [self._parts_s(batch) for batch in range(num)]

    def train_all(self) -> None:
        """Trains batch after batch. After each, starts the next batch within the lag."""
        for batch in range(1 + self.ahead):
            self._begin(batch)
        free_s = 0.0
        for batch in range(self.num_steps):
            self._generate(batch)
            begin_s = max(free_s, float(self.complete_s[batch]))
            self.waited_s[batch] = begin_s - free_s
            free_s = self.trained_s[batch] = begin_s + sum(self.parts_s[batch].values())
            self.rollout.run(free_s, on_end=self._ended)
            self._begin(batch + 1 + self.ahead)

    def result(self) -> StepResult:
        """Returns the means over the counted steps."""
        first, last = self._counted()
        counted = slice(first, last)
        parts_s = {name: float(np.mean([p[name] for p in self.parts_s[counted]])) for name in self.parts_s[0]}
        waited_s = float(self.waited_s[counted].mean())
        rollout_s = float((self.complete_s - self.began_s)[counted].mean())
        result = self.rollout.result()
        begin_s, end_s = float(self.trained_s[first - 1]), float(self.trained_s[last - 1])
        idle_training = waited_s / (waited_s + sum(parts_s.values()))
        idle_share = self._idle_share(result.idle_share_between(begin_s, end_s), idle_training)
        return StepResult(self.setting.variant.name, _with_generation(parts_s, waited_s), rollout_s, idle_share, result)

    def _counted(self) -> tuple[int, int]:
        """Returns the range of counted steps: the later half, without the last few that have no generation beside them.

        Batches that began together end together, so steps differ in a cycle of that many batches. Whole cycles count.
        """
        cycle = self.ahead + 1
        last = self.num_steps - self.ahead
        return last - max(1, last // 2 // cycle) * cycle, last

    def _begin(self, batch: int) -> None:
        if batch < self.num_steps:
            self.began_s[batch] = self.rollout.now_s
            requests = np.arange(batch * self.size, (batch + 1) * self.size)
            self.rollout.start(requests, in_shards(self.size, len(self.rollout.engines)))

    def _generate(self, batch: int) -> None:
        """Runs until the last request of a batch has ended, which may be past already."""
        self.rollout.run(stop=lambda: self.left[batch] == 0, on_end=self._ended)

    def _ended(self, request: int, now_s: float) -> None:
        batch = request // self.size
        self.left[batch] -= 1
        if not self.left[batch]:
            self.complete_s[batch] = now_s

    def _parts_s(self, batch: int) -> dict[str, float]:
        lengths = self.requests.length_R[batch * self.size : (batch + 1) * self.size]
        return self.setting.parts_s(int(lengths.sum()), self.size)

    def _idle_share(self, idle_generating: float, idle_training: float) -> float:
        cluster = self.setting.fleet.scenario.cluster
        idle_gpus = cluster.generating_gpus * idle_generating + cluster.training_gpus * idle_training
        return idle_gpus / cluster.num_gpus
