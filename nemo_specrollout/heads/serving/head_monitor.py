# SPDX-License-Identifier: Apache-2.0
"""Watches a drafter with weights while it drafts, raises an alarm if acceptance falls, and turns a broken drafter off.

The counts of verified and accepted drafts show within a few engine steps that something is wrong. The weights are read only
after an alarm, to find the cause.
"""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from nemo_specrollout.drafters.participant import Participant
from nemo_specrollout.generation.engine.transfers import HostCopy
from nemo_specrollout.heads.decisions.canary import WEIGHT_CAUSES, Canary, HeadHealth
from nemo_specrollout.heads.serving.head_service import HeadService, ServedDrafter
from nemo_specrollout.telemetry.sample_stats import SampleStatsLog

logger = logging.getLogger(__name__)
CHECK_STEPS = 8
"""Number of engine steps after which the canary gets the new counts of verified and accepted draft tokens."""


class HeadMonitor(Participant):
    """Owns an engine's canary, which watches the acceptance of a drafter with weights, and the alarms that the canary raised.

    The canary gets the counts of verified and accepted draft tokens from the draft board. They reach the host one check late.

    There are three kinds of alarm. If acceptance has collapsed and the drafter has a fault, the drafter is turned off until
    the next head is loaded or the engine wakes up. If acceptance has collapsed without a known fault, the tasks may have
    changed, so the drafter and the canary only forget what they have learned. If acceptance has only declined, nothing
    changes.
    """

    def __init__(
        self, service: HeadService, model: ServedDrafter, samples: SampleStatsLog, max_age: int | None = None
    ) -> None:
        """Prepares to watch the drafter `model`, into which `service` loads heads.

        `max_age` is the number of refits after which a head is reported as old, or None for never.
        """
        self._service = service
        self._model = model
        self._samples = samples
        self._canary = Canary(max_age)
        self._counts = HostCopy(model.board.tables.verified_DK2[model.board.model])
        self._seen_K2: Any = 0
        self._num_steps = 0
        self._alarms: list[dict[str, Any]] = []

    def began(self, event: str, **known: Any) -> None:
        """Tells the canary about an event, which is `refit`, `publish` or `wake`.

        After any event but a refit, a drafter that was turned off may draft again. `known` has further arguments of
        `Canary.begin`.
        """
        self._canary.begin(event, **known)
        if event != "refit":
            self._model.is_allowed = True

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms since the last call, each as a dict of values that JSON can hold."""
        self._check()
        alarms = self._alarms
        self._alarms = []
        return alarms

    def end_step(self, slots_B: np.ndarray, output: Any) -> Any:
        """Lets the canary check the drafter's acceptance every `CHECK_STEPS` engine steps. Returns `output` unchanged."""
        self._num_steps += 1
        if self._num_steps % CHECK_STEPS == 0:
            self._check()
        return output

    def woke_up(self) -> None:
        """Tells the canary that the engine woke up, because the head's weights may have been dropped and loaded again."""
        self.began("wake")

    def _check(self) -> None:
        """Passes the counts of draft tokens since the last check to the canary, and handles the alarm that it may raise."""
        self._counts.refresh()
        new_K2 = self._counts.values - self._seen_K2
        self._seen_K2 = self._counts.values.copy()
        health = HeadHealth(age_in_versions=self._service.age_in_versions)
        alarm = self._canary.observe(new_K2[:, 0], new_K2[:, 1], health, CHECK_STEPS)
        if alarm is not None:
            with gpu_sync_allowed():
                self._raise(replace(alarm, health=self._service.health()))

    def _raise(self, alarm: Any) -> None:
        """Logs and records an alarm. After a collapse, it also turns off or restarts the drafter.

        The drafter is turned off if its weights or its config have a fault. Otherwise the drafter and the canary only forget
        what they have learned.
        """
        is_collapse = self._canary.is_silent
        is_off = is_collapse and alarm.cause in WEIGHT_CAUSES
        if is_off:
            self._model.forbid()
        elif is_collapse:
            self._model.begin_again()
            self._canary.begin_again()
        logger.warning("specrollout: %s", alarm.sentence)
        self._alarms.append(
            {
                "event": alarm.event,
                "cause": alarm.cause,
                "seen": alarm.seen,
                "expected": alarm.expected,
                "drafted": alarm.num_drafted,
                "drafter_off": is_off,
                "sentence": alarm.sentence,
                "policy_version": self._samples.policy_version,
                "head_version": self._samples.head_version,
            }
        )
