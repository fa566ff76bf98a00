# SPDX-License-Identifier: Apache-2.0
"""Accounts of an engine's steps: the trace, the measured costs that policies use, and the sums.

Times are measured on the host. Draft counts come from the device when somebody asks for them.

Shapes: D drafters, C lengths of context, K draft positions, T steps that are kept.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from nemo_specrollout.drafters.base import TRACED_STEPS
from nemo_specrollout.generation.drafting import Drafting
from nemo_specrollout.generation.model_drafter import AgreedCosts
from nemo_specrollout.generation.transfers import agreed
from nemo_specrollout.scheduling.speculation.step_time import StepTimeTable
from nemo_specrollout.telemetry.engine_stats import EngineStats, EngineTotals, StepTrace

AGREED_STEPS = 32
"""Steps between two agreements of the tensor-parallel ranks on costs and time."""


class StepAccounts:
    """Owns an engine's trace and its step-time table, and gives drafting the costs that all ranks share."""

    def __init__(self, runner: Any, drafting: Drafting | None) -> None:
        self._drafting = drafting
        self._table = StepTimeTable(runner.max_num_tokens)
        self._worked_s = 0.0
        names = [] if drafting is None else drafting.board.names
        self.trace = StepTrace(names, self._draft_counts, TRACED_STEPS)
        self.num_weight_updates = 0

    def begin_step(self, batch: Any) -> None:
        """Records a step whose tokens are sampled now, and lets a drafter with weights plan its drafts."""
        self.trace.begin_step(batch.num_reqs, len(batch.logits_indices), batch.num_tokens)
        if self._drafting is not None:
            self._drafting.begin_step(self.trace.num_steps - 1, batch)

    def end_step(self) -> None:
        """Learns from the step's time. From time to time all ranks adopt the costs of the first one."""
        drafting = self._drafting
        if drafting is None:
            self.trace.end_step()
            return
        ended = self.trace.end_step(drafting.host_s, 0.0 if drafting.model is None else drafting.model.seconds)
        if ended is not None:
            self._table.observe(*ended)
            self._worked_s += ended[2]
        if drafting.costs.verifying is None or self.trace.num_steps % AGREED_STEPS == 0:
            draft_costs = None if drafting.model is None else drafting.model.times.costs()
            drafting.costs = agreed(AgreedCosts(self._table.costs(), draft_costs, self._worked_s))

    def stats(self, first_step: int) -> EngineStats:
        """Returns the engine's counters, and its steps from `first_step` on."""
        num_steps, trace, drafting = self.trace.num_steps, self.trace.since(first_step), self._drafting
        if drafting is None:
            return EngineStats(num_steps, trace)
        costs = self._table.costs()
        return EngineStats(
            num_steps,
            trace,
            drafting.board.names,
            **self._verified(drafting),
            plain_step_s=None if costs is None else costs.plain_s.tolist(),
            head_is_dormant=drafting.model.is_dormant if drafting.model is not None else None,
            capture_s=0.0 if drafting.capture is None else drafting.capture.seconds,
            drafter_stats=None if drafting.remote is None else asdict(drafting.remote.stats()),
        )

    def totals(self) -> EngineTotals:
        """Returns sums since the engine's start."""
        known: dict[str, Any] = {"num_weight_updates": self.num_weight_updates}
        costs, drafting = None, self._drafting
        if drafting is not None:
            costs = self._table.costs()
            for kind, counts_DK in self._verified(drafting).items():
                known[kind] = list(zip(drafting.board.names, counts_DK, strict=True))
        return self.trace.totals(None if costs is None else costs.plain_s, **known)

    def _verified(self, drafting: Drafting) -> dict[str, Any]:
        """Returns draft tokens verified and accepted, [D, K] each."""
        counts_DK2 = drafting.board.tables.verified_DCK2.sum(dim=1).cpu()
        return {"proposed": counts_DK2[..., 0].tolist(), "accepted": counts_DK2[..., 1].tolist()}

    def _draft_counts(self, first_step: int, num_steps: int) -> np.ndarray:
        """Returns draft tokens verified and accepted by drafter, of steps from `first_step` on, int64 [steps, D * 2]."""
        assert self._drafting is not None
        steps_TD2 = self._drafting.board.tables.steps_TD2
        index = np.arange(first_step, first_step + num_steps) % len(steps_TD2)
        return steps_TD2.cpu().numpy()[index].reshape(num_steps, -1)
