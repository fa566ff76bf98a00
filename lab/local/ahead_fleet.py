# SPDX-License-Identifier: Apache-2.0
"""Synchronous GRPO whose engines draft the next step's responses while the policy is trained (`run_ahead`)."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lab.local.coordinator import DealingCoordinator
from lab.local.fleet import RolloutFleet
from lab.local.run_config import RunConfig
from lab.local.step_rollout import Prompts, StepPrompts, StepRollout
from nemo_specrollout.generation.engine.requests import TOKEN_BYTES, as_bytes, num_kept
from nemo_specrollout.reports.records import ahead_alarms, ahead_figures
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile


class _EvenTurns(DealingCoordinator):
    """Coordinator whose engines can soon be stopped, and whose thread seldom disturbs the trainer's."""

    _turn_s = 0.3


class _Ahead:
    """Requests of a coming step that engines decode with the weights that they have. Owns the thread that drives them.

    States: running, then ended; `end` gives the texts.
    """

    def __init__(self, coordinator: DealingCoordinator, prompts: StepPrompts, lock: threading.Lock) -> None:
        """Begins those requests of the step that may have drafts. The text of any other would never be used."""
        self._coordinator = coordinator
        self._lock = lock
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.seconds = 0.0
        self._may_draft = [request.speculate for request in prompts.requests]
        self._keys = coordinator.deal([request for request in prompts.requests if request.speculate])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            while self._coordinator.is_busy and not self._stop.is_set():
                with self._lock:
                    self._coordinator.advance()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - started

    def end(self) -> list[bytes]:
        """Stops the engines. Returns the text of each request so far, as int32 numbers; empty if none was begun."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        made = iter([as_bytes(self._coordinator.responses[key].tokens) for key in self._keys])
        texts = [next(made) if drafts else b"" for drafts in self._may_draft]
        complete = [key for key in self._keys if self._coordinator.responses[key].finish_reason is not None]
        self._coordinator.abandon()
        self._coordinator.take(complete)
        return texts


class AheadFleet(RolloutFleet):
    """A fleet that drafts ahead between a rollout and the next weights.

    Invariant: a step's samples are the same as without `run_ahead`. Its texts are neither trained on nor scored.
    """

    def __init__(self, config: RunConfig, prompts: Prompts, known: SpeedTableFile | None = None) -> None:
        """Starts the engines, as `RolloutFleet` does."""
        super().__init__(config, self._with_texts, known)
        self._own_prompts = prompts
        self._steps = range(0)
        table = DecodeSpeedTable(self.pool.method_names)
        self._idle = _EvenTurns(self.pool, None, table, LengthEstimator(1))
        self._ahead: _Ahead | None = None
        self._texts: list[bytes] = []
        self._lock = threading.Lock()
        """Held by the thread that uses the engines."""
        self._made_s = self._end_s = 0.0
        self._alarms: list[dict[str, Any]] = []

    def begin(self, steps: range) -> None:
        self._steps = steps

    def roll_out(self, step: int, on_finished: Callable[[int], None]) -> StepRollout:
        """Rolls out with the texts that were made ahead as drafts, then lets the engines begin the next step's."""
        rollout = super().roll_out(step, on_finished)
        figures = self._figures_of([r.token_ids for r in rollout.rollouts])
        self._texts = []
        if step + 1 in self._steps:
            self._ahead = _Ahead(self._idle, self._own_prompts(step + 1), self._lock)
        return replace(rollout, figures={**rollout.figures, **figures})

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        self._end_ahead()
        super().load_weights(tensors, policy_version)

    def take_alarms(self) -> list[dict[str, Any]]:
        alarms = self._alarms
        self._alarms = []
        return super().take_alarms() + alarms

    def close(self) -> None:
        self._end_ahead()
        super().close()

    def load_head(self, folder: Path, expected_length: float | None = None, num_positions: int = 3) -> None:
        self._end_ahead()
        super().load_head(folder, expected_length, num_positions)

    def _ask_each(self, *question: Any, drafting_by: str | None = None) -> dict[int, Any]:
        with self._lock:
            return super()._ask_each(*question, drafting_by=drafting_by)

    def _with_texts(self, step: int) -> StepPrompts:
        prompts = self._own_prompts(step)
        if not self._texts:
            return prompts
        pairs = zip(prompts.requests, self._texts, strict=True)
        return replace(prompts, requests=[replace(request, ahead=ahead) for request, ahead in pairs])

    def _figures_of(self, responses: Sequence[Sequence[int]]) -> dict[str, float]:
        """Returns the metrics of a step whose drafts were made ahead, and keeps its alarms."""
        if not self._texts:
            return {}
        made = sum(map(len, self._texts)) // TOKEN_BYTES
        kept = sum(map(num_kept, self._texts, responses))
        self._alarms += [{"sentence": sentence} for sentence in ahead_alarms(made, kept)]
        num_tokens = sum(len(response) for text, response in zip(self._texts, responses, strict=True) if text)
        figures = ahead_figures(made, kept, num_tokens, self._made_s)
        return {**figures, "ahead_end_s": self._end_s}

    def _end_ahead(self) -> None:
        ahead = self._ahead
        self._ahead = None
        if ahead is None:
            return
        started = time.perf_counter()
        self._texts = ahead.end()
        self.pool.finish_turns()
        self._made_s = ahead.seconds
        self._end_s = time.perf_counter() - started
