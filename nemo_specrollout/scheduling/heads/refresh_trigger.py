# SPDX-License-Identifier: Apache-2.0
"""When does refreshing the draft head pay? Pure policies: observation in, decision out, once an RL step.

Acceptance length: mean tokens that a request emits in a decode step, 1 without drafts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from nemo_specrollout.config.draft_refresh import DraftRefreshConfig

FIRST_SURPLUS = 0.1
LEARNING_WEIGHT = 0.5
MIN_RECOVERY, MAX_RECOVERY = 0.05, 1.5
SMALLEST_FALL = 0.02
MAX_BACKOFF = 64


@dataclass(frozen=True)
class DecodeCosts:
    """What decoding a token costs: `plain_s` without drafts; with them a request's step takes `drafted_step_s`, its share
    of the batch's, however many of its drafts are accepted."""

    plain_s: float
    drafted_step_s: float

    @classmethod
    def measured(
        cls, rollout_s: float, plain_estimate_s: float | None, num_tokens: int, num_request_steps: int
    ) -> "DecodeCosts":
        """From a rollout, and what it would have taken without drafts, where that is known."""
        return cls((plain_estimate_s or rollout_s) / num_tokens, rollout_s / num_request_steps)

    def token_s(self, acceptance_length: float) -> float:
        """Seconds per token. Drafts that do not pay are not made."""
        return min(self.plain_s, self.drafted_step_s / max(acceptance_length, 1.0))


@dataclass(frozen=True)
class RefreshOutlook:
    """What the refreshes so far let expect of the next. Begins hopeful: all of the fall is won back, and a little more.

    `recovery`: share of the fall since the last publish that a refresh wins back. `surplus`: acceptance length that it
    wins beyond that. `refresh_s`: seconds it takes. `num_rejected`: candidates in a row that the gate did not let through.
    """

    refresh_s: float
    recovery: float = 1.0
    surplus: float = FIRST_SURPLUS
    num_rejected: int = 0

    def after_publish(
        self, length_before: float, length_at_last_publish: float, length_after: float, seconds: float
    ) -> "RefreshOutlook":
        """The outlook once a refresh of `seconds` took acceptance from `length_before` to `length_after`."""
        fall = length_at_last_publish - length_before
        recovery = self.recovery
        if fall >= SMALLEST_FALL:
            won_back = min(max((length_after - length_before) / fall, 0.0), MAX_RECOVERY)
            recovery = max(MIN_RECOVERY, _towards(self.recovery, won_back))
        # A head that falls short of the level at the last publish has no surplus; what it lacks is in the recovery.
        surplus = max(0.0, _towards(self.surplus, length_after - max(length_at_last_publish, length_before)))
        return RefreshOutlook(_towards(self.refresh_s, seconds), recovery, surplus)

    def after_rejection(self, seconds: float) -> "RefreshOutlook":
        """The outlook once the gate refused a candidate that took `seconds`: hopes halve."""
        recovery = max(MIN_RECOVERY, _towards(self.recovery, 0.0))
        return RefreshOutlook(
            _towards(self.refresh_s, seconds), recovery, _towards(self.surplus, 0.0), self.num_rejected + 1
        )


@dataclass(frozen=True)
class RefreshObservation:
    """Where the run stands after an RL step.

    `acceptance_length`: now, a decayed mean; `published_length`: the same right after the last publish, or at the start of
    the run. `tokens_per_step`, `steps_to_come`: generated tokens of an RL step, steps left. `steps_since_refresh`: since one
    was last tried. `run_s`, `waited_s`: seconds of the run so far, and of those it waited for refreshes. `cost_weight`: the
    share of a refresh's seconds that the run waits for; 0 if training fills idle time.
    """

    acceptance_length: float
    published_length: float
    tokens_per_step: float
    steps_to_come: int
    steps_since_refresh: int
    costs: DecodeCosts
    outlook: RefreshOutlook
    run_s: float
    waited_s: float = 0.0
    cost_weight: float = 1.0

    @property
    def cost_s(self) -> float:
        """Seconds that the run would wait for a refresh."""
        return self.outlook.refresh_s * self.cost_weight

    @property
    def expected_length(self) -> float:
        """Acceptance length expected right after a refresh."""
        fall = max(0.0, self.published_length - self.acceptance_length)
        return self.acceptance_length + self.outlook.recovery * fall + self.outlook.surplus

    @property
    def gain_s_per_step(self) -> float:
        """Seconds by which a step would be shorter with a refreshed head."""
        saved_s = self.costs.token_s(self.acceptance_length) - self.costs.token_s(self.expected_length)
        return self.tokens_per_step * saved_s


@dataclass(frozen=True)
class RefreshDecision:
    """Whether to refresh now. `gain_s`: what it would save until the run ends; `reason`: a sentence for the log."""

    refresh: bool
    gain_s: float
    reason: str


class RefreshTrigger(ABC):
    """Decides, once an RL step, whether to refresh; never beyond `max_time_share` of the run's time."""

    def __init__(self, max_time_share: float) -> None:
        self.max_time_share = max_time_share

    def decide(self, observed: RefreshObservation) -> RefreshDecision:
        wanted = self._decide(observed)
        waited_s, run_s = observed.waited_s + observed.cost_s, observed.run_s + observed.cost_s
        if not wanted.refresh or waited_s <= self.max_time_share * run_s:
            return wanted
        reason = (
            f"skipped: refreshes would have taken {waited_s:.3g} s of the run's {run_s:.3g} s, more than the share "
            f"{self.max_time_share} of it"
        )
        return replace(wanted, refresh=False, reason=reason)

    @abstractmethod
    def _decide(self, observed: RefreshObservation) -> RefreshDecision:
        """The decision, leaving aside the share of the run's time."""


class AutoTrigger(RefreshTrigger):
    """Refreshes when what the stale head has cost since the last refresh reaches what a refresh costs.

    That is the best moment where acceptance falls evenly, and never more than twice the cost of the best where it does
    not (the ski-rental rule). What is left of the run must also repay it, by `margin` more; at least `min_gap` steps lie
    between two refreshes, twice as many after each candidate in a row that the gate refused.
    """

    def __init__(self, max_time_share: float, margin: float = 0.25, min_gap: int = 2) -> None:
        super().__init__(max_time_share)
        self.margin, self.min_gap = margin, min_gap
        self._lost_s = 0.0
        self._since = 0

    def _decide(self, observed: RefreshObservation) -> RefreshDecision:
        if observed.steps_since_refresh <= self._since:  # one was done since the last decision
            self._lost_s = 0.0
        self._since = observed.steps_since_refresh
        self._lost_s += observed.gain_s_per_step
        gain_s, cost_s = observed.gain_s_per_step * observed.steps_to_come, observed.cost_s
        gap = self.min_gap * min(2**observed.outlook.num_rejected, MAX_BACKOFF)
        outlook = _outlook_sentence(observed, gain_s)
        if observed.steps_since_refresh < gap:
            after = " after a head that was refused" if observed.outlook.num_rejected else ""
            reason = f"skipped: {observed.steps_since_refresh} of at least {gap} steps since the last refresh{after}"
        elif gain_s <= (1.0 + self.margin) * cost_s:
            reason = f"skipped: {outlook}, too little"
        elif self._lost_s < cost_s:
            reason = f"skipped: {outlook}, but the fall has cost {self._lost_s:.2g} s so far; it is too early"
        else:
            return RefreshDecision(True, gain_s, f"refreshed: {outlook}")
        return RefreshDecision(False, gain_s, reason)


class FixedInterval(RefreshTrigger):
    """Refreshes every `interval` steps, come what may."""

    def __init__(self, interval: int, max_time_share: float = 1.0) -> None:
        super().__init__(max_time_share)
        self.interval = interval

    def _decide(self, observed: RefreshObservation) -> RefreshDecision:
        gain_s = observed.gain_s_per_step * observed.steps_to_come
        steps = f"{observed.steps_since_refresh} steps since the last refresh (interval: {self.interval})"
        if observed.steps_to_come == 0 or observed.steps_since_refresh < self.interval:
            return RefreshDecision(False, gain_s, f"skipped: {steps}, {observed.steps_to_come} to come")
        return RefreshDecision(True, gain_s, f"refreshed: {steps}")


class EveryStep(FixedInterval):
    """Refreshes after every step but the last."""

    def __init__(self, max_time_share: float = 1.0) -> None:
        super().__init__(1, max_time_share)


class Never(RefreshTrigger):
    """Keeps the head that there is."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def _decide(self, observed: RefreshObservation) -> RefreshDecision:
        return RefreshDecision(
            False, observed.gain_s_per_step * observed.steps_to_come, "skipped: the trigger is never"
        )


def build_trigger(config: DraftRefreshConfig) -> RefreshTrigger:
    """The policy that `config.trigger` names."""
    if config.trigger == "auto":
        return AutoTrigger(config.max_time_share, config.margin, config.min_gap)
    if config.trigger == "interval":
        return FixedInterval(config.interval, config.max_time_share)
    if config.trigger == "every_step":
        return EveryStep(config.max_time_share)
    if config.trigger == "never":
        return Never()
    raise ValueError(f"unknown trigger {config.trigger!r}")


def _towards(old: float, new: float) -> float:
    return old + LEARNING_WEIGHT * (new - old)


def _outlook_sentence(observed: RefreshObservation, gain_s: float) -> str:
    price = f"for {observed.cost_s:.2g} s of training" if observed.cost_weight else "and wait for no training"
    fell = "fell" if observed.acceptance_length < observed.published_length else "went"
    return (
        f"acceptance length {fell} from {observed.published_length:.2f} to {observed.acceptance_length:.2f}; at "
        f"{observed.tokens_per_step:,.0f} tokens a step the {observed.steps_to_come} steps left gain {gain_s:.2g} s "
        f"{price}"
    )
