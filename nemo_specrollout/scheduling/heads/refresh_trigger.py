# SPDX-License-Identifier: Apache-2.0
"""Refresh triggers: pure policies that decide once in each RL step whether to refresh the draft head.

Acceptance length: mean tokens that a request emits in a decode step, 1 without drafts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from nemo_specrollout.config.block import DraftRefreshConfig

FIRST_SURPLUS = 0.1
"""Acceptance length that the first refresh is expected to win beyond the loss since the last publish."""
LEARNING_WEIGHT = 0.5
"""Weight of the latest refresh in the outlook."""
MIN_RECOVERY = 0.05
MAX_RECOVERY = 1.5
SMALLEST_FALL = 0.02
"""Loss of acceptance length below which recovery cannot be measured."""
MAX_BACKOFF = 64
"""Maximum factor on `min_gap` after refused candidates."""


@dataclass(frozen=True)
class DecodeCosts:
    """Cost of decoding."""

    plain_s: float
    """Seconds of a token without drafts."""
    drafted_step_s: float
    """Seconds of a request's step with drafts: its share of the batch's step, however many drafts are accepted."""

    @classmethod
    def measured(
        cls, rollout_s: float, plain_estimate_s: float | None, num_tokens: int, num_request_steps: int
    ) -> "DecodeCosts":
        """Returns the costs of a measured rollout. `plain_estimate_s` is its duration without drafts, if known."""
        return cls((plain_estimate_s or rollout_s) / num_tokens, rollout_s / num_request_steps)

    def token_s(self, acceptance_length: float) -> float:
        """Returns the seconds of a token. Drafts that do not pay are not made."""
        return min(self.plain_s, self.drafted_step_s / max(acceptance_length, 1.0))


@dataclass(frozen=True)
class RefreshOutlook:
    """Expected result of the next refresh. At first, all of the loss is expected to be won back, and a little more."""

    refresh_s: float
    """Seconds of a refresh."""
    recovery: float = 1.0
    """Share of the loss since the last publish that a refresh wins back."""
    surplus: float = FIRST_SURPLUS
    """Acceptance length that a refresh wins beyond that."""
    num_rejected: int = 0
    """Candidates in a row that the gate refused."""

    def after_publish(
        self, length_before: float, length_at_last_publish: float, length_after: float, seconds: float
    ) -> "RefreshOutlook":
        """Returns the outlook after a refresh of `seconds` that changed acceptance from `length_before` to `length_after`."""
        fall = length_at_last_publish - length_before
        recovery = self.recovery
        if fall >= SMALLEST_FALL:
            won_back = min(max((length_after - length_before) / fall, 0.0), MAX_RECOVERY)
            recovery = max(MIN_RECOVERY, _towards(self.recovery, won_back))
        # A head below the level of the last publish has no surplus. The recovery accounts for the difference.
        surplus = max(0.0, _towards(self.surplus, length_after - max(length_at_last_publish, length_before)))
        return RefreshOutlook(_towards(self.refresh_s, seconds), recovery, surplus)

    def after_rejection(self, seconds: float) -> "RefreshOutlook":
        """Returns the outlook after the gate refused a candidate of `seconds`: expected gains halve."""
        recovery = max(MIN_RECOVERY, _towards(self.recovery, 0.0))
        return RefreshOutlook(
            _towards(self.refresh_s, seconds), recovery, _towards(self.surplus, 0.0), self.num_rejected + 1
        )


@dataclass(frozen=True)
class RefreshObservation:
    """State of a run after an RL step."""

    acceptance_length: float
    """Current acceptance length, a decayed mean."""
    published_length: float
    """Acceptance length right after the last publish, or at the start of the run."""
    tokens_per_step: float
    """Generated tokens of an RL step."""
    steps_to_come: int
    steps_since_refresh: int
    """RL steps since the last refresh, published or not."""
    costs: DecodeCosts
    outlook: RefreshOutlook
    run_s: float
    """Seconds of the run so far."""
    waited_s: float = 0.0
    """Seconds of these that the run waited for refreshes."""
    cost_weight: float = 1.0
    """Share of a refresh's seconds that the run waits for; 0 if training fills idle time."""

    @property
    def cost_s(self) -> float:
        """Seconds that the run waits for a refresh."""
        return self.outlook.refresh_s * self.cost_weight

    @property
    def expected_length(self) -> float:
        """Expected acceptance length right after a refresh."""
        fall = max(0.0, self.published_length - self.acceptance_length)
        return self.acceptance_length + self.outlook.recovery * fall + self.outlook.surplus

    @property
    def gain_s_per_step(self) -> float:
        """Seconds by which a refreshed head shortens an RL step."""
        saved_s = self.costs.token_s(self.acceptance_length) - self.costs.token_s(self.expected_length)
        return self.tokens_per_step * saved_s


@dataclass(frozen=True)
class RefreshDecision:
    """Decision about a refresh."""

    refresh: bool
    gain_s: float
    """Seconds that a refresh saves until the run ends."""
    reason: str
    """Sentence for the log."""


class RefreshTrigger(ABC):
    """Decides once in each RL step whether to refresh. Refreshes never take more than `max_time_share` of the run's time."""

    def __init__(self, max_time_share: float) -> None:
        self.max_time_share = max_time_share

    def decide(self, observed: RefreshObservation) -> RefreshDecision:
        """Returns the decision with its reason."""
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
        """Returns the decision without regard to `max_time_share`."""


class AutoTrigger(RefreshTrigger):
    """Refreshes when the stale head has cost as much time since the last refresh as a refresh takes.

    This ski-rental rule is optimal if acceptance falls evenly, and otherwise never costs more than twice the optimum. The rest
    of the run must also repay the refresh with `margin` to spare. At least `min_gap` steps lie between two refreshes. The gap
    doubles after each candidate in a row that the gate refused.
    """

    def __init__(self, max_time_share: float, margin: float = 0.25, min_gap: int = 2) -> None:
        super().__init__(max_time_share)
        self.margin, self.min_gap = margin, min_gap
        self._lost_s = 0.0
        self._since = 0

    def _decide(self, observed: RefreshObservation) -> RefreshDecision:
        if observed.steps_since_refresh <= self._since:
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
    """Refreshes every `interval` steps, whatever the gain."""

    def __init__(self, interval: int, max_time_share: float = 1.0) -> None:
        super().__init__(max_time_share)
        self.interval = interval

    def _decide(self, observed: RefreshObservation) -> RefreshDecision:
        gain_s = observed.gain_s_per_step * observed.steps_to_come
        steps = f"{observed.steps_since_refresh} steps since the last refresh (interval: {self.interval})"
        if observed.steps_to_come == 0 or observed.steps_since_refresh < self.interval:
            return RefreshDecision(False, gain_s, f"skipped: {steps}, {observed.steps_to_come} to come")
        return RefreshDecision(True, gain_s, f"refreshed: {steps}")


class Never(RefreshTrigger):
    """Never refreshes."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def _decide(self, observed: RefreshObservation) -> RefreshDecision:
        return RefreshDecision(
            False, observed.gain_s_per_step * observed.steps_to_come, "skipped: the trigger is never"
        )


def build_trigger(config: DraftRefreshConfig) -> RefreshTrigger:
    """Returns the policy that `config.trigger` names."""
    if config.trigger == "auto":
        return AutoTrigger(config.max_time_share, config.margin, config.min_gap)
    if config.trigger == "interval":
        return FixedInterval(config.interval, config.max_time_share)
    if config.trigger == "every_step":
        return FixedInterval(1, config.max_time_share)
    return Never()


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
