# SPDX-License-Identifier: Apache-2.0
"""Accounts of an engine's steps: the trace, the measured costs that policies use, and the sums.

Times are measured on the host. Draft counts come from the device when somebody asks for them.

Shapes: D drafters, C lengths of context, K draft positions, T steps that are kept.
"""

from typing import Any

import numpy as np

from nemo_specrollout.drafters.base import TRACED_STEPS
from nemo_specrollout.generation.drafting import Drafting
from nemo_specrollout.generation.ranks import agreed
from nemo_specrollout.scheduling.speculation.draft_time import DraftCosts
from nemo_specrollout.scheduling.speculation.step_time import StepCosts, StepTimeTable
from nemo_specrollout.telemetry.engine_stats import EngineStats
from nemo_specrollout.telemetry.engine_totals import EngineAccount, EngineTotals
from nemo_specrollout.telemetry.step_trace import StepTrace

AGREED_STEPS = 32
"""Steps between two agreements of the tensor-parallel ranks on costs and time."""


class StepAccounts:
    """Owns an engine's trace, its step-time table, and the costs and the clock that all ranks share."""

    def __init__(self, runner: Any, drafting: Drafting | None) -> None:
        self._drafting = drafting
        self._table = StepTimeTable(runner.max_num_tokens)
        self._worked_s = self._agreed_worked_s = 0.0
        names = [] if drafting is None else drafting.board.names
        self.trace = StepTrace(names, self._draft_counts, TRACED_STEPS)
        self._account = EngineAccount(self.trace)
        self.num_weight_updates = 0
        self.costs: StepCosts | None = None
        """Measured costs of verifying; None while unknown."""
        self._draft_costs: DraftCosts | None = None

    def step_begins(self, batch: Any) -> None:
        """Records a step whose tokens are sampled now, and lets a drafter with weights plan its drafts."""
        self.trace.begin_step(batch.num_reqs, len(batch.logits_indices), batch.num_tokens)
        if self._drafting is None:
            return
        self._drafting.step = self.trace.num_steps - 1
        if self._drafting.model is not None:
            self._drafting.model.decide(
                batch.idx_mapping_np, self.costs, self._draft_costs, self._drafting.row_price, self._agreed_worked_s
            )

    def step_ended(self) -> None:
        """Learns from the step's time. From time to time all ranks adopt the costs of the first one."""
        drafting = self._drafting
        ended = self.trace.end_step() if drafting is None else self.trace.end_step(drafting.host_s, drafting.draft_s)
        if ended is not None:
            self._table.observe(*ended)
            self._worked_s += ended[2]
        if drafting is not None and (self.costs is None or self.trace.num_steps % AGREED_STEPS == 0):
            draft_costs = None if drafting.model is None else drafting.model.times.costs()
            known = self._table.costs(), draft_costs, self._worked_s
            self.costs, self._draft_costs, self._agreed_worked_s = agreed(known)

    def stats(self, first_step: int, **known: Any) -> EngineStats:
        """Returns the engine's counters, and its steps from `first_step` on; `known` are fields that the caller counts."""
        trace = self.trace.since(first_step)
        if self._drafting is None:
            return EngineStats(self.trace.num_steps, trace, **known)
        costs, counts_DK2 = self._table.costs(), self._verified_DK2()
        return EngineStats(
            self.trace.num_steps,
            trace,
            self._drafting.board.names,
            proposed=counts_DK2[..., 0].tolist(),
            accepted=counts_DK2[..., 1].tolist(),
            plain_step_s=None if costs is None else costs.plain_s.tolist(),
            draft_overhead_s=None if costs is None else costs.overhead_s,
            draft_discount_s=None if costs is None else costs.discount_s,
            **known,
        )

    def totals(self) -> EngineTotals:
        """Returns sums since the engine's start."""
        known: dict[str, Any] = {"num_weight_updates": self.num_weight_updates}
        if self._drafting is None:
            return self._account.read(None, **known)
        costs, counts_DK2, names = self._table.costs(), self._verified_DK2(), self._drafting.board.names
        for kind, counts_DK in zip(("proposed", "accepted"), np.moveaxis(counts_DK2, -1, 0), strict=True):
            known[kind] = list(zip(names, counts_DK.tolist(), strict=True))
        return self._account.read(None if costs is None else costs.plain_s, **known)

    def _verified_DK2(self) -> np.ndarray:
        assert self._drafting is not None
        return self._drafting.board.tables.verified_DCK2.sum(dim=1).cpu().numpy()

    def _draft_counts(self, first_step: int, num_steps: int) -> np.ndarray:
        """Returns draft tokens verified and accepted by drafter, of steps from `first_step` on, int64 [steps, D * 2]."""
        assert self._drafting is not None
        steps_TD2 = self._drafting.board.tables.steps_TD2
        index = np.arange(first_step, first_step + num_steps) % len(steps_TD2)
        return steps_TD2.cpu().numpy()[index].reshape(num_steps, -1)
