# SPDX-License-Identifier: Apache-2.0
"""Simulated RL steps, and comparisons of variants: features added one by one, or a run as configured, against plain.

A step is synchronous, or asynchronous with a lag and separate GPUs for each side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.scheduling.racing.straggler_policy import in_shards
from nemo_specrollout.simulation.event_loop import RolloutResult
from nemo_specrollout.simulation.scenario import Scenario
from nemo_specrollout.simulation.setting import APART, AUTO, FIXED, PLAIN, Fleet, Setting, Variant


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


DECOUPLED, MOVING, RACING = "decoupled", "moving", "racing"
TAIL = "fastest_of_n"


@dataclass(frozen=True)
class Comparison:
    """Variants of a scenario, plain first."""

    scenario: Scenario
    steps: tuple[StepResult, ...]
    lengths: np.ndarray
    """Response lengths of all simulated steps, int64."""

    @property
    def plain(self) -> StepResult:
        return self.steps[0]

    @property
    def best(self) -> StepResult:
        """The variant with the shortest step. Ties are broken by the shortest rollout."""
        return min(self.steps, key=lambda step: (round(step.step_s, 3), step.rollout_s))

    def speedup(self, step: StepResult) -> float:
        """Returns the speedup of the whole step over plain."""
        return self.plain.step_s / step.step_s

    def rollout_speedup(self, step: StepResult) -> float:
        """Returns the speedup of the rollout over plain."""
        return self.plain.rollout_s / step.rollout_s

    def peak_share(self, step: StepResult) -> float | None:
        """Returns the share of peak arithmetic spent on response tokens; None without a data sheet."""
        policy, rollout = Fleet(self.scenario).policy, step.rollout
        if policy is None:
            return None
        gpus_s = self.scenario.cluster.generating_gpus * rollout.seconds
        return policy.ideal_s(rollout.num_tokens) * policy.parallel.num_gpus / gpus_s


def compare(scenario: Scenario, traced: Sequence[np.ndarray] = ()) -> Comparison:
    """Simulates plain, fixed and `auto` drafting, separate drafters, and moving and racing with the better of these."""
    fleet = Fleet(scenario)

    def simulated(name: str, kind: str, tail: FastestOfNConfig | None = None) -> StepResult:
        return simulate_step(Setting(fleet, Variant(name, kind, tail), tuple(traced)))

    steps = [simulated(kind, kind) for kind in (PLAIN, FIXED, AUTO)]
    kind = AUTO
    if fleet.placement is not None:
        steps.append(simulated(DECOUPLED, APART))
        kind = APART if steps[-1].step_s < steps[-2].step_s else AUTO
    if fleet.num_engines(kind) > 1:
        steps.append(simulated(MOVING, kind, FastestOfNConfig(max_racers=1)))
        if len(scenario.drafting.methods) > 1:
            steps.append(simulated(RACING, kind, FastestOfNConfig()))
    return Comparison(scenario, tuple(steps), steps[0].rollout.length_R)


def as_configured(scenario: Scenario, block: SpecrolloutConfig) -> Comparison:
    """Simulates plain, drafting as configured, and the configured `fastest_of_n` if there are several engines."""
    fleet = Fleet(scenario)
    kind, tail = drafting_kind(fleet, block), block.fastest_of_n
    is_split = bool(scenario.drafting.methods_of_workers)
    variants = [Variant(PLAIN, PLAIN)] + ([Variant(kind, kind, is_split=is_split)] if kind != PLAIN else [])
    if tail is not None and tail.enabled and fleet.num_engines(kind) > 1:
        variants.append(Variant(TAIL, kind, tail, is_split))
    steps = tuple(simulate_step(Setting(fleet, variant)) for variant in variants)
    return Comparison(scenario, steps, steps[0].rollout.length_R)


def drafting_kind(fleet: Fleet, block: SpecrolloutConfig) -> str:
    """Returns the kind of drafting of a block, as in `Fleet.speculation`."""
    if not block.enabled or not block.drafters:
        return PLAIN
    if block.remote is not None and fleet.placement is not None:
        return APART
    return FIXED if block.budget.policy == "fixed" else AUTO


@dataclass(frozen=True)
class Onset:
    """Moment of the first move or race."""

    at_s: float
    finished_share: float
    """Share of requests that have ended by then."""


def onset(step: StepResult) -> Onset | None:
    """Returns the moment of a step's first move or race; None if there is none."""
    if not step.rollout.changes:
        return None
    at_s = step.rollout.changes[0].at_s
    return Onset(at_s, float(np.mean(step.rollout.end_R <= at_s)))


@dataclass(frozen=True)
class Drafted:
    """Drafts of an engine's typical requests in a step, for one number of requests."""

    num_requests: int
    drafts: float
    tokens: float
    speedup: float
    """Speedup over plain at the same number of requests."""


def drafted(scenario: Scenario, block: SpecrolloutConfig) -> list[Drafted]:
    """Returns the drafts of the first method with 1, 4, 16, ... requests in an engine, up to its share of a step."""
    fleet = Fleet(scenario)
    kind = drafting_kind(fleet, block)
    share = -(-scenario.batch.num_requests // fleet.num_engines(kind))
    most = min(share, fleet.num_slots)
    sizes = sorted({4**i for i in range(12) if 4**i < most} | {most})
    return [_drafted(fleet, kind, size) for size in sizes] if kind != PLAIN else []


def _drafted(fleet: Fleet, kind: str, size: int) -> Drafted:
    scenario = fleet.scenario
    context = scenario.batch.prompt_tokens + scenario.lengths.median / 2
    p_B = np.full(size, fleet.terms_M[0].centre)
    speculation, plain = fleet.speculation(kind, 0), fleet.speculation(PLAIN, 0)
    step = speculation.decode_step(p_B, context)
    speedup = speculation.tokens_per_s(p_B, context) / plain.tokens_per_s(p_B, context)
    return Drafted(size, step.num_rows / size - 1.0, float(step.tokens_B.mean()), speedup)
