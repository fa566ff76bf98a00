# SPDX-License-Identifier: Apache-2.0
"""Draft planners: decide before a step whether a draft model drafts in it, how deep, and which requests it follows.

Shapes: B requests, P proposers, K draft positions, Q bins of survival.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.speculation.best_depth import SurvivalSpread, best_depth
from nemo_specrollout.scheduling.speculation.draft_time import DraftCosts
from nemo_specrollout.scheduling.speculation.step_time import StepCosts

PLANNED_STEPS = 4
"""Steps for which a plan is valid, as long as the bit length of the number of requests stays the same."""
GENERATIONS = 2
"""Length of an evaluation: ended requests, as a multiple of the requests that ran at once. It covers beginnings and tails."""
FIRST_WATCH_SHARE = 0.02
"""Share of the engine's time for the first new trial of a dormant model. The share halves after each trial that fails."""
WATCH_SHARE = 0.0025
"""Smallest share of the engine's time for trials: the tasks may change, but a hopeless model must cost nothing."""
HOPELESS_STEPS = 64
"""Hopeless steps in a row before the model is given up, and steps of a new trial before its forecast is trusted. By then the
forecast of a model without drafts has returned to its prior."""


@dataclass(frozen=True)
class PlanObservation:
    """State of the engine before a step."""

    found_BK: np.ndarray
    """Survival of the text drafts, which cost nothing more, averaged over the last steps; float64."""
    forecast_BK: np.ndarray
    """Expected survival of the model's drafts, float64; 0 for requests that the model does not follow."""
    costs: StepCosts | None
    """Predicted step times; None while too little was measured."""
    draft_costs: DraftCosts | None
    """Predicted drafting times; None while too little was measured."""
    row_price: float = 0.0
    """Tokens that the engine produces in the time of one more row."""
    share_PKQ: np.ndarray | None = None
    """Histograms of survival (`SurvivalSpread`) of the text drafts and of the model's; None if they are unknown."""


@dataclass(frozen=True)
class DraftPlan:
    """Plan for a draft model in a step."""

    depth: int
    """Draft tokens for each request; 0 if the model only reads the sampled tokens, so that it can draft later."""
    won_s: float = 0.0
    """Seconds by which the step's tokens come sooner than without the model; negative if it loses time by reading."""
    is_hopeless: bool = False
    """Whether the model will win less, until these requests end, than reading takes."""


class DraftPlanner(ABC):
    """Decides what a draft model does in a step."""

    follows = True
    """Whether the model follows new requests from their first token on. Otherwise it can never draft for them."""
    gives_up = False
    """Whether the model stops following the running requests."""
    weighs_model = False
    """Whether the planner itself detects that the model does not pay."""

    @abstractmethod
    def plan(self, observed: PlanObservation) -> DraftPlan:
        """Returns the plan for the next steps."""

    def count_step(self, num_requests: int) -> bool:
        """Counts a step of `num_requests` requests. Returns whether it needs a new plan."""
        return True

    def observe_step(self, plan: DraftPlan, num_requests: int, now_s: float) -> None:  # noqa: B027
        """Takes note of a finished step of `plan`, `now_s` seconds into the engine's work."""

    def observe_ended(self, num_requests: int) -> None:  # noqa: B027
        """Takes note of followed requests that have ended."""

    def model_changed(self) -> None:  # noqa: B027
        """Judges the model like a new one: its weights have changed, or the tasks may have."""


class AutoPlanner(DraftPlanner):
    """Plans the depth with the highest predicted tokens a second. Plans 0 unless that depth beats reading alone by `margin`.

    Until the drafting times are known, the planner tries each depth in turn. A model that wins less than following costs lies
    dormant (`Dormancy`), sooner if the tail will probably not repay the reading (`_hope_s`). In a new trial the model drafts
    one token in every second step, even if its forecast, maybe from other tasks, is bad.
    """

    weighs_model = True

    def __init__(self, margin: float) -> None:
        self.margin = margin
        self._dormancy = Dormancy()
        self._num_tried = 0
        self._drafts_for_trial = False
        """True if the last plan drafted only because the model is on trial."""
        self._size = self._num_steps_left = 0
        """Bit length of the number of requests of the last plan, and the steps for which the plan is still valid."""

    def count_step(self, num_requests: int) -> bool:
        self._num_steps_left -= 1
        if self._num_steps_left > 0 and num_requests.bit_length() == self._size:
            return False
        self._num_steps_left, self._size = PLANNED_STEPS, num_requests.bit_length()
        return True

    def plan(self, observed: PlanObservation) -> DraftPlan:
        num_requests, num_positions = observed.forecast_BK.shape
        costs, draft = observed.costs, observed.draft_costs
        if costs is None:
            return DraftPlan(0)
        if draft is None:
            self._num_tried, self._num_steps_left = self._num_tried + 1, 1
            return DraftPlan(1 + self._num_tried % num_positions)
        if observed.share_PKQ is None:
            observed = replace(observed, share_PKQ=SurvivalSpread(num_positions).share_PKQ)
        depth, won_s = self._best(observed, costs, draft)
        is_hopeless = won_s <= 0.0 and self._hope_s(observed, costs, draft) <= 0.0
        self._drafts_for_trial = depth == 0 and self._dormancy.is_on_trial and not self._drafts_for_trial
        if self._drafts_for_trial:
            self._num_steps_left = 1
            return DraftPlan(1, -draft.draft_s(num_requests, num_requests, 1), is_hopeless)
        return DraftPlan(depth, won_s, is_hopeless)

    def _best(self, observed: PlanObservation, costs: StepCosts, draft: DraftCosts) -> tuple[int, float]:
        """Returns the best depth, and the seconds by which the step's tokens come sooner than without the model."""
        num_requests = len(observed.found_BK)
        plain_s, read_s = float(costs.plain_s[num_requests]), draft.read_s(num_requests)
        depth, rate, rate_without = best_depth(
            observed.found_BK, observed.forecast_BK, observed.share_PKQ, costs, draft, read_s, 1.0 + self.margin,
            observed.row_price,
        )  # fmt: skip
        return depth, rate * plain_s * (1.0 / rate_without - 1.0 / rate) if depth else -read_s

    def _hope_s(self, observed: PlanObservation, costs: StepCosts, draft: DraftCosts) -> float:
        """Returns the seconds that the model wins until the requests end, less the time for reading.

        The estimate sums over one step with all requests, one with half of them, one with a quarter, and so on. If lengths
        are exponential, each halving takes equally many steps. The remaining requests are assumed to be average ones, and so
        are requests that the model does not follow, because it will follow their successors.
        """
        found_BK, forecast_BK = observed.found_BK, observed.forecast_BK.copy()
        is_followed = forecast_BK[:, 0] > 0.0
        if is_followed.any():
            forecast_BK[~is_followed] = forecast_BK[is_followed].mean(axis=0)
        order = np.argsort(forecast_BK.sum(axis=1), kind="stable")
        hope_s, num_requests = 0.0, len(order)
        while num_requests:
            row_price = costs.row_s(num_requests, 0) * num_requests / float(costs.plain_s[num_requests])
            left = order[(np.arange(num_requests) * 2 + 1) * len(order) // (2 * num_requests)]
            fewer = replace(observed, found_BK=found_BK[left], forecast_BK=forecast_BK[left], row_price=row_price)
            hope_s += self._best(fewer, costs, draft)[1]
            num_requests //= 2
        return hope_s

    def observe_step(self, plan: DraftPlan, num_requests: int, now_s: float) -> None:
        self._dormancy.step(num_requests, max(plan.won_s, 0.0), max(-plan.won_s, 0.0), now_s, plan.is_hopeless)
        self.follows, self.gives_up = self._dormancy.is_awake, self._dormancy.gives_up

    def observe_ended(self, num_requests: int) -> None:
        self._dormancy.ended(num_requests)

    def model_changed(self) -> None:
        self._dormancy.begin()
        self.follows, self.gives_up = True, False


class FixedPlanner(DraftPlanner):
    """Always drafts `k` tokens."""

    def __init__(self, k: int) -> None:
        self.k = k

    def plan(self, observed: PlanObservation) -> DraftPlan:
        return DraftPlan(self.k)


def build_planner(config: BudgetConfig) -> DraftPlanner:
    """Returns the planner that goes with the budget policy `config.policy`."""
    return AutoPlanner(config.margin) if config.policy == "auto" else FixedPlanner(config.k)


class Dormancy:
    """Decides when a draft model lies dormant. Owns the seconds that drafts saved and that following requests took.

    The model follows new requests as long as its drafts save more time than following takes. Otherwise it lies dormant until
    the next trial. A request that arrives meanwhile never gets drafts of the model. If there is no hope that the model
    recovers its cost, the evaluation comes early and the running requests are given up.
    `is_awake` tells whether the model follows new requests.
    """

    def __init__(self) -> None:
        self.is_awake = True
        self._won_s = self._cost_s = self._resumes_at_s = 0.0
        self._num_ended = self._most_at_once = self._num_hopeless = 0
        self._num_trial_steps = 0
        self._watch_share = FIRST_WATCH_SHARE

    @property
    def is_on_trial(self) -> bool:
        return self.is_awake and self._num_trial_steps > 0

    @property
    def gives_up(self) -> bool:
        """Whether the model stops following the running requests."""
        return self._num_hopeless >= HOPELESS_STEPS

    def step(self, num_requests: int, won_s: float, cost_s: float, now_s: float, is_hopeless: bool = False) -> None:
        """Takes note of a finished step.

        `won_s`: seconds that drafts saved. `cost_s`: seconds that following took. `now_s`: seconds that the engine has
        worked. `is_hopeless`: until these requests end, the model will save less than following takes.
        """
        self._num_hopeless = self._num_hopeless + 1 if is_hopeless and not self.gives_up else 0
        if not self.is_awake:
            if now_s >= self._resumes_at_s:
                self._begin_trial()
            return
        self._num_trial_steps = max(self._num_trial_steps - (won_s + cost_s > 0.0), 0)
        self._won_s += won_s
        self._cost_s += cost_s
        self._most_at_once = max(self._most_at_once, num_requests)
        if self.gives_up or self._num_ended >= GENERATIONS * self._most_at_once:
            self.is_awake = self._won_s >= self._cost_s
            if self.is_awake:
                self._watch_share = FIRST_WATCH_SHARE
            else:
                self._resumes_at_s = now_s + self._cost_s / self._watch_share
                self._watch_share = max(WATCH_SHARE, self._watch_share / 2)
            self._restart_evaluation()

    def ended(self, num_requests: int) -> None:
        """Takes note of followed requests that have ended."""
        self._num_ended += num_requests

    def begin(self) -> None:
        self._watch_share = FIRST_WATCH_SHARE
        self._begin_trial()

    def _begin_trial(self) -> None:
        self.is_awake, self._num_trial_steps, self._num_hopeless = True, HOPELESS_STEPS, 0
        self._restart_evaluation()

    def _restart_evaluation(self) -> None:
        self._won_s = self._cost_s = 0.0
        self._num_ended = self._most_at_once = 0
