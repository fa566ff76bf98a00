# SPDX-License-Identifier: Apache-2.0
"""A run's refreshes, one after the other: what the trigger is told, and what is learned from how each went. Pure.

Acceptance length: mean tokens that a request emits in a decode step, 1 without drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_specrollout.config.draft_refresh import DraftRefreshConfig
from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.scheduling.heads.refresh_trigger import (
    DecodeCosts,
    RefreshDecision,
    RefreshObservation,
    RefreshOutlook,
    build_trigger,
)

FIRST_REFRESH_S = 8.0
"""Seconds that a refresh is thought to take before one was done."""
SMOOTHING = 0.5
SHORTEST_S = 0.5


@dataclass(frozen=True)
class StepFacts:
    """An RL step: the head's acceptance length (`HeadUse`; None if it drafted nothing), generated tokens, seconds, steps to
    come, what decoding costs, and the share of the requests' steps in which the head drafted."""

    acceptance_length: float | None
    num_tokens: int
    seconds: float
    steps_to_come: int
    costs: DecodeCosts
    head_share: float = 1.0


@dataclass(frozen=True)
class HeadUse:
    """What a head did in a rollout: `acceptance_length`, mean tokens of a request's step in which it drafted, whatever other
    drafters did in the rest; `share` of all requests' steps that it drafted for."""

    acceptance_length: float | None
    share: float

    @classmethod
    def counted(
        cls, proposed: Mapping[str, Sequence[int]], accepted: Mapping[str, Sequence[int]], num_request_steps: int
    ) -> "HeadUse":
        """From the draft tokens of each drafter by position, and those of them that were accepted."""
        head = next((name for name in proposed if name in MODEL_DRAFTERS), None)
        if head is None or not proposed[head][0]:
            return cls(None, 0.0)
        num_drafted = proposed[head][0]
        return cls(1.0 + sum(accepted[head]) / num_drafted, num_drafted / num_request_steps)


class RefreshSchedule:
    """Decides after each RL step whether to refresh; owns the trigger and what it has seen of the run.

    Example: `decision = schedule.after_step(facts)`; if it says refresh, train for `schedule.budget_s()` and tell
    `schedule.refreshed(seconds, gain)`. A better head is hoped to draft in every step, until one was published: from then on
    in as large a share of them as that one did at best.

    `in_background`: the run goes on while a head is trained, and waits for none; what is bounded is then the trainer's share
    of the time, and a refresh may take as long as an RL step.
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
        """The decision, with its reason; asked once an RL step."""
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
        """The longest that the next refresh may train: its share of the run so far, less what is used up."""
        share = self._config.max_time_share
        usual_s = max(FIRST_REFRESH_S, self._step_s) if self._in_background else FIRST_REFRESH_S
        wanted_s = self._config.max_train_seconds or usual_s
        if share >= 1.0:
            return wanted_s
        left_s = share * self._run_s - self._waited_s
        return max(SHORTEST_S, min(wanted_s, left_s if self._in_background else left_s / (1.0 - share)))

    def refreshed(self, seconds: float, gain: float | None) -> None:
        """A refresh took so long; the head published makes `gain` times as many draft tokens right as the one before,
        None if it was refused."""
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
        """Seconds that refreshes took."""
        return self._waited_s
