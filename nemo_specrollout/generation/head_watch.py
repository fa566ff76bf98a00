# SPDX-License-Identifier: Apache-2.0
"""Watches the engine's drafter with weights while it drafts: an alarm within the step, and the drafter off."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.generation.head_loading import head_health
from nemo_specrollout.generation.head_rope import head_context
from nemo_specrollout.generation.router import Router
from nemo_specrollout.scheduling.canary import Alarm, Canary, HeadHealth
from nemo_specrollout.scheduling.context_canary import ContextCanary, context_edges, count_by_context

logger = logging.getLogger(__name__)
CONTEXT_EVERY = 8
"""Steps with drafts of which one is looked at by length of context; at first, and under suspicion, each is."""


class HeadWatch:
    """Owns the canaries of an engine and the alarms they raised; the versions of policy and head are the router's stamps'.

    A collapse turns the drafter off until the next head or wake; a mere decline does not, nor does a failure in long contexts
    alone. Shapes: B requests of the batch, K draft positions.
    """

    def __init__(self, runner: Any, router: Router, folder: Path | None, max_age: int | None) -> None:
        self._runner, self._router = runner, router
        self._canary = Canary(max_age=max_age)
        self._contexts, self._num_seen = ContextCanary(), 0
        self._folder = folder
        self._edges = self._context_edges()
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
        self._contexts.begin(event, **known)
        if event != "refit":
            self._router.may_ask_model = True

    def published(self, folder: Path, head_version: int, expected_length: float | None, num_positions: int) -> None:
        """The head of `folder` is in service, made for the policy of `head_version`."""
        self._previous, self._folder = self._folder, folder
        self._contexts, self._edges = ContextCanary(), self._context_edges()
        self._router.stamps.head_version = head_version
        self.began("publish", expected_length=expected_length, num_positions=num_positions)

    def take_alarms(self) -> list[dict[str, Any]]:
        """Those since last asked, as plain values."""
        alarms, self.alarms = self.alarms, []
        return alarms

    def _context_edges(self) -> np.ndarray:
        longest = self._runner.model_config.max_model_len
        return context_edges(longest, head_context(self._folder, longest))

    def _observe(
        self, drafted_K: np.ndarray, accepted_K: np.ndarray, drafted_B: np.ndarray, emitted_B: np.ndarray
    ) -> None:
        far = self._observe_contexts(drafted_B, emitted_B, len(drafted_K))
        alarm = self._canary.observe(drafted_K, accepted_K, HeadHealth(age_in_versions=self.age)) or far
        if alarm is None:
            return
        health = head_health(self._runner, self._folder, self._previous, self.age)
        alarm = alarm.explained_by(replace(health, fails_in_long_contexts=self._contexts.fails_in_long_contexts))
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

    def _observe_contexts(self, drafted_B: np.ndarray, emitted_B: np.ndarray, num_positions: int) -> Alarm | None:
        self._num_seen += 1
        if self._num_seen % CONTEXT_EVERY and not (self._canary.suspects or self._contexts.is_learning):
            return None
        contexts_B = self._runner.input_batch.num_tokens_no_spec[: len(drafted_B)] - emitted_B
        accepted_B = np.clip(emitted_B - 1, 0, drafted_B)
        counts = count_by_context(contexts_B, drafted_B, accepted_B, self._edges, num_positions)
        return self._contexts.observe(*counts)
