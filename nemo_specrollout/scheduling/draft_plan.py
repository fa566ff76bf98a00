# SPDX-License-Identifier: Apache-2.0
"""Whom to ask a model drafter to draft for, and how deep: decided before it drafts, because its drafting costs time.

Shapes: B requests, K draft positions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numba import njit

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.draft_time import DraftCosts
from nemo_specrollout.scheduling.step_time import StepCosts

# Consultations without the model until it goes on trial: at first, and at most; then for so many requests, so deep.
FIRST_TRIAL, LAST_TRIAL = 64, 1024
TRIAL_REQUESTS, TRIAL_DEPTH = 4, 2
# One that was not asked for `RESTS_AFTER` consultations is considered in one of `REST` only.
RESTS_AFTER, REST = 32, 4


@dataclass(frozen=True)
class PlanObservation:
    """`found_BK`: survival of the best drafts that cost nothing more (0 where there are none); `forecast_BK`: what the
    model's would be; `caps_B`: the most drafts a request may have; `unread_B`: tokens that the model would have to read
    for it first; `costs` and `draft_costs` are None while too little was measured."""

    found_BK: np.ndarray
    forecast_BK: np.ndarray
    caps_B: np.ndarray
    unread_B: np.ndarray
    costs: StepCosts | None
    draft_costs: DraftCosts | None


@dataclass(frozen=True)
class DraftPlan:
    """The model drafts `depth` tokens for the requests that `asked_B`, bool, marks; depth 0 marks none."""

    depth: int
    asked_B: np.ndarray


NO_PLAN = DraftPlan(0, np.zeros(0, np.bool_))


class DraftPlanner(ABC):
    """Decides what a model drafter does in a step."""

    @abstractmethod
    def plan(self, observed: PlanObservation) -> DraftPlan: ...

    def rests(self) -> bool:
        """Asked first in each step: whether the model is not even considered in it, which costs host time too."""
        return False


class AutoPlanner(DraftPlanner):
    """The depth with the most tokens a second, drafting included; none, unless that beats what is there already, and no
    drafts by `margin`.

    At each depth a request takes the model's drafts if they promise more than those found; then draft tokens are handed
    out as by `AutoBudget`, and whoever would get none of the model's is not asked. While nothing is known of what drafting
    costs, all are asked, each depth in turn. A model that is not asked goes on trial now and then, with a few requests:
    nothing else would tell that it has become better, or faster.
    """

    def __init__(self, margin: float) -> None:
        self.margin = margin
        self._num_lessons = 0
        self._idle = 0
        self._patience = FIRST_TRIAL

    def plan(self, observed: PlanObservation) -> DraftPlan:
        asked_B, costs, draft = np.zeros(len(observed.caps_B), np.bool_), observed.costs, observed.draft_costs
        if costs is None:
            return DraftPlan(0, asked_B)
        if draft is None:
            return self._lesson(observed)
        depth = _plan(
            observed.found_BK, observed.forecast_BK, observed.caps_B, observed.unread_B, costs.plain_s, costs.overhead_s,
            costs.discount_s, draft.fixed_s, draft.row_s, draft.pass_s, draft.pass_request_s, 1.0 + self.margin, asked_B,
        )  # fmt: skip
        if asked_B.any():
            self._idle, self._patience = 0, FIRST_TRIAL
            return DraftPlan(depth, asked_B)
        return self._trial(observed)

    def rests(self) -> bool:
        if self._idle < RESTS_AFTER or (self._idle + 1) % REST == 0:
            return False
        self._idle += 1
        return True

    def _lesson(self, observed: PlanObservation) -> DraftPlan:
        self._num_lessons += 1
        return _ask(observed.caps_B > 0, 1 + self._num_lessons % observed.forecast_BK.shape[1])

    def _trial(self, observed: PlanObservation) -> DraftPlan:
        """Twice as long after each trial that leads to nothing."""
        self._idle += 1
        if self._idle < self._patience:
            return _ask(np.zeros(len(observed.caps_B), np.bool_), 0)
        self._idle, self._patience = 0, min(2 * self._patience, LAST_TRIAL)
        has_room_B = observed.caps_B > 0
        return _ask(has_room_B & (np.cumsum(has_room_B) <= TRIAL_REQUESTS), TRIAL_DEPTH)


class FixedPlanner(DraftPlanner):
    """`k` tokens for whoever has room."""

    def __init__(self, k: int) -> None:
        self.k = k

    def plan(self, observed: PlanObservation) -> DraftPlan:
        return _ask(observed.caps_B > 0, self.k)


class RandomPlanner(DraftPlanner):
    """A random depth for a random choice of requests, none included: for tests."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)

    def plan(self, observed: PlanObservation) -> DraftPlan:
        depth = int(self._rng.integers(0, observed.forecast_BK.shape[1] + 1))
        return _ask((observed.caps_B > 0) & (self._rng.random(len(observed.caps_B)) < 0.7), depth)


def _ask(asked_B: np.ndarray, depth: int) -> DraftPlan:
    """The plan; without requests or depth, it is none."""
    is_none = depth == 0 or not asked_B.any()
    return DraftPlan(0, np.zeros_like(asked_B)) if is_none else DraftPlan(depth, asked_B)


def build_planner(config: BudgetConfig) -> DraftPlanner:
    """The planner that goes with the budget policy of that name."""
    if config.policy == "fixed":
        return FixedPlanner(config.k)
    return RandomPlanner() if config.policy == "random" else AutoPlanner(config.margin)


@njit("boolean(float64[:], float64[:], int64, int64)", cache=True, inline="always")
def _promises_more(forecast_K, found_K, depth, cap):  # type: ignore[no-untyped-def]
    difference = 0.0
    for k in range(depth):
        difference += forecast_K[k]
    for k in range(cap):
        difference -= found_K[k]
    return depth > 0 and difference > 0.0


@njit(
    "int64(float64[:,:], float64[:,:], int64[:], int64[:], float64[:], float64, float64, float64, float64, float64,"
    " float64, float64, boolean[:])",
    cache=True,
    error_model="numpy",
)
def _plan(  # type: ignore[no-untyped-def]
    found_BK, forecast_BK, caps_B, unread_B, plain_s, overhead_s, discount_s, fixed_s, row_s, pass_s, pass_request_s,
    least_gain, asked_B,
):  # fmt: skip
    """Writes who is asked, and returns how deep; a kernel, because it runs in every step that consults drafters."""
    num_requests, num_positions = forecast_BK.shape
    most = least_gain * num_requests / plain_s[num_requests]
    best_depth = 0
    threshold = 0.0
    gains = np.empty(num_requests * num_positions)
    worse = 0
    for depth in range(num_positions + 1):
        num_gains = 0
        num_asked = 0
        num_rows = 0
        for b in range(num_requests):
            cap = min(caps_B[b], num_positions)
            use_model = _promises_more(forecast_BK[b], found_BK[b], min(depth, cap), cap)
            if use_model:
                num_asked += 1
                num_rows += unread_B[b]
            for k in range(min(depth, cap) if use_model else cap):
                gain = forecast_BK[b, k] if use_model else found_BK[b, k]
                if gain > 0.0:
                    gains[num_gains] = gain
                    num_gains += 1
        if depth > 0 and num_asked == 0:
            continue
        draft_s = 0.0
        if depth > 0:
            draft_s = fixed_s + num_rows * row_s + (depth - 1) * (pass_s + num_asked * pass_request_s)
        ordered = np.sort(gains[:num_gains])
        tokens = float(num_requests)
        improved = False
        for i in range(min(num_gains, len(plain_s) - 1 - num_requests)):
            gain = ordered[num_gains - 1 - i]
            tokens += gain
            verify_s = plain_s[num_requests + 1 + i] + overhead_s - (i + 1) * discount_s
            rate = tokens / (max(verify_s, plain_s[num_requests]) + draft_s)
            if rate > most:
                most = rate
                best_depth = depth
                threshold = gain
                improved = True
        worse = 0 if improved or depth == 0 else worse + 1
        if worse == 2:
            break
    for b in range(num_requests):
        cap = min(caps_B[b], num_positions)
        asked_B[b] = (
            best_depth > 0
            and _promises_more(forecast_BK[b], found_BK[b], min(best_depth, cap), cap)
            and forecast_BK[b, 0] >= threshold
        )
    return best_depth
