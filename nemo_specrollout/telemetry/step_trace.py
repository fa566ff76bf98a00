# SPDX-License-Identifier: Apache-2.0
"""A trace of an engine's latest steps. Recording a step takes a microsecond.

Shapes: S steps, T steps that are kept, C columns.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

MOST_STEPS = 1 << 16
"""Steps that a trace keeps."""
COLUMNS = ("time_s", "seconds", "num_requests", "num_rows", "is_decode", "host_s", "draft_s")
"""Columns of every trace. `drafted_<name>` and `accepted_<name>` of each drafter follow."""


@dataclass(frozen=True)
class StepRows:
    """Consecutive steps of an engine."""

    columns: list[str]
    rows: list[list[float]]

    @cached_property
    def _values_SC(self) -> np.ndarray:
        return np.array(self.rows, float).reshape(-1, len(self.columns))

    def column(self, name: str) -> np.ndarray:
        """Returns the values of a column, float64 [S]."""
        return self._values_SC[:, self.columns.index(name)]

    def wire(self) -> dict[str, Any]:
        """Returns the steps as the content of `trace.jsonl`."""
        return {"columns": self.columns, "rows": self.rows}


class StepTrace:
    """The latest steps of an engine. Owns the clock: a step lasts from the end of the previous step to its own end.

    A step ends when the drafts for the next step are chosen. So the cost of sampling with drafts counts for the step that had
    them. `seconds` is meaningful only for pure decode steps: every row of the forward pass was sampled from, and the engine
    was not idle before.
    """

    def __init__(
        self,
        drafter_names: Sequence[str],
        draft_counts: Callable[[int, int], np.ndarray] | None = None,
        capacity: int = MOST_STEPS,
    ) -> None:
        """`draft_counts(first, n)` returns the drafters' columns of n steps from number `first` on, [n, columns]."""
        self.columns = list(COLUMNS)
        self.columns += [f"{kind}_{name}" for name in drafter_names for kind in ("drafted", "accepted")]
        self._draft_counts = draft_counts if drafter_names else None
        # Written once, so that the memory is committed now and not while the engine runs.
        self._steps_TC = np.full((capacity, len(COLUMNS)), 0.0)
        self._ended = 0.0
        self._still_s = 0.0
        self._is_open = False
        self._was_idle = True
        self.num_steps = 0

    def stood_still(self, seconds: float) -> None:
        """Leaves `seconds`, in which the engine was not asked for a step, out of the next step's time."""
        self._still_s += seconds

    def begin_after_idle(self) -> None:
        """Notes that the engine was idle before the step that begins now."""
        self._ended, self._still_s, self._was_idle = time.perf_counter(), 0.0, True

    def begin_step(self, num_requests: int, num_rows: int, num_scheduled: int) -> None:
        """Records a step whose tokens are sampled now: its requests, the rows to sample from, and all rows."""
        now = time.perf_counter()
        is_decode = num_rows == num_scheduled and not self._was_idle and not self._is_open
        if self._is_open:  # near the context's end vLLM asks for no drafts, so the previous step did not end here
            self._close(now)
        self.num_steps += 1
        self._row(0)[:] = now, 0.0, num_requests, num_rows, is_decode, 0.0, 0.0
        self._is_open, self._was_idle = True, False

    def end_step(self, host_s: float = 0.0, draft_s: float = 0.0) -> tuple[int, int, float, int] | None:
        """Ends the step, of which our host work took `host_s` and a drafter with weights `draft_s`.

        Returns (requests, rows, seconds, rows of the previous step) of a pure decode step; None for any other step. The rows
        of the previous step are 0 if it was no decode step. The seconds are the cost of verifying. They exclude
        drafting, and host time of a step without drafts, which plain decoding would not spend.
        """
        self._close(time.perf_counter())
        step_C = self._row(0)
        step_C[5:7] = host_s, draft_s
        _, seconds, num_requests, num_rows, is_decode, *_ = step_C.tolist()
        if not is_decode:
            return None
        *_, previous_rows, previous_is_decode, _, _ = self._row(1).tolist()
        spent_s = seconds - draft_s - (host_s if num_rows == num_requests else 0.0)
        return int(num_requests), int(num_rows), spent_s, int(previous_rows * previous_is_decode)

    def since(self, first_step: int) -> StepRows:
        """Returns the steps from number `first_step` on, as far as the trace still has them."""
        count = min(max(self.num_steps - first_step, 0), len(self._steps_TC))
        index = np.arange(self.num_steps - count, self.num_steps) % len(self._steps_TC)
        rows = self._steps_TC[index].tolist()
        if self._draft_counts is not None and rows:
            counts = self._draft_counts(self.num_steps - count, count).tolist()
            rows = [row + more for row, more in zip(rows, counts, strict=True)]
        return StepRows(self.columns, rows)

    def _row(self, age: int) -> np.ndarray:
        """Returns the newest step, or the one `age` steps before it, float64 [C]."""
        return self._steps_TC[(self.num_steps - 1 - age) % len(self._steps_TC)]

    def _close(self, now: float) -> None:
        self._row(0)[1] = now - self._ended - self._still_s if self.num_steps > 1 else 0.0
        self._ended, self._still_s, self._is_open = now, 0.0, False
