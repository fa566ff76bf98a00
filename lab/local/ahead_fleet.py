# SPDX-License-Identifier: Apache-2.0
"""Rollout sources of synchronous GRPO, whose engines also decode requests of coming steps in free slots (`run_ahead`)."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lab.local.fleet import RolloutFleet
from lab.local.rollout_pool import RolloutPool
from lab.local.run_config import RunConfig
from lab.local.step_rollout import LocalEngine, Prompts, StepRollout
from lab.local.texts_in_flight import TextsInFlight
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile


class AheadOfFleet:
    """Lets the engines of a fleet decode requests of coming steps. Owns the texts that they have made.

    A plan says which of these requests each engine may start. It is made for one version of the weights, and must be ended
    before new weights are loaded.
    """

    def __init__(self, texts: TextsInFlight) -> None:
        self.texts = texts
        self._has_plan = False

    def plan(self, pool: RolloutPool, step: int) -> None:
        """Lets all live engines start requests of the steps after `step`.

        An engine decodes them beside its requests of `step`, and also while it has none of these.
        """
        engines = pool.alive()
        self._has_plan = True
        pool.plan_ahead(dict(zip(engines, self.texts.plans(step, len(engines)), strict=True)))

    def end(self, pool: RolloutPool, *, keeps_cache: bool = False) -> None:
        """Ends the plan. The engines stop early requests, and the texts that they have made are kept.

        Does nothing without a plan.

        With `keeps_cache`, the engines keep their cached prefixes, which running requests of the current step may still use.
        """
        if self._has_plan:
            self._has_plan = False
            self.texts.keep(pool.end_ahead(keeps_cache=keeps_cache))


class AheadFleet(RolloutFleet):
    """A fleet whose engines start requests of coming steps in the slots that a draining rollout leaves empty.

    An engine without any request of the current step continues with early requests by itself. Engines that share their cores
    with the trainer end this at the end of the rollout. Other engines end it when new weights come.

    Invariant: a step's samples are the same as without `run_ahead`. Texts made ahead are only used as drafts, so they are
    neither trained on nor scored.
    """

    def __init__(self, config: RunConfig, prompts: Prompts, known: SpeedTableFile | None = None) -> None:
        """Starts the engines, as `RolloutFleet` does."""
        self._ahead = AheadOfFleet(TextsInFlight(config, prompts))
        self._works_while_training = not config.policy.generation.colocated.enabled
        self._end_s = 0.0
        super().__init__(config, self._ahead.texts.with_texts, known)

    def begin(self, steps: range) -> None:
        self._ahead.texts.begin(steps)

    def _rolled_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        self._ahead.plan(self.pool, step)
        rollout = self._ahead.texts.told(super()._rolled_out(step, on_finished), ahead_end_s=self._end_s)
        if not self._works_while_training:
            self._end_ahead()
        return rollout

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        self._end_ahead()
        super().load_weights(tensors, policy_version)

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        self._end_ahead()
        super().load_head(folder, expected_length, num_positions)

    def take_alarms(self) -> list[dict[str, Any]]:
        return super().take_alarms() + self._ahead.texts.take_alarms()

    def _end_ahead(self) -> None:
        started = time.perf_counter()
        self._ahead.end(self.pool)
        self._end_s = time.perf_counter() - started


class AheadEngine(LocalEngine):
    """One engine in the runner's own process, which starts requests of coming steps while a rollout drains."""

    def __init__(self, config: RunConfig, prompts: Prompts) -> None:
        """Starts the engine. Raises ConfigError for what vLLM refuses."""
        self._texts = TextsInFlight(config, prompts)
        super().__init__(config, self._texts.with_texts)
        self._rolling = self.rolling()

    def begin(self, steps: range) -> None:
        self._texts.begin(steps)

    def _rolled_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        (plan,) = self._texts.plans(step, 1)
        self._rolling.plan(plan.rows, plan.scale, plan.kept)
        try:
            rollout = super()._rolled_out(step, on_finished)
        finally:
            made = self._rolling.end(keeps_cache=False)
        told = self._texts.told(rollout)
        self._texts.keep([made])
        return told

    def take_alarms(self) -> list[dict[str, Any]]:
        return super().take_alarms() + self._texts.take_alarms()
