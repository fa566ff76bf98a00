# SPDX-License-Identifier: Apache-2.0
"""Schedule of a run's head refreshes: feeds the trigger, learns from each refresh, and adapts the learning rate.

Acceptance length: mean tokens that a request emits in a decode step, 1 without drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_specrollout.config.block import DraftRefreshConfig
from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.scheduling.heads.refresh_trigger import (
    DecodeCosts,
    RefreshDecision,
    RefreshObservation,
    RefreshOutlook,
    build_trigger,
)

FIRST_REFRESH_S = 8.0
"""Assumed seconds of the first refresh."""
SHORTEST_S = 0.5
"""Minimum seconds of a refresh."""
SMOOTHING = 0.5
"""Weight of the latest step in the mean acceptance length."""
RATE_STEP = 3.0
"""Factor by which a worse candidate lowers the learning rate."""
LEAST_SHARE = 1e-3
"""Minimum share of the usual learning rate."""


@dataclass(frozen=True)
class StepFacts:
    """Facts about a finished RL step."""

    acceptance_length: float | None
    """The head's acceptance length (`HeadUse`); None if the head drafted nothing."""
    num_tokens: int
    """Generated tokens."""
    seconds: float
    """Duration of the step."""
    steps_to_come: int
    costs: DecodeCosts
    head_share: float = 1.0
    """Share of the requests' decode steps in which the head drafted."""


@dataclass(frozen=True)
class HeadUse:
    """Use of a head in a rollout."""

    acceptance_length: float | None
    """Mean tokens of a request's step in which the head drafted, whatever other drafters did in other steps."""
    share: float
    """Share of all requests' decode steps in which the head drafted."""

    @classmethod
    def counted(
        cls, proposed: Mapping[str, Sequence[int]], accepted: Mapping[str, Sequence[int]], num_request_steps: int
    ) -> "HeadUse":
        """Counts the use from each drafter's draft tokens by position, all and accepted."""
        head = next((name for name in proposed if name in MODEL_DRAFTERS), None)
        if head is None or not proposed[head][0]:
            return cls(None, 0.0)
        num_drafted = proposed[head][0]
        return cls(1.0 + sum(accepted[head]) / num_drafted, num_drafted / num_request_steps)


class RefreshSchedule:
    """Decides after each RL step whether to refresh. Owns the trigger and the history of the run's refreshes.

    Example: `decision = schedule.after_step(facts)`. If it says refresh, train for `schedule.budget_s()` seconds and call
    `schedule.refreshed(seconds, gain)`. Before the first publish, a better head is expected to draft in every step.
    Afterwards it is expected to draft in the largest share of steps that the published head reached.

    With `in_background`, the run does not wait for training. Then `max_time_share` limits the trainer's share of the time, and
    a refresh may take as long as an RL step.
    """

    def __init__(self, config: DraftRefreshConfig, in_background: bool = False) -> None:
        self._config, self._in_background = config, in_background
        self._trigger = build_trigger(config)
        self._outlook = RefreshOutlook(config.max_train_seconds or FIRST_REFRESH_S)
        self._length: float | None = None
        self._published_length: float | None = None
        self._share: float | None = None
        self._steps_since = 0
        self._run_s = self._waited_s = self._step_s = 0.0

    def after_step(self, facts: StepFacts) -> RefreshDecision:
        """Returns the decision with its reason. Call it once in each RL step."""
        length = facts.acceptance_length
        if length is not None:
            self._length = length if self._length is None else self._length + SMOOTHING * (length - self._length)
            self._published_length = self._published_length or length
        if self._share is not None:
            self._share = max(self._share, facts.head_share)
        self._steps_since += 1
        self._run_s += facts.seconds
        self._step_s = facts.seconds
        return self._trigger.decide(
            RefreshObservation(
                acceptance_length=self._length or 1.0,
                published_length=self._published_length or 1.0,
                tokens_per_step=facts.num_tokens * (1.0 if self._share is None else self._share),
                steps_to_come=facts.steps_to_come,
                steps_since_refresh=self._steps_since,
                costs=facts.costs,
                outlook=self._outlook,
                run_s=self._run_s,
                waited_s=self._waited_s,
                cost_weight=0.0 if self._in_background else 1.0,
            )
        )

    def budget_s(self) -> float:
        """Returns the maximum training seconds of the next refresh: its share of the run, minus the time already used."""
        share = self._config.max_time_share
        usual_s = max(FIRST_REFRESH_S, self._step_s) if self._in_background else FIRST_REFRESH_S
        wanted_s = self._config.max_train_seconds or usual_s
        if share >= 1.0:
            return wanted_s
        left_s = share * self._run_s - self._waited_s
        return max(SHORTEST_S, min(wanted_s, left_s if self._in_background else left_s / (1.0 - share)))

    def refreshed(self, seconds: float, gain: float | None) -> None:
        """Notes a finished refresh.

        `gain` is the published head's number of right draft tokens relative to the previous head. None if it was refused.
        """
        self._run_s += 0.0 if self._in_background else seconds
        self._waited_s += seconds
        self._steps_since = 0
        if gain is None or self._length is None:
            self._outlook = self._outlook.after_rejection(seconds)
            return
        after = 1.0 + (self._length - 1.0) * gain
        self._outlook = self._outlook.after_publish(
            self._length, self._published_length or self._length, after, seconds
        )
        self._length = self._published_length = None
        self._share = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds of all refreshes."""
        return self._waited_s


class RefreshRate:
    """Share of the usual learning rate that the next refresh takes. Owns the share.

    A converged head gets worse at a rate that suits an unfinished head, and a few steps do not repair it. Therefore a worse
    candidate lowers the share by `RATE_STEP`. A published one raises it by the root of `RATE_STEP`, up to 1.
    Example: train at `usual * rate.share`, then call `rate.judged(difference, published)`.
    """

    def __init__(self) -> None:
        self.share = 1.0

    def judged(self, difference: float, published: bool) -> None:
        """Adjusts the share after a candidate was judged.

        `difference` is the candidate's held-out acceptance length minus the current head's. NaN changes nothing.
        """
        if published:
            self.share = min(1.0, self.share * RATE_STEP**0.5)
        elif difference < 0.0:
            self.share = max(LEAST_SHARE, self.share / RATE_STEP)
