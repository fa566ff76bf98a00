# SPDX-License-Identifier: Apache-2.0
"""At what pace an engine decodes: how many drafts its requests get is decided by the production policies, at a cost model's
seconds.

Shapes: B requests of an engine, K draft positions.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.placement.pipeline import SteadyState, coupled_tokens, steady_state
from nemo_specrollout.scheduling.speculation.budget import BudgetObservation, build_budget
from nemo_specrollout.scheduling.speculation.draft_plan import PlanObservation, build_planner
from nemo_specrollout.scheduling.speculation.draft_time import DraftCosts
from nemo_specrollout.scheduling.speculation.step_time import StepCosts
from nemo_specrollout.simulation.costs import Costs

# Decisions are remembered by size of batch, context and acceptance: exact up to the first number, then in such steps.
_EXACT_BATCH, _BATCH_STEP, _CONTEXT_STEP, _ACCEPTANCE_STEP = 8, 1.1, 1.25, 0.02
# Draft lengths that a decoupled pair tries.
_KS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Pace:
    """Of one engine step: `tokens_B` that each request emits on average; `num_rows` of the verifier; `depth`, draft tokens
    that the engine itself makes for each request before it."""

    tokens_B: np.ndarray
    num_rows: float
    depth: float = 0.0


class Speculation(ABC):
    """How one kind of engine drafts."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    @abstractmethod
    def pace(self, p_B: np.ndarray, context: float) -> Pace:
        """With requests of these acceptances, whose mean length is `context`."""

    def step_s(self, pace: Pace, num_requests: int, context: float) -> float:
        """Seconds of a step at that pace."""
        seconds = float(self.costs.step_s(num_requests, pace.num_rows, context))
        return seconds + pace.depth * self.costs.draft_s(num_requests, context) if pace.depth else seconds

    def tokens_per_s(self, p_B: np.ndarray, context: float) -> float:
        """Of each request, on average."""
        pace = self.pace(p_B, context)
        return float(pace.tokens_B.mean()) / self.step_s(pace, len(p_B), context)


class NoSpeculation(Speculation):
    """One token a step."""

    def pace(self, p_B: np.ndarray, context: float) -> Pace:
        return Pace(np.ones(len(p_B)), float(len(p_B)))


class CoupledSpeculation(Speculation):
    """The policy's engine drafts, or looks drafts up, then verifies: `budget` says how much, as in an engine.

    Under `auto`, a drafter with weights is planned by `AutoPlanner`, what is then verified by `AutoBudget`.
    """

    def __init__(self, costs: Costs, budget: BudgetConfig, max_k: int, has_weights: bool) -> None:
        super().__init__(costs)
        self.config, self.max_k, self.has_weights = budget, max_k, has_weights
        self.budget = build_budget(budget)
        self._known: dict[tuple[int, int, int], tuple[int, float]] = {}

    def pace(self, p_B: np.ndarray, context: float) -> Pace:
        depth, least_survival = self._decision(p_B, context)
        counts_B = _counts(p_B, depth, least_survival)
        if not counts_B.any():
            return Pace(np.ones(len(p_B)), float(len(p_B)))
        tokens_B = (1.0 - p_B ** (counts_B + 1)) / (1.0 - p_B)
        return Pace(tokens_B, float(len(p_B) + counts_B.sum()), float(depth) if self.has_weights else 0.0)

    def _decision(self, p_B: np.ndarray, context: float) -> tuple[int, float]:
        """How deep to draft, and the survival below which a draft token is not verified."""
        key = _key(p_B, context)
        if key not in self._known:
            self._known[key] = self._decide(p_B, context)
        return self._known[key]

    def _decide(self, p_B: np.ndarray, context: float) -> tuple[int, float]:
        if self.config.policy == "fixed":
            return self.config.k, 0.0
        costs = self._step_costs(len(p_B), context)
        caps_B = np.full(len(p_B), self.max_k, np.int64)
        survival_BK = p_B[:, None] ** np.arange(1, self.max_k + 1)
        depth = self._planned_depth(survival_BK, costs, context) if self.has_weights else self.max_k
        if depth == 0:
            return 0, math.inf
        survival_BK[:, depth:] = 0.0
        decision = self.budget.allocate(BudgetObservation(survival_BK, caps_B, costs))
        return (depth, decision.least_survival) if decision.counts_B.any() else (0, math.inf)

    def _planned_depth(self, survival_BK: np.ndarray, costs: StepCosts, context: float) -> int:
        observed = PlanObservation(
            np.zeros_like(survival_BK), survival_BK, costs, self._draft_costs(len(survival_BK), context)
        )
        return build_planner(self.config).plan(observed).depth

    def _step_costs(self, num_requests: int, context: float) -> StepCosts:
        rows = np.arange(num_requests * (self.max_k + 1) + 1, dtype=float)
        return StepCosts(np.asarray(self.costs.step_s(num_requests, np.maximum(rows, num_requests), context), float))

    def _draft_costs(self, num_requests: int, context: float) -> DraftCosts:
        """As a line through this batch size and twice that. A drafter that does not pay lies dormant and reads nothing."""
        once_s, twice_s = (self.costs.draft_s(n, context) for n in (num_requests, 2 * num_requests))
        token_s = max(0.0, min(twice_s - once_s, once_s)) / num_requests
        pass_s = once_s - num_requests * token_s
        return DraftCosts(fixed_s=pass_s, pass_s=pass_s, token_s=token_s, read_share=0.0)


class DecoupledSpeculation(Speculation):
    """Drafters on GPUs of their own run ahead: `settle` says how fast both are, at the draft length that promises most; where
    none promises more than no drafts, there are none.

    A request of another acceptance than the batch's mean gains as it would by as many drafts in its own engine.
    """

    def __init__(self, costs: Costs, drafter: Costs, max_k: int) -> None:
        super().__init__(costs)
        self.drafter, self.ks = drafter, tuple(k for k in _KS if k <= max_k)
        self._known: dict[tuple[int, int, int], tuple[int, SteadyState]] = {}

    def pace(self, p_B: np.ndarray, context: float) -> Pace:
        key = _key(p_B, context)
        if key not in self._known:
            self._known[key] = self._settle(float(p_B.mean()), len(p_B), context)
        k, settled = self._known[key]
        if k == 0:
            return Pace(np.ones(len(p_B)), float(len(p_B)))
        gain_B = (1.0 - p_B ** (k + 1)) / (1.0 - p_B)
        tokens_B = settled.rates.num_tokens * gain_B / coupled_tokens(float(p_B.mean()), k)
        return Pace(np.maximum(tokens_B, 1.0), len(p_B) * (1.0 + settled.rates.num_submitted))

    def _settle(self, p: float, num_requests: int, context: float) -> tuple[int, SteadyState]:
        def step_s(num_rows: float) -> float:
            return float(self.costs.step_s(num_requests, num_rows, context))

        # A drafter makes one token for each request in a step of its own, of as many rows.
        draft_s = float(self.drafter.step_s(num_requests, float(num_requests), context))
        # While k and the token after them are being verified, k more are drafted.
        options = [(k, steady_state(p, k, 2 * k + 1, draft_s, step_s, num_requests)) for k in self.ks]
        best = max(options, key=lambda option: option[1].rates.num_tokens / option[1].step_s)
        gains = best[1].rates.num_tokens / best[1].step_s > 1.0 / step_s(num_requests)
        return best if gains else (0, best[1])


def _counts(p_B: np.ndarray, depth: int, least_survival: float) -> np.ndarray:
    """Draft tokens of each request: as many as are no less likely than that, `depth` at most; int64."""
    if depth == 0 or least_survival <= 0.0:
        return np.full(len(p_B), depth, np.int64)
    most_B = np.log(least_survival) / np.log(np.clip(p_B, 1e-12, 1 - 1e-12))
    return np.clip(np.floor(most_B + 1e-9), 0, depth).astype(np.int64)


def _key(p_B: np.ndarray, context: float) -> tuple[int, int, int]:
    batch = len(p_B)
    size = batch if batch <= _EXACT_BATCH else round(_EXACT_BATCH + math.log(batch / _EXACT_BATCH, _BATCH_STEP))
    return size, round(math.log(max(context, 1.0), _CONTEXT_STEP)), round(float(p_B.mean()) / _ACCEPTANCE_STEP)
