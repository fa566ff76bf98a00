# SPDX-License-Identifier: Apache-2.0
"""Watches the engine's drafter with weights while it drafts: an alarm within a few steps, and a broken drafter off."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_specrollout.generation.head_loading import head_health
from nemo_specrollout.generation.host_copy import HostCopy
from nemo_specrollout.generation.sample_stats import SampleStatsLog
from nemo_specrollout.generation.speculator import Drafting
from nemo_specrollout.scheduling.heads.canary import WEIGHT_CAUSES, Canary, HeadHealth
from nemo_specrollout.scheduling.heads.context_canary import ContextCanary

logger = logging.getLogger(__name__)
STEPS = 8
"""Engine steps from one look at the counts to the next."""


class HeadWatch:
    """Owns the canaries of an engine and the alarms they raised; the sample stats have the versions of policy and head.

    The counts are the draft board's, and come from the device a look late. A collapse turns the drafter off until the next
    head or wake; a mere decline does not, nor does a failure in long contexts alone. Nor does a collapse without a known fault
    where the drafter is asked only as far as that pays: tasks may have changed, so drafter and canary begin again.
    """

    def __init__(
        self, runner: Any, drafting: Drafting, sample_stats: SampleStatsLog, folder: Path | None, max_age: int | None
    ) -> None:
        assert drafting.model is not None
        self._runner, self._model, self._sample_stats = runner, drafting.model, sample_stats
        self._canary, self._contexts = Canary(max_age=max_age), ContextCanary()
        self._folder = folder
        self._previous: Path | None = None
        board = drafting.board
        self._counts = HostCopy(board.verified_DCK2[board.model])
        self._seen_CK2 = self._counts.values.copy()
        self._num_steps = 0
        self.alarms: list[dict[str, Any]] = []

    @property
    def age(self) -> int:
        """Weight updates since the head in service was made for the policy."""
        return self._sample_stats.policy_version - self._sample_stats.head_version

    def began(self, event: str, **known: Any) -> None:
        """After a refit, publish or wake: acceptance should be what it was, or what the gate measured."""
        self._canary.begin(event, **known)
        self._contexts.begin(event, **known)
        if event != "refit":
            self._model.is_allowed = True

    def published(self, folder: Path, head_version: int, expected_length: float | None, num_positions: int) -> None:
        """The head of `folder` is in service, made for the policy of `head_version`."""
        self._previous, self._folder = self._folder, folder
        self._contexts = ContextCanary()
        self._sample_stats.head_version = head_version
        self.began("publish", expected_length=expected_length, num_positions=num_positions)

    def take_alarms(self) -> list[dict[str, Any]]:
        """Those since last asked, as plain values."""
        self.look()
        alarms, self.alarms = self.alarms, []
        return alarms

    def stepped(self) -> None:
        """An engine step is over."""
        self._num_steps += 1
        if self._num_steps % STEPS == 0:
            self.look()

    def look(self) -> None:
        """Judges what has been verified since the last look."""
        self._counts.refresh()
        new_CK2 = self._counts.values - self._seen_CK2
        self._seen_CK2 = self._counts.values.copy()
        drafted_CK, accepted_CK = new_CK2[..., 0], new_CK2[..., 1]
        far = self._contexts.observe(drafted_CK, accepted_CK, STEPS)
        health = HeadHealth(age_in_versions=self.age)
        alarm = self._canary.observe(drafted_CK.sum(axis=0), accepted_CK.sum(axis=0), health, STEPS) or far
        if alarm is None:
            return
        health = head_health(self._runner, self._folder, self._previous, self.age)
        alarm = alarm.explained_by(replace(health, fails_in_long_contexts=self._contexts.fails_in_long_contexts))
        is_collapse = self._canary.is_silent
        is_off = is_collapse and (alarm.cause in WEIGHT_CAUSES or not self._model.is_weighed)
        if is_off:
            self._model.forbid()
        elif is_collapse:
            self._model.begin_again()
            self._canary.begin_again()
            self._contexts = ContextCanary()
        logger.warning("specrollout: %s", alarm.sentence)
        self.alarms.append(
            {
                "event": alarm.event, "cause": alarm.cause, "seen": alarm.seen, "expected": alarm.expected,
                "drafted": alarm.num_drafted, "drafter_off": is_off, "sentence": alarm.sentence,
                "policy_version": self._sample_stats.policy_version, "head_version": self._sample_stats.head_version,
            }
        )  # fmt: skip
