# SPDX-License-Identifier: Apache-2.0
"""Decides whether to refresh the draft head after an RL step, for how long, and at which learning rate.

The acceptance length is the mean number of tokens by which a request grows in an engine step, which is 1 without drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_specrollout.config.block import DraftRefreshConfig
from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS

FIRST_SURPLUS = 0.1
"""Increase in acceptance length that the first refresh is expected to bring, in addition to recovering what was lost since the
last publish."""
LEARNING_WEIGHT = 0.5
"""Weight of the latest refresh in the averages of `RefreshOutlook`."""
MIN_RECOVERY = 0.05
MAX_RECOVERY = 1.5
MIN_FALL = 0.02
"""Minimum loss of acceptance length since the last publish from which `RefreshOutlook.recovery` is learned. Smaller losses are
mostly noise."""
MAX_BACKOFF = 64
"""Maximum factor by which `min_gap` grows after refused candidates."""
FIRST_REFRESH_S = 8.0
"""Assumed seconds of the first refresh."""
SHORTEST_S = 0.5
"""Minimum seconds of a refresh."""
SMOOTHING = 0.5
"""Weight of the latest RL step in the mean acceptance length."""
RATE_STEP = 3.0
"""Number by which the learning rate is divided after a candidate that was worse than the head in service."""
MIN_SHARE = 1e-3
"""Smallest factor by which `RefreshRate` multiplies the usual learning rate."""


@dataclass(frozen=True)
class DecodeCosts:
    """Seconds that decoding takes with and without drafts."""

    plain_s: float
    """Seconds per token without drafts."""
    drafted_step_s: float
    """Seconds of an engine step with drafts, divided by its number of requests. They do not depend on how many draft tokens
    are accepted."""

    @classmethod
    def measured(
        cls, rollout_s: float, plain_estimate_s: float | None, num_tokens: int, num_request_steps: int
    ) -> "DecodeCosts":
        """Returns the costs that were measured in a rollout of `num_tokens` tokens, which took `rollout_s` seconds.

        `plain_estimate_s` is the estimated duration of the same rollout without drafts, or None if it is not known.
        `num_request_steps` is the number of requests in an engine step, summed over the engine steps of the rollout.
        """
        return cls((plain_estimate_s or rollout_s) / num_tokens, rollout_s / num_request_steps)

    def token_s(self, acceptance_length: float) -> float:
        """Returns the seconds per token at an acceptance length. If decoding without drafts is faster, returns its seconds."""
        return min(self.plain_s, self.drafted_step_s / max(acceptance_length, 1.0))


@dataclass(frozen=True)
class RefreshOutlook:
    """Expected duration and gain of the next refresh, estimated from earlier refreshes.

    The first refresh is expected to recover the whole loss of acceptance and a little more.
    """

    refresh_s: float
    """Seconds that a refresh takes."""
    recovery: float = 1.0
    """Share of the lost acceptance length that a refresh recovers. The loss is counted from the last publish."""
    surplus: float = FIRST_SURPLUS
    """Acceptance length that a refresh gains beyond the level of the last publish."""
    num_rejected: int = 0
    """Number of candidates in a row that the publish gate has refused."""

    def after_publish(
        self, length_before: float, length_at_last_publish: float, length_after: float, seconds: float
    ) -> "RefreshOutlook":
        """Returns the new outlook after a refresh that took `seconds` and whose head was published.

        The acceptance length was `length_at_last_publish` right after the previous publish. It then fell to `length_before`,
        and is `length_after` with the new head.
        """
        fall = length_at_last_publish - length_before
        recovery = self.recovery
        if fall >= MIN_FALL:
            won_back = min(max((length_after - length_before) / fall, 0.0), MAX_RECOVERY)
            recovery = max(MIN_RECOVERY, _towards(self.recovery, won_back))
        # A head below the level of the last publish has no surplus, because the recovery accounts for the difference.
        surplus = max(0.0, _towards(self.surplus, length_after - max(length_at_last_publish, length_before)))
        return RefreshOutlook(_towards(self.refresh_s, seconds), recovery, surplus)

    def after_rejection(self, seconds: float) -> "RefreshOutlook":
        """Returns the new outlook after a refresh that took `seconds` and whose candidate was refused.

        The expected gains are halved.
        """
        recovery = max(MIN_RECOVERY, _towards(self.recovery, 0.0))
        return RefreshOutlook(
            _towards(self.refresh_s, seconds), recovery, _towards(self.surplus, 0.0), self.num_rejected + 1
        )


@dataclass(frozen=True)
class RefreshDecision:
    """The decision whether to refresh the head."""

    refresh: bool
    gain_s: float
    """Seconds that a refresh is expected to save until the run ends."""
    reason: str
    """Sentence that says whether the head is refreshed, and why."""


def _towards(old: float, new: float) -> float:
    return old + LEARNING_WEIGHT * (new - old)


@dataclass(frozen=True)
class StepFacts:
    """Measurements of a finished RL step, from which `RefreshSchedule` decides about a refresh."""

    acceptance_length: float | None
    """The head's acceptance length in tokens per engine step, or None if the head drafted nothing."""
    num_tokens: int
    seconds: float
    """Seconds that the RL step took."""
    steps_to_come: int
    """Number of RL steps that the run still has."""
    costs: DecodeCosts
    head_share: float = 1.0
    """Share of the request steps in which the head drafted. A request step is one request in one engine step."""


def head_use(
    proposed: Mapping[str, Sequence[int]], accepted: Mapping[str, Sequence[int]], num_request_steps: int
) -> tuple[float | None, float]:
    """Returns the acceptance length of a head in a rollout, and the share of the request steps in which it drafted.

    A request step is one request in one engine step. `proposed` and `accepted` have, by a drafter's name, the counts of its
    draft tokens at each position. The acceptance length is that of the request steps in which the head drafted. If it never
    drafted, returns (None, 0.0).
    """
    head = next((name for name in proposed if name in MODEL_DRAFTERS), None)
    if head is None or not proposed[head][0]:
        return None, 0.0
    num_drafted = proposed[head][0]
    return 1.0 + sum(accepted[head]) / num_drafted, num_drafted / num_request_steps


class RefreshSchedule:
    """Decides after each RL step whether to refresh the head, as `config.trigger` says. Owns the run's history of refreshes.

    With the trigger `auto`, the head is refreshed when its loss of acceptance has cost as much time as a refresh takes,
    counted from the last refresh. This is the ski-rental rule, which never costs more than twice the optimum. In addition, the
    rest of the run must save more than the time of the refresh plus the share `config.margin` of it. At least `config.min_gap`
    RL steps must lie between two refreshes. This number doubles with each further candidate in a row that the publish gate
    refuses.

    The gain depends on how often the new head will draft. Before the first publish, it is expected to draft in every engine
    step. Afterwards it is expected to draft as often as the published head did in the RL step in which it drafted most. If
    `in_background` is true, the run does not wait for training. Then `max_time_share` limits the trainer's share of the time,
    and a refresh may take as long as an RL step.
    """

    def __init__(self, config: DraftRefreshConfig, in_background: bool = False) -> None:
        self._config = config
        self._in_background = in_background
        self.outlook = RefreshOutlook(config.max_train_seconds or FIRST_REFRESH_S)
        self.length: float | None = None
        """Moving average of the head's acceptance length, or None if the head has not drafted since the last publish."""
        self.published_length: float | None = None
        """Acceptance length right after the last publish, or at the start of the run."""
        self.steps_since = 0
        """Number of RL steps since the last refresh, published or not."""
        self.run_s = 0.0
        self.waited_s = 0.0
        """Seconds that all refreshes so far have taken."""
        self._share: float | None = None
        self._step_s = self._lost_s = 0.0

    def after_step(self, facts: StepFacts) -> RefreshDecision:
        """Returns the decision whether to refresh the head after the RL step of `facts`. Call it once after each RL step."""
        length = facts.acceptance_length
        if length is not None:
            self.length = length if self.length is None else self.length + SMOOTHING * (length - self.length)
            self.published_length = self.published_length or length
        if self._share is not None:
            self._share = max(self._share, facts.head_share)
        self.steps_since += 1
        self.run_s += facts.seconds
        self._step_s = facts.seconds
        num_tokens = facts.num_tokens * (1.0 if self._share is None else self._share)
        return self.decide(num_tokens, facts.steps_to_come, facts.costs)

    def decide(self, num_tokens: float, steps_to_come: int, costs: DecodeCosts) -> RefreshDecision:
        """Returns the decision whether to refresh the head now.

        `num_tokens` is the expected number of tokens per RL step that are decoded while the new head drafts. `steps_to_come`
        is the number of RL steps that the run still has.
        """
        length = self.length or 1.0
        cost_s = 0.0 if self._in_background else self.outlook.refresh_s
        fall = max(0.0, (self.published_length or 1.0) - length)
        expected_length = length + self.outlook.recovery * fall + self.outlook.surplus
        gain_s_per_step = num_tokens * (costs.token_s(length) - costs.token_s(expected_length))
        gain_s = gain_s_per_step * steps_to_come
        # The first step after a refresh starts a new sum.
        self._lost_s = gain_s_per_step + (self._lost_s if self.steps_since > 1 else 0.0)
        price = "and wait for no training" if self._in_background else f"for {cost_s:.2g} s of training"
        gain = f"at {num_tokens:,.0f} tokens per step the {steps_to_come} steps left gain {gain_s:.2g} s {price}"
        if self._config.trigger == "auto":
            refresh, reason = self._judge_gain(gain_s, cost_s, gain)
        else:
            refresh, reason = self._judge_interval(steps_to_come)
        waited_s = self.waited_s + cost_s
        run_s = self.run_s + cost_s
        if refresh and waited_s > self._config.max_time_share * run_s:
            refresh = False
            reason = (
                f"refreshes would have taken {waited_s:.3g} s of the run's {run_s:.3g} s, more than the share "
                f"{self._config.max_time_share} of it"
            )
        return RefreshDecision(refresh, gain_s, f"{'refreshed' if refresh else 'skipped'}: {reason}")

    def _judge_interval(self, steps_to_come: int) -> tuple[bool, str]:
        """Returns whether enough RL steps have passed since the last refresh, and the reason. Ignores `max_time_share`."""
        interval = self._config.interval
        steps = f"{self.steps_since} steps since the last refresh (interval: {interval})"
        if steps_to_come == 0 or self.steps_since < interval:
            return False, f"{steps}, {steps_to_come} to come"
        return True, steps

    def _judge_gain(self, gain_s: float, cost_s: float, gain: str) -> tuple[bool, str]:
        """Returns whether a refresh saves enough time, and the reason. Ignores `max_time_share`.

        `gain_s` is the time that it saves, and `gain` says the same in words. `cost_s` is the time that the run waits for it.
        """
        gap = self._config.min_gap * min(2**self.outlook.num_rejected, MAX_BACKOFF)
        if self.steps_since < gap:
            after = " after a head that was refused" if self.outlook.num_rejected else ""
            return False, f"{self.steps_since} of at least {gap} steps since the last refresh{after}"
        length = self.length or 1.0
        best = self.published_length or 1.0
        outlook = f"acceptance length {'fell' if length < best else 'went'} from {best:.2f} to {length:.2f}; {gain}"
        if gain_s <= (1.0 + self._config.margin) * cost_s:
            return False, f"{outlook}, too little"
        if self._lost_s < cost_s:
            return False, f"{outlook}, but the fall has cost {self._lost_s:.2g} s so far; it is too early"
        return True, outlook

    def budget_s(self) -> float:
        """Returns how many seconds the next refresh may train, so that all refreshes stay within `max_time_share`."""
        share = self._config.max_time_share
        usual_s = max(FIRST_REFRESH_S, self._step_s) if self._in_background else FIRST_REFRESH_S
        wanted_s = self._config.max_train_seconds or usual_s
        if share >= 1.0:
            return wanted_s
        left_s = share * self.run_s - self.waited_s
        return max(SHORTEST_S, min(wanted_s, left_s if self._in_background else left_s / (1.0 - share)))

    def refreshed(self, seconds: float, gain: float | None) -> None:
        """Notes that a refresh has ended, which took `seconds`.

        `gain` is `Refresh.gain`, which is None if the candidate was refused.
        """
        self.run_s += 0.0 if self._in_background else seconds
        self.waited_s += seconds
        self.steps_since = 0
        if gain is None or self.length is None:
            self.outlook = self.outlook.after_rejection(seconds)
            return
        after = 1.0 + (self.length - 1.0) * gain
        self.outlook = self.outlook.after_publish(self.length, self.published_length or self.length, after, seconds)
        self.length = self.published_length = None
        self._share = 0.0


class RefreshRate:
    """Owns `share`, the factor by which the usual learning rate is multiplied for the next refresh.

    It is needed because a learning rate that suits a new head makes a converged head worse, and the few steps of a refresh do
    not repair that.
    """

    def __init__(self) -> None:
        self.share = 1.0

    def judged(self, difference: float, published: bool) -> None:
        """Adjusts `share` after a candidate was judged.

        `share` grows after a publish. It falls if the candidate was not published and `difference`, which is
        `Refresh.difference`, is below 0. Otherwise it stays as it is, also for NaN.
        """
        if published:
            self.share = min(1.0, self.share * RATE_STEP**0.5)
        elif difference < 0.0:
            self.share = max(MIN_SHARE, self.share / RATE_STEP)
