# SPDX-License-Identifier: Apache-2.0
"""What an engine's steps took and brought: the trace, the costs that policies go by, the totals.

Times are the host's; draft counts come from the device when a report is asked for.
"""

from typing import Any

import numpy as np

from nemo_specrollout.generation.compat import agreed
from nemo_specrollout.generation.speculator import Drafting
from nemo_specrollout.generation.totals import EngineAccount, EngineTotals
from nemo_specrollout.generation.trace import StepTrace
from nemo_specrollout.scheduling.speculation.draft_time import DraftCosts
from nemo_specrollout.scheduling.speculation.step_time import StepCosts, StepTimeTable

AGREED_STEPS = 32
"""Steps after which tensor-parallel ranks agree on costs and on the time again."""


class StepAccounts:
    """Follows an engine's steps. Owns the trace, the step-time table, and the costs and the clock that all ranks go by."""

    def __init__(self, runner: Any, drafting: Drafting | None) -> None:
        self._drafting = drafting
        self._table = StepTimeTable(runner.max_num_tokens)
        self._worked_s = self._agreed_worked_s = 0.0
        self.trace = StepTrace([] if drafting is None else drafting.board.names, self._draft_counts)
        self._account = EngineAccount(self.trace)
        self.num_weight_updates = 0
        self.costs: StepCosts | None = None
        self._draft_costs: DraftCosts | None = None

    def step_begins(self, batch: Any) -> None:
        """A step's tokens will be sampled now."""
        self.trace.begin_step(batch.num_reqs, len(batch.logits_indices), batch.num_tokens)
        if self._drafting is None:
            return
        self._drafting.step = self.trace.num_steps - 1
        if self._drafting.model is not None:
            self._drafting.model.decide(
                batch.idx_mapping_np, self.costs, self._draft_costs, self._drafting.row_price, self._agreed_worked_s
            )

    def step_ended(self) -> None:
        """The step is over."""
        drafting = self._drafting
        ended = self.trace.end_step() if drafting is None else self.trace.end_step(drafting.host_s, drafting.draft_s)
        if ended is not None:
            self._table.observe(*ended)
            self._worked_s += ended[2]
        if drafting is not None and (self.costs is None or self.trace.num_steps % AGREED_STEPS == 0):
            draft_costs = None if drafting.model is None else drafting.model.times.costs()
            known = self._table.costs(), draft_costs, self._worked_s
            self.costs, self._draft_costs, self._agreed_worked_s = agreed(known)

    def report(self, first_step: int) -> dict[str, Any]:
        """Steps from `first_step` on, and raw acceptance counts since the start: plain lists."""
        report: dict[str, Any] = {"num_steps": self.trace.num_steps, "trace": self.trace.since(first_step)}
        if self._drafting is not None:
            costs, verified_DK2 = self._table.costs(), self._verified_DK2()
            report["drafters"] = self._drafting.board.names
            report["proposed"], report["accepted"] = verified_DK2[..., 0].tolist(), verified_DK2[..., 1].tolist()
            report["plain_step_s"] = None if costs is None else costs.plain_s.tolist()
            report["draft_overhead_s"] = None if costs is None else costs.overhead_s
            report["draft_discount_s"] = None if costs is None else costs.discount_s
        return report

    def totals(self) -> EngineTotals:
        """Sums since the start."""
        known: dict[str, Any] = {"num_weight_updates": self.num_weight_updates}
        costs = self._table.costs()
        if self._drafting is not None:
            verified_DK2, names = self._verified_DK2(), self._drafting.board.names
            known |= {"proposed": list(zip(names, verified_DK2[..., 0].tolist(), strict=True))}
            known |= {"accepted": list(zip(names, verified_DK2[..., 1].tolist(), strict=True))}
        return self._account.read(None if costs is None or self._drafting is None else costs.plain_s, **known)

    def _verified_DK2(self) -> np.ndarray:
        assert self._drafting is not None
        return self._drafting.board.verified_DCK2.sum(dim=1).cpu().numpy()

    def _draft_counts(self, first_step: int, num_steps: int) -> np.ndarray:
        """Draft tokens verified and accepted by drafter, of steps from number `first_step` on, int64 [steps, D * 2]."""
        assert self._drafting is not None
        steps_TD2 = self._drafting.board.steps_TD2
        index = np.arange(first_step, first_step + num_steps) % len(steps_TD2)
        return steps_TD2.cpu().numpy()[index].reshape(num_steps, -1)
