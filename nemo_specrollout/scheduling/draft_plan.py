# SPDX-License-Identifier: Apache-2.0
"""Whom to ask a model drafter to draft for, and how deep: decided before it drafts, because its drafting costs time.

Shapes: B requests, K draft positions.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.draft_time import DraftCosts, drafting_s
from nemo_specrollout.scheduling.following import Following
from nemo_specrollout.scheduling.pacing import Rest
from nemo_specrollout.scheduling.step_time import StepCosts

# A model that is not asked goes on trial with so many requests, so deep, as long as that takes no more than such a share of
# the time.
TRIAL_REQUESTS, TRIAL_DEPTH, TRIAL_SHARE = 4, 3, 0.005
# A step that cannot yield tokens at the going rate is planned at its own best, found by so many plans.
MOST_RATES = 3
# Plans that came true by which the next are believed, for about as many requests; how far one may be off, as a factor; how
# fast doubt of a model that is not asked fades.
REMEMBERED_PLANS, MOST_DOUBT, FADING = 32, 2.0, 1 / 256
# By how much better than promised the plans of a steady model are taken to be until some came true, or not: what is never
# tried is never corrected.
BENEFIT_OF_DOUBT = 1.2


@dataclass(frozen=True)
class ModelTerms:
    """What a model's drafting is charged for: `surcharge`, a share beyond the seconds that it takes, and of what it has missed
    at most so many tokens of a request, `charged_rows`, for they must be read only once. After refusals the planner rests for
    at most `max_rest` steps in which it would be asked. `is_steady`: steps are much alike, so that no second is worth more
    than this step could make of it."""

    surcharge: float
    charged_rows: int
    max_rest: int
    is_steady: bool


# Alone, a model drafts step after step, and reads about what was accepted in the step before; what it missed earlier it would
# have to read in the tail of the rollout anyway. It rests when the pacer does. Beside drafters that read text it is asked now
# and then: it reads all that it has missed for each drafting, leaves cold caches behind, and text that is not found now may
# be found a step later. Where the policy is many times the head, drafting takes a small part of a step, and the surcharge
# next to nothing.
ALONE, BESIDE_TEXT = ModelTerms(0.0, 5, 0, is_steady=True), ModelTerms(0.5, 24, 12, is_steady=False)


@dataclass(frozen=True)
class PlanObservation:
    """`found_BK`: survival of the best drafts that cost nothing more (0 where there are none); `forecast_BK`: what the
    model's would be; `caps_B`: the most drafts a request may have; `unread_B`: tokens that the model would have to read
    for it first (at least the latest), 0 if it cannot draft for it; `costs` and `draft_costs` are None while too little was
    measured; `now_s`: seconds that the engine has decoded so far; `going_rate`: tokens that a second is worth
    (`GoingRate`)."""

    found_BK: np.ndarray
    forecast_BK: np.ndarray
    caps_B: np.ndarray
    unread_B: np.ndarray
    costs: StepCosts | None
    draft_costs: DraftCosts | None
    now_s: float
    going_rate: float

    @property
    def can_ask_B(self) -> np.ndarray:
        """Whom the model could draft for."""
        return (self.caps_B > 0) & (self.unread_B > 0)


@dataclass(frozen=True)
class DraftPlan:
    """The model drafts `depth` tokens for the requests that `asked_B`, bool, marks; depth 0 marks none. `tokens_per_s`: what
    is promised of the next step, with this drafting; 0 if nothing is. `backlog_s`: what reading will take that this step is
    not charged for. `won_s`: by how much the drafting is expected to shorten the rollout."""

    depth: int
    asked_B: np.ndarray
    tokens_per_s: float = 0.0
    backlog_s: float = 0.0
    won_s: float = 0.0


NO_PLAN = DraftPlan(0, np.zeros(0, np.bool_))


class DraftPlanner(ABC):
    """Decides what a model drafter does in a step."""

    @abstractmethod
    def plan(self, observed: PlanObservation) -> DraftPlan: ...

    def should_plan(self, num_requests: int) -> bool:
        """Whether to ask for a plan in this step, for so many requests."""
        return True

    @property
    def follows(self) -> bool:
        """Whether the model is told of requests that come, so that it may be asked for them."""
        return True

    def came_true(self, plan: DraftPlan, num_tokens: int, seconds: float) -> None:  # noqa: B027
        """Tells how a plan went: the tokens of the step that followed, and what that step and the drafting took. Who does not
        weigh does not care."""

    def followed(self, plan: DraftPlan, num_requests: int, seconds: float, now_s: float) -> None:  # noqa: B027
        """Tells what following took in the step of `plan`, with so many requests, and how long the engine has decoded."""

    def ended(self, num_requests: int) -> None:  # noqa: B027
        """So many of the requests that the model was told of are done."""

    def model_changed(self) -> None:  # noqa: B027
        """The model has other weights."""


class AutoPlanner(DraftPlanner):
    """The depth whose tokens are worth most, less the seconds that the step and its drafting take at the going rate; none,
    unless that is more than what is there already is worth, and than no drafts by `margin`.

    At each depth a request takes the model's drafts if they promise more than those found; the likeliest draft tokens are
    verified, and whoever would get none of the model's is not asked. While nothing is known of what drafting costs, all are
    asked, each depth in turn. A model that is not asked goes on trial now and then, with a few requests: nothing else would
    tell that it has become better, or faster. After a refusal the planner rests. A model whose plans win less than following
    the requests costs is not told of them (`Following`).

    Promises of plans with the model and without are each compared with what came of them, and believed accordingly, at each
    size of batch: requests for which a model is asked are the hard ones, and its passes leave cold caches behind.
    """

    def __init__(self, margin: float, terms: ModelTerms) -> None:
        self.margin, self.terms = margin, terms
        self._num_lessons = 0
        self._rest, self._size_at_refusal = Rest(terms.max_rest), 0
        self._next_trial_s: float | None = None
        self._following = Following()
        # What came over what was promised: without the model, with it; by the bits of the number of requests.
        self._came: dict[int, list[float]] = defaultdict(lambda: [1.0, BENEFIT_OF_DOUBT if terms.is_steady else 1.0])

    def should_plan(self, num_requests: int) -> bool:
        if num_requests.bit_length() != self._size_at_refusal:
            self._rest.forget()
        return not self._rest.goes_on()

    @property
    def follows(self) -> bool:
        return self._following.is_on

    def followed(self, plan: DraftPlan, num_requests: int, seconds: float, now_s: float) -> None:
        self._following.step(num_requests, plan.won_s, seconds, now_s)

    def ended(self, num_requests: int) -> None:
        self._following.ended(num_requests)

    def model_changed(self) -> None:
        self._following.begin()

    def plan(self, observed: PlanObservation) -> DraftPlan:
        plan = self._weigh(observed)
        if plan.depth > 0:
            self._rest.forget()
        else:
            self._rest.begin()
            self._size_at_refusal = len(plan.asked_B).bit_length()
        return plan

    def _weigh(self, observed: PlanObservation) -> DraftPlan:
        asked_B, costs, draft = np.zeros(len(observed.caps_B), np.bool_), observed.costs, observed.draft_costs
        if costs is None:
            return DraftPlan(0, asked_B)
        if draft is None:
            return self._lesson(observed)
        faith, going_rate = self.faith(len(asked_B)), observed.going_rate
        for n in range(MOST_RATES):
            depth, found_rate, rate, won, value = _plan(
                observed.found_BK, observed.forecast_BK, observed.caps_B, observed.unread_B, costs.plain_s,
                costs.overhead_s, costs.discount_s, draft.fixed_s, draft.row_s, draft.pass_s, draft.token_s, going_rate,
                1.0 + self.margin, 1.0 + self.terms.surcharge, self.terms.charged_rows, faith, asked_B,
            )  # fmt: skip
            if n == MOST_RATES - 1 or not self.terms.is_steady or (n == 0 and value >= 0.0):
                break
            going_rate = max(found_rate, faith * rate)
        if asked_B.any():
            backlog = np.maximum(observed.unread_B[asked_B] - self.terms.charged_rows, 0).sum()
            return DraftPlan(depth, asked_B, rate, backlog * draft.row_s, won / going_rate)
        trial = self._trial(observed, draft)
        return trial if trial.depth > 0 else replace(trial, tokens_per_s=found_rate)

    def faith(self, num_requests: int) -> float:
        """By how much plans with the model come truer than those without, as a factor, for so many requests."""
        without, with_model = self._came[num_requests.bit_length()]
        return with_model / without

    def came_true(self, plan: DraftPlan, num_tokens: int, seconds: float) -> None:
        came = self._came[len(plan.asked_B).bit_length()]
        charged_s = seconds - plan.backlog_s
        if plan.tokens_per_s > 0.0 and num_tokens > 0 and charged_s > 0.0:
            i = int(plan.depth > 0)
            ratio = min(max(num_tokens / charged_s / plan.tokens_per_s, 1 / MOST_DOUBT), MOST_DOUBT)
            came[i] += (ratio - came[i]) / REMEMBERED_PLANS
        if plan.depth == 0:
            came[1] += FADING * (came[0] - came[1])

    def _lesson(self, observed: PlanObservation) -> DraftPlan:
        self._num_lessons += 1
        return _ask(observed.can_ask_B, 1 + self._num_lessons % observed.forecast_BK.shape[1])

    def _trial(self, observed: PlanObservation, draft: DraftCosts) -> DraftPlan:
        can_ask_B = observed.can_ask_B
        least_unread_b = np.argsort(np.where(can_ask_B, observed.unread_B, np.iinfo(np.int64).max))[:TRIAL_REQUESTS]
        chosen_B = np.zeros_like(can_ask_B)
        chosen_B[least_unread_b] = can_ask_B[least_unread_b]
        trial = _ask(chosen_B, TRIAL_DEPTH)
        is_first, is_due = self._next_trial_s is None, observed.now_s >= (self._next_trial_s or 0.0)
        if trial.depth > 0 and (is_first or is_due):
            num_asked, num_rows = int(trial.asked_B.sum()), int(observed.unread_B[trial.asked_B].sum())
            self._next_trial_s = observed.now_s + draft.draft_s(num_rows, num_asked, TRIAL_DEPTH) / TRIAL_SHARE
        return trial if is_due and not is_first else _ask(chosen_B, 0)


class FixedPlanner(DraftPlanner):
    """`k` tokens for whoever has room."""

    def __init__(self, k: int) -> None:
        self.k = k

    def plan(self, observed: PlanObservation) -> DraftPlan:
        return _ask(observed.can_ask_B, self.k)


class RandomPlanner(DraftPlanner):
    """A random depth for a random choice of requests, none included, and at times none is followed: for tests."""

    def __init__(self, seed: int = 1) -> None:
        self._rng, self._lapses = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self._follows = True

    @property
    def follows(self) -> bool:
        return self._follows

    def followed(self, plan: DraftPlan, num_requests: int, seconds: float, now_s: float) -> None:
        self._follows = bool(self._lapses.random() < (255 / 256 if self._follows else 1 / 4))

    def plan(self, observed: PlanObservation) -> DraftPlan:
        depth = int(self._rng.integers(0, observed.forecast_BK.shape[1] + 1))
        return _ask(observed.can_ask_B & (self._rng.random(len(observed.caps_B)) < 0.7), depth)


def _ask(asked_B: np.ndarray, depth: int) -> DraftPlan:
    """The plan; without requests or depth, it is none."""
    is_none = depth == 0 or not asked_B.any()
    return DraftPlan(0, np.zeros_like(asked_B)) if is_none else DraftPlan(depth, asked_B)


def build_planner(config: BudgetConfig, terms: ModelTerms) -> DraftPlanner:
    """The planner that goes with the budget policy of that name; one that weighs charges a model by `terms`."""
    if config.policy == "fixed":
        return FixedPlanner(config.k)
    return RandomPlanner() if config.policy == "random" else AutoPlanner(config.margin, terms)


@njit("boolean(float64[:], float64[:], int64, int64)", cache=True, inline="always")
def _promises_more(forecast_K, found_K, depth, cap):  # type: ignore[no-untyped-def]
    difference = 0.0
    for k in range(depth):
        difference += forecast_K[k]
    for k in range(cap):
        difference -= found_K[k]
    return depth > 0 and difference > 0.0


@njit(
    "Tuple((int64, int64, int64))(float64[:,:], float64[:,:], int64[:], int64[:], int64, int64, float64[:])", cache=True
)
def _gains(found_BK, forecast_BK, caps_B, unread_B, charged_rows, depth, gains):  # type: ignore[no-untyped-def]
    """Writes the survival of each draft token where the model drafts `depth`: how many those are, how many requests it is
    asked for, and the tokens that it is charged for reading."""
    num_requests, num_positions = forecast_BK.shape
    num_gains = num_asked = num_rows = 0
    for b in range(num_requests):
        cap = min(caps_B[b], num_positions)
        use_model = unread_B[b] > 0 and _promises_more(forecast_BK[b], found_BK[b], min(depth, cap), cap)
        if use_model:
            num_asked += 1
            num_rows += min(unread_B[b], charged_rows)
        for k in range(min(depth, cap) if use_model else cap):
            gain = forecast_BK[b, k] if use_model else found_BK[b, k]
            if gain > 0.0:
                gains[num_gains] = gain
                num_gains += 1
    return num_gains, num_asked, num_rows


@njit(
    "Tuple((int64, float64, float64, float64, float64))(float64[:,:], float64[:,:], int64[:], int64[:], float64[:], float64,"
    " float64, float64, float64, float64, float64, float64, float64, float64, int64, float64, boolean[:])",
    cache=True,
    error_model="numpy",
)
def _plan(  # type: ignore[no-untyped-def]
    found_BK, forecast_BK, caps_B, unread_B, plain_s, overhead_s, discount_s, fixed_s, row_s, pass_s, token_s,
    going_rate, least_gain, model_price, charged_rows, faith, asked_B,
):  # fmt: skip
    """Writes who is asked, and returns how deep, the tokens a second that drafts found promise, and those of the model, and
    how many tokens' worth the model's are beyond those, and all are beyond what the seconds are worth.

    A kernel, because it runs in every step that consults drafters."""
    num_requests, num_positions = forecast_BK.shape
    most = found_most = least_gain * num_requests - going_rate * plain_s[num_requests]
    found_rate = num_requests / plain_s[num_requests]
    model_rate = 0.0
    best_depth = 0
    threshold = 0.0
    gains = np.empty(num_requests * num_positions)
    last, worse = 0.0, 0
    for depth in range(num_positions + 1):
        num_gains, num_asked, num_rows = _gains(found_BK, forecast_BK, caps_B, unread_B, charged_rows, depth, gains)
        if depth > 0 and num_asked == 0:
            continue
        draft_s = 0.0
        if depth > 0:
            draft_s = drafting_s(num_rows, num_asked, depth, fixed_s, row_s, pass_s, token_s)
        belief = faith if depth > 0 else 1.0
        ordered = np.sort(gains[:num_gains])
        tokens = float(num_requests)
        best = -np.inf
        for i in range(min(num_gains, len(plain_s) - 1 - num_requests)):
            gain = ordered[num_gains - 1 - i]
            tokens += gain
            verify_s = plain_s[num_requests + 1 + i] + overhead_s - (i + 1) * discount_s
            verify_s = max(verify_s, plain_s[num_requests])
            value = belief * tokens - going_rate * (verify_s + model_price * draft_s)
            best = max(best, value)
            if value > most:
                most = value
                if depth > 0:
                    model_rate = tokens / (verify_s + draft_s)
                    best_depth = depth
                    threshold = gain
                else:
                    found_rate = tokens / verify_s
                    found_most = value
        worse = worse + 1 if depth > 1 and best < last else 0  # deeper drafts spread the first pass's cost
        last = best
        if worse == 2:
            break
    for b in range(num_requests):
        cap = min(caps_B[b], num_positions)
        asked_B[b] = (
            best_depth > 0
            and unread_B[b] > 0
            and _promises_more(forecast_BK[b], found_BK[b], min(best_depth, cap), cap)
            and forecast_BK[b, 0] >= threshold
        )
    return best_depth, found_rate, model_rate, most - found_most, most
