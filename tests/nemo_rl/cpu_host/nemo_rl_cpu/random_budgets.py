# SPDX-License-Identifier: Apache-2.0
"""Numbers of drafts at random, for a block with the fixed budget `NUM_DRAFTS`: no config can ask for them."""

from types import ModuleType
from typing import Any

NUM_DRAFTS = 8


def _at_random(build: Any, name: str) -> Any:
    """Returns a builder that makes `name` of lab.local.random_budgets where `build` would make a fixed policy."""

    def built(config: Any) -> Any:
        if (config.policy, config.k) != ("fixed", NUM_DRAFTS):
            return build(config)
        from lab.local import random_budgets

        return getattr(random_budgets, name)()

    return built


def draw_budgets(budget: ModuleType) -> None:
    """Draws how many drafts are verified, and pauses."""
    budget.build_budget = _at_random(budget.build_budget, "RandomBudget")  # type: ignore[attr-defined]
    budget.build_pause = _at_random(budget.build_pause, "RandomPause")  # type: ignore[attr-defined]


def draw_depths(draft_plan: ModuleType) -> None:
    """Draws how deep a model drafts."""
    draft_plan.build_planner = _at_random(draft_plan.build_planner, "RandomPlanner")  # type: ignore[attr-defined]
