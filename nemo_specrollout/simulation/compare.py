# SPDX-License-Identifier: Apache-2.0
"""What each feature brings: the same requests, with one feature more at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.simulation.engine_setup import APART, AUTO, FIXED, PLAIN, Fleet
from nemo_specrollout.simulation.rl import StepResult, simulate_step
from nemo_specrollout.simulation.scenario import Scenario
from nemo_specrollout.simulation.setting import Setting, Variant

DECOUPLED, MOVING, RACING = "decoupled", "moving", "racing"


@dataclass(frozen=True)
class Comparison:
    """Every variant of a scenario, plain first."""

    scenario: Scenario
    steps: tuple[StepResult, ...]
    lengths: np.ndarray
    """Of the responses, int64, of all steps that were simulated."""

    @property
    def plain(self) -> StepResult:
        return self.steps[0]

    @property
    def best(self) -> StepResult:
        """The quickest step; of those alike, the one with the quickest rollout."""
        return min(self.steps, key=lambda step: (round(step.step_s, 3), step.rollout_s))

    def speedup(self, step: StepResult) -> float:
        """Of the whole step, over plain."""
        return self.plain.step_s / step.step_s

    def rollout_speedup(self, step: StepResult) -> float:
        """Of the rollout, over plain."""
        return self.plain.rollout_s / step.rollout_s

    def peak_share(self, step: StepResult) -> float | None:
        """Arithmetic of the response tokens over what the engines could do meanwhile; None without a data sheet."""
        policy, rollout = Fleet(self.scenario).policy, step.rollout
        if policy is None:
            return None
        gpus_s = self.scenario.cluster.generating_gpus * rollout.seconds
        return policy.ideal_s(rollout.num_tokens) * policy.parallel.num_gpus / gpus_s


def compare(scenario: Scenario, traced: Sequence[np.ndarray] = ()) -> Comparison:
    """Plain, a fixed number of drafts, `auto`, drafters apart, then moving and racing on top of the better of those."""
    fleet = Fleet(scenario)

    def simulated(name: str, kind: str, tail: FastestOfNConfig | None = None) -> StepResult:
        return simulate_step(Setting(fleet, Variant(name, kind, tail), tuple(traced)))

    steps = [simulated(kind, kind) for kind in (PLAIN, FIXED, AUTO)]
    kind = AUTO
    if fleet.placement is not None:
        steps.append(simulated(DECOUPLED, APART))
        kind = APART if steps[-1].step_s < steps[-2].step_s else AUTO
    if fleet.num_workers(kind) > 1:
        steps.append(simulated(MOVING, kind, FastestOfNConfig(max_racers=1)))
        if len(scenario.drafting.methods) > 1:
            steps.append(simulated(RACING, kind, FastestOfNConfig()))
    return Comparison(scenario, tuple(steps), steps[0].rollout.length_R)
