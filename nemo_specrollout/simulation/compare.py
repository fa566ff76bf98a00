# SPDX-License-Identifier: Apache-2.0
"""Comparisons of variants of a scenario: features added one by one, or a run as configured, each against plain."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.simulation.engine_setup import APART, AUTO, FIXED, PLAIN, Fleet
from nemo_specrollout.simulation.rl import StepResult, simulate_step
from nemo_specrollout.simulation.scenario import Scenario
from nemo_specrollout.simulation.setting import Setting, Variant

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
