# SPDX-License-Identifier: Apache-2.0
"""Whether to let a drafter with weights draft in a step, and how deep: decided before it drafts, for drafting costs time.

Shapes: B requests, K draft positions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.speculation.best_depth import best_depth
from nemo_specrollout.scheduling.speculation.draft_time import DraftCosts
from nemo_specrollout.scheduling.speculation.following import Following
from nemo_specrollout.scheduling.speculation.step_time import StepCosts
from nemo_specrollout.scheduling.speculation.survival_spread import SurvivalSpread

PLANNED_STEPS = 4
"""Steps that a plan holds for, as long as the number of requests is of the same order."""


@dataclass(frozen=True)
class PlanObservation:
    """`found_BK`: survival of the drafts that cost nothing more, averaged over the last steps. `forecast_BK`: survival of the
    model's drafts, 0 for requests that it cannot draft for. `costs` and `draft_costs` are None while too little was
    measured. `now_s`: seconds that the engine has worked so far. `row_price`: tokens that it makes in the time of one more
    row. `share_PKQ`: how survival spreads around those means, of the found drafts and of the model's (`SurvivalSpread`);
    None: not at all."""

    found_BK: np.ndarray
    forecast_BK: np.ndarray
    costs: StepCosts | None
    draft_costs: DraftCosts | None
    now_s: float = 0.0
    row_price: float = 0.0
    share_PKQ: np.ndarray | None = None


@dataclass(frozen=True)
class DraftPlan:
    """The model drafts `depth` tokens for each request; 0: it only reads what was sampled, so that it can draft later.
    `won_s`: by how much the step's tokens come sooner than without the model; below 0 if it wins less than reading costs.
    `is_hopeless`: the model will win less, until these requests end, than reading takes."""

    depth: int
    won_s: float = 0.0
    is_hopeless: bool = False


class DraftPlanner(ABC):
    """Decides what a drafter with weights does in a step."""

    @abstractmethod
    def plan(self, observed: PlanObservation) -> DraftPlan: ...

    def should_plan(self, num_requests: int) -> bool:
        """Whether the plan of the step before no longer holds, for `num_requests` requests."""
        return True

    @property
    def follows(self) -> bool:
        """Whether requests that come are followed from their first token on: only then can the model draft for them."""
        return True

    @property
    def gives_up(self) -> bool:
        """Returns whether the model stops following the running requests."""
        return False

    @property
    def weighs_model(self) -> bool:
        """Returns whether it finds out by itself that the model does not pay."""
        return False

    def worked(self, plan: DraftPlan, num_requests: int, now_s: float) -> None:  # noqa: B027
        """A step of that plan is over, with `num_requests` requests, `now_s` seconds into the engine's work."""

    def ended(self, num_requests: int) -> None:  # noqa: B027
        """So many of the requests that were followed are done."""

    def model_changed(self) -> None:  # noqa: B027
        """Judges the model like a new one: its weights have changed, or the tasks may have."""


class AutoPlanner(DraftPlanner):
    """The depth that promises most tokens a second, by the times that steps and drafting take; 0 unless that beats reading
    alone by `margin`.

    At each depth a request takes the model's drafts if they promise more than those found, and the likeliest draft tokens are
    verified. While nothing is known of what drafting costs, each depth is tried in turn. A model that wins less than
    following the requests costs lies dormant (`Following`). When it is looked at again, its forecast is of other tasks: every
    few steps it drafts one token all the same, which takes little more than reading. One that wins nothing now may win more
    later than reading costs until then (`_hope_s`).
    """

    def __init__(self, margin: float) -> None:
        self.margin = margin
        self._following = Following()
        self._num_tried, self._has_tried = 0, False
        self._num_since, self._size = 0, 0

    def should_plan(self, num_requests: int) -> bool:
        self._num_since += 1
        is_due = self._num_since > PLANNED_STEPS or num_requests.bit_length() != self._size
        if is_due:
            self._num_since, self._size = 1, num_requests.bit_length()
        return is_due

    @property
    def follows(self) -> bool:
        return self._following.is_on

    @property
    def gives_up(self) -> bool:
        return self._following.gives_up

    @property
    def weighs_model(self) -> bool:
        return True

    def plan(self, observed: PlanObservation) -> DraftPlan:
        num_requests, num_positions = observed.forecast_BK.shape
        costs, draft = observed.costs, observed.draft_costs
        if costs is None:
            return DraftPlan(0)
        if draft is None:
            self._num_tried, self._num_since = self._num_tried + 1, PLANNED_STEPS
            return DraftPlan(1 + self._num_tried % num_positions)
        share_PKQ = SurvivalSpread(2, num_positions).share_PKQ if observed.share_PKQ is None else observed.share_PKQ
        observed = replace(observed, share_PKQ=share_PKQ)
        depth, won_s = self._best(observed, costs, draft)
        is_hopeless = won_s <= 0.0 and self._hope_s(observed, costs, draft) <= 0.0
        self._has_tried = depth == 0 and self._following.is_looking and not self._has_tried
        if self._has_tried:
            self._num_since = PLANNED_STEPS  # for one step
            return DraftPlan(1, -draft.draft_s(num_requests, num_requests, 1), is_hopeless)
        return DraftPlan(depth, won_s, is_hopeless)

    def _best(self, observed: PlanObservation, costs: StepCosts, draft: DraftCosts) -> tuple[int, float]:
        """Returns the best depth, and by how much the step's tokens come sooner than without the model."""
        num_requests = len(observed.found_BK)
        plain_s, read_s = float(costs.plain_s[num_requests]), draft.read_s(num_requests)
        depth, rate, rate_without = best_depth(
            observed.found_BK, observed.forecast_BK, observed.share_PKQ, costs.plain_s, costs.overhead_s, costs.discount_s,
            draft.fixed_s, draft.row_s, draft.pass_s, draft.token_s, read_s, 1.0 + self.margin, observed.row_price,
        )  # fmt: skip
        return depth, rate * plain_s * (1.0 / rate_without - 1.0 / rate) if depth else -read_s

    def _hope_s(self, observed: PlanObservation, costs: StepCosts, draft: DraftCosts) -> float:
        """Returns what the model wins until the requests end, less what reading takes, in seconds: one step with all of them,
        one with half of them, one with half of those, and so on. Each halving takes as long where lengths are exponential.

        Those that are left are as promising as all are on average: the best of many forecasts is mostly chance. Requests that
        the model does not follow count like the others: their successors are followed.
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

    def worked(self, plan: DraftPlan, num_requests: int, now_s: float) -> None:
        self._following.step(num_requests, max(plan.won_s, 0.0), max(-plan.won_s, 0.0), now_s, plan.is_hopeless)

    def ended(self, num_requests: int) -> None:
        self._following.ended(num_requests)

    def model_changed(self) -> None:
        self._following.begin()


class FixedPlanner(DraftPlanner):
    """`k` tokens, always."""

    def __init__(self, k: int) -> None:
        self.k = k

    def plan(self, observed: PlanObservation) -> DraftPlan:
        return DraftPlan(self.k)


class RandomPlanner(DraftPlanner):
    """A random depth; at times requests that come are not followed, or those that run no further: for tests."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)
        self._follows, self._gives_up = True, False

    @property
    def follows(self) -> bool:
        return self._follows

    @property
    def gives_up(self) -> bool:
        return self._gives_up

    def worked(self, plan: DraftPlan, num_requests: int, now_s: float) -> None:
        """Also while no request is followed, when no plan is asked for."""
        self._follows = bool(self._rng.random() < (31 / 32 if self._follows else 1 / 4))
        self._gives_up = bool(self._rng.random() < 1 / 128)

    def plan(self, observed: PlanObservation) -> DraftPlan:
        return DraftPlan(int(self._rng.integers(0, observed.forecast_BK.shape[1] + 1)))


def build_planner(config: BudgetConfig) -> DraftPlanner:
    """The planner that goes with the budget policy of that name."""
    if config.policy == "fixed":
        return FixedPlanner(config.k)
    return RandomPlanner() if config.policy == "random" else AutoPlanner(config.margin)
