# SPDX-License-Identifier: Apache-2.0
"""Watches a drafter with weights while it drafts: raises an alarm within a few steps, and turns a broken drafter off."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_specrollout.generation.device_reads import HostCopy
from nemo_specrollout.generation.drafting import Drafting
from nemo_specrollout.generation.head_health import head_health
from nemo_specrollout.scheduling.heads.canary import WEIGHT_CAUSES, Canary, ContextCanary, HeadHealth
from nemo_specrollout.telemetry.sample_stats import SampleStatsLog

logger = logging.getLogger(__name__)
CHECK_STEPS = 8
"""Engine steps between two checks of the counts."""


class HeadWatch:
    """Owns an engine's canaries and the alarms that they raised. The sample stats know the versions of policy and head.

    The counts are the draft board's. They reach the host one check late.

    A collapse of acceptance turns the drafter off until the next head or wake-up. A mere decline does not, nor does a failure
    in long contexts alone. If the drafter is asked only where it pays, a collapse without a known fault does not turn it off
    either: the tasks may have changed, so drafter and canary begin again.
    """

    def __init__(
        self, runner: Any, drafting: Drafting, sample_stats: SampleStatsLog, folder: Path | None, max_age: int | None
    ) -> None:
        """`folder`: the head in service; `max_age`: policy versions after which a head's age raises an alarm."""
        assert drafting.model is not None
        self._runner, self._model, self._sample_stats = runner, drafting.model, sample_stats
        self._canary, self._contexts = Canary(max_age=max_age), ContextCanary()
        self._folder = folder
        self._previous: Path | None = None
        board = drafting.board
        self._counts = HostCopy(board.tables.verified_DCK2[board.model])
        self._seen_CK2 = self._counts.values.copy()
        self._num_steps = 0
        self._alarms: list[dict[str, Any]] = []

    @property
    def age(self) -> int:
        """Weight updates since the head in service was trained for the policy."""
        return self._sample_stats.policy_version - self._sample_stats.head_version

    def began(self, event: str, **known: Any) -> None:
        """Starts a period after a refit, publish or wake, in which acceptance should be as before, or as the gate measured."""
        self._canary.begin(event, **known)
        self._contexts.begin(event, **known)
        if event != "refit":
            self._model.is_allowed = True

    def published(self, folder: Path, head_version: int, expected_length: float | None, num_positions: int) -> None:
        """Notes that the head of `folder`, trained for the policy of `head_version`, is now in service."""
        self._previous, self._folder = self._folder, folder
        self._contexts = ContextCanary()
        self._sample_stats.head_version = head_version
        self.began("publish", expected_length=expected_length, num_positions=num_positions)

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms since the last call, as plain values."""
        self._check()
        alarms, self._alarms = self._alarms, []
        return alarms

    def step_ended(self) -> None:
        """Counts an engine step, and checks the counts from time to time."""
        self._num_steps += 1
        if self._num_steps % CHECK_STEPS == 0:
            self._check()

    def _check(self) -> None:
        """Judges the drafts that were verified since the last check."""
        self._counts.refresh()
        new_CK2 = self._counts.values - self._seen_CK2
        self._seen_CK2 = self._counts.values.copy()
        drafted_CK, accepted_CK = new_CK2[..., 0], new_CK2[..., 1]
        context_alarm = self._contexts.observe(drafted_CK, accepted_CK, CHECK_STEPS)
        health = HeadHealth(age_in_versions=self.age)
        alarm = self._canary.observe(drafted_CK.sum(axis=0), accepted_CK.sum(axis=0), health, CHECK_STEPS)
        alarm = alarm or context_alarm
        if alarm is not None:
            health = head_health(self._runner, self._folder, self._previous, self.age)
            health = replace(health, fails_in_long_contexts=self._contexts.fails_in_long_contexts)
            self._raise(alarm.explained_by(health))

    def _raise(self, alarm: Any) -> None:
        """Records an alarm, and stops the drafter if it is broken."""
        is_collapse = self._canary.is_silent
        is_off = is_collapse and (alarm.cause in WEIGHT_CAUSES or not self._model.is_weighed)
        if is_off:
            self._model.forbid()
        elif is_collapse:
            self._model.begin_again()
            self._canary.begin_again()
            self._contexts = ContextCanary()
        logger.warning("specrollout: %s", alarm.sentence)
        self._alarms.append(
            {
                "event": alarm.event, "cause": alarm.cause, "seen": alarm.seen, "expected": alarm.expected,
                "drafted": alarm.num_drafted, "drafter_off": is_off, "sentence": alarm.sentence,
                "policy_version": self._sample_stats.policy_version, "head_version": self._sample_stats.head_version,
            }
        )  # fmt: skip
