# SPDX-License-Identifier: Apache-2.0
"""A record of every engine step, the oldest forgotten first; recording one costs a microsecond.

Column names are those of `StepTrace.COLUMNS`; drafters follow as `drafted_<name>` and `accepted_<name>`.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nemo_specrollout.drafters.base import TRACED_STEPS


class StepTrace:
    """The last `capacity` steps of an engine. Owns the clock: a step lasts from the end of the one before to its own.

    A step ends when its drafts for the next are chosen, so what sampling with drafts costs counts for the step that had
    them. `seconds` counts only for pure decode steps, i.e. when every row of the forward pass was sampled from and the engine
    did not wait in between. Counts of drafts are asked for when steps are.
    """

    COLUMNS = ("time_s", "seconds", "num_requests", "num_rows", "is_decode", "host_s", "draft_s")

    def __init__(
        self,
        drafter_names: list[str],
        draft_counts: Callable[[int, int], np.ndarray] | None = None,
        capacity: int = TRACED_STEPS,
    ) -> None:
        """`draft_counts(first, n)` tells, of steps from number `first` on, what the drafters' columns hold, [n, columns]."""
        self.columns = list(self.COLUMNS)
        self.columns += [f"{kind}_{name}" for name in drafter_names for kind in ("drafted", "accepted")]
        self._draft_counts = draft_counts if drafter_names else None
        # Written once, so that its memory is taken now and not as steps come.
        self._steps_TC = np.full((capacity, len(self.COLUMNS)), 0.0)
        self._ended = 0.0
        self._still_s = 0.0
        self._is_open = False
        self._is_afresh = True
        self.num_steps = 0

    def stood_still(self, seconds: float) -> None:
        """The engine was not asked for a step for so long, which the next step does not count."""
        self._still_s += seconds

    def begin_afresh(self) -> None:
        """The step that begins now follows on nothing: the engine was idle before."""
        self._ended, self._still_s, self._is_afresh = time.perf_counter(), 0.0, True

    def begin_step(self, num_requests: int, num_rows: int, num_scheduled: int) -> None:
        """A step samples now."""
        now = time.perf_counter()
        is_decode = num_rows == num_scheduled and not self._is_afresh and not self._is_open
        if self._is_open:  # vLLM did not ask for drafts, near the context's end: two steps of which neither is whole
            self._close(now)
        self.num_steps += 1
        self._row(0)[:] = now, 0.0, num_requests, num_rows, is_decode, 0.0, 0.0
        self._is_open, self._is_afresh = True, False

    def end_step(self, host_s: float = 0.0, draft_s: float = 0.0) -> tuple[int, int, float, int] | None:
        """The step is over: our host work took `host_s` of it, and a drafter with weights `draft_s`. Returns (requests, rows,
        seconds, rows of the step before) of a pure decode step; the last is 0 if the one before was none.

        What drafting took is left out there: it is no cost of verifying. So is what the host took for a step that got no
        drafts: plain decoding would not have spent it.
        """
        self._close(time.perf_counter())
        step_C = self._row(0)
        step_C[5:7] = host_s, draft_s
        _, seconds, num_requests, num_rows, is_decode, *_ = step_C.tolist()
        if not is_decode:
            return None
        *_, rows_before, before_is_decode, _, _ = self._row(1).tolist()
        spent_s = seconds - draft_s - (host_s if num_rows == num_requests else 0.0)
        return int(num_requests), int(num_rows), spent_s, int(rows_before * before_is_decode)

    def _row(self, age: int) -> np.ndarray:
        """The newest step, or one before it, float64 [columns]."""
        return self._steps_TC[(self.num_steps - 1 - age) % len(self._steps_TC)]

    def _close(self, now: float) -> None:
        self._row(0)[1] = now - self._ended - self._still_s if self.num_steps > 1 else 0.0
        self._ended, self._still_s, self._is_open = now, 0.0, False

    def since(self, first_step: int) -> dict[str, Any]:
        """Steps from number `first_step` on, as {"columns": [...], "rows": [[...], ...]}; the oldest may be gone."""
        count = min(max(self.num_steps - first_step, 0), len(self._steps_TC))
        index = np.arange(self.num_steps - count, self.num_steps) % len(self._steps_TC)
        rows = self._steps_TC[index].tolist()
        if self._draft_counts is not None and rows:
            counts = self._draft_counts(self.num_steps - count, count).tolist()
            rows = [row + more for row, more in zip(rows, counts, strict=True)]
        return {"columns": self.columns, "rows": rows}
