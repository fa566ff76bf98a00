# SPDX-License-Identifier: Apache-2.0
"""Policies that draw the number of drafts, the depth of a model and pauses at random: tokens must not depend on them.

Shapes: B requests, K draft positions.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.scheduling.speculation.budget import BudgetDecision, BudgetPolicy, DraftingPause
from nemo_specrollout.scheduling.speculation.draft_plan import DraftPlan, DraftPlanner, PlanObservation
from nemo_specrollout.scheduling.speculation.step_time import StepCosts

RANDOM = BudgetConfig("random")
"""Stands for these policies in the block of a `RolloutEngine`. No config can name it."""


class RandomBudget(BudgetPolicy):
    """Verifies a random number of draft tokens."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def allocate(self, survival_BK: np.ndarray, caps_B: np.ndarray, costs: StepCosts | None) -> BudgetDecision:
        available_B = np.minimum(np.count_nonzero(survival_BK, axis=1), caps_B)
        return BudgetDecision(self._rng.integers(0, available_B + 1))


class RandomPause(DraftingPause):
    """Begins and ends pauses at random."""

    def __init__(self) -> None:
        self._rng, self._is_paused = np.random.default_rng(1), False

    def count_step(self, num_requests: int) -> bool:
        self._is_paused ^= bool(self._rng.random() < 1 / 4)
        return self._is_paused


class RandomPlanner(DraftPlanner):
    """Drafts a random depth, and stops following at random: new requests, or the running ones."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)

    def observe_step(self, plan: DraftPlan, num_requests: int, now_s: float) -> None:
        self.follows = bool(self._rng.random() < (31 / 32 if self.follows else 1 / 4))
        self.gives_up = bool(self._rng.random() < 1 / 128)

    def plan(self, observed: PlanObservation) -> DraftPlan:
        return DraftPlan(int(self._rng.integers(0, observed.forecast_BK.shape[1] + 1)))


def to_start_with(block: SpecrolloutConfig) -> SpecrolloutConfig:
    """Returns the block with which an engine can start: the most drafts instead of `RANDOM`."""
    return replace(block, budget=BudgetConfig("fixed", k=block.num_speculative_tokens)) if is_random(block) else block


def is_random(block: SpecrolloutConfig) -> bool:
    """Returns whether the engine of this block is to draw at random."""
    return block.budget == RANDOM


def randomise(worker: Any) -> None:
    """Gives the vLLM worker of a running engine the random policies."""
    router = worker.specrollout_router
    if router is not None:
        router.use_budget(RandomBudget(), RandomPause())
        if router.model is not None:
            router.model.planner = RandomPlanner()
