# SPDX-License-Identifier: Apache-2.0
"""Watches the engine's drafter with weights while it drafts: an alarm within the step, and the drafter off."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.generation.head_loading import head_health
from nemo_specrollout.generation.router import Router
from nemo_specrollout.scheduling.canary import Canary, HeadHealth

logger = logging.getLogger(__name__)


class HeadWatch:
    """Owns the canary of an engine and the alarms that were raised; the versions of policy and head are the router's stamps'.

    A collapse turns the drafter off until the next head or wake; a mere decline does not.
    """

    def __init__(self, runner: Any, router: Router, folder: Path | None, max_age: int | None) -> None:
        self._runner, self._router = runner, router
        self._canary = Canary(max_age=max_age)
        self._folder = folder
        self._previous: Path | None = None
        self.alarms: list[dict[str, Any]] = []
        router.on_model_outcome = self._observe

    @property
    def age(self) -> int:
        """Weight updates since the head in service was made for the policy."""
        return self._router.stamps.policy_version - self._router.stamps.head_version

    def began(self, event: str, **known: Any) -> None:
        """After a refit, publish or wake: acceptance should be what it was, or what the gate measured."""
        self._canary.begin(event, **known)
        if event != "refit":
            self._router.may_ask_model = True

    def published(self, folder: Path, head_version: int, expected_length: float | None, num_positions: int) -> None:
        """The head of `folder` is in service, made for the policy of `head_version`."""
        self._previous, self._folder = self._folder, folder
        self._router.stamps.head_version = head_version
        self.began("publish", expected_length=expected_length, num_positions=num_positions)

    def take_alarms(self) -> list[dict[str, Any]]:
        """Those since last asked, as plain values."""
        alarms, self.alarms = self.alarms, []
        return alarms

    def _observe(self, drafted_K: np.ndarray, accepted_K: np.ndarray) -> None:
        alarm = self._canary.observe(drafted_K, accepted_K, HeadHealth(age_in_versions=self.age))
        if alarm is None:
            return
        alarm = alarm.explained_by(head_health(self._runner, self._folder, self._previous, self.age))
        is_collapse = self._canary.is_silent
        if is_collapse:
            self._router.may_ask_model = False
        logger.warning("specrollout: %s", alarm.sentence)
        self.alarms.append(
            {
                "event": alarm.event, "cause": alarm.cause, "seen": alarm.seen, "expected": alarm.expected,
                "drafted": alarm.num_drafted, "drafter_off": is_collapse, "sentence": alarm.sentence,
                "policy_version": self._router.stamps.policy_version, "head_version": self._router.stamps.head_version,
            }
        )  # fmt: skip
