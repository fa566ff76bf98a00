# SPDX-License-Identifier: Apache-2.0
"""A record of every engine step, the oldest forgotten first; recording one costs a microsecond.

Column names are those of `StepTrace.COLUMNS`; drafters follow as `drafted_<name>` and `accepted_<name>`.
"""

import time
from collections import deque
from itertools import islice
from typing import Any

import numpy as np


class StepTrace:
    """The last `capacity` steps of an engine. Owns the clock: a step lasts from one sampling to the next.

    `seconds` of a step is therefore known only when the next one begins, and counts only for pure decode steps, i.e.
    when every row of the forward pass was sampled from and the engine did not wait in between.
    """

    COLUMNS = ("time_s", "seconds", "num_requests", "num_rows", "is_decode", "host_s")

    def __init__(self, drafter_names: list[str], capacity: int = 1 << 16) -> None:
        self.columns = list(self.COLUMNS)
        self.columns += [f"{kind}_{name}" for name in drafter_names for kind in ("drafted", "accepted")]
        self._no_drafts = [0] * (2 * len(drafter_names))
        self._steps: deque[list[float]] = deque(maxlen=capacity)
        self._still_s = 0.0
        self.num_steps = 0

    def stood_still(self, seconds: float) -> None:
        """The engine was not asked for a step for so long, which the next step does not count."""
        self._still_s += seconds

    def begin_step(self, num_requests: int, num_rows: int, num_scheduled: int) -> tuple[int, int, float] | None:
        """A step samples now. Returns (requests, rows, seconds) of this step if it was a pure decode step.

        What the router spent on a step that got no drafts is left out there: plain decoding would not have spent it.
        """
        now = time.perf_counter()
        is_decode = num_rows == num_scheduled and self.num_steps > 0
        began, host_s = (self._steps[-1][0], self._steps[-1][5]) if self.num_steps else (now, 0.0)
        seconds, self._still_s = now - began - self._still_s, 0.0
        self._steps.append([now, seconds, num_requests, num_rows, int(is_decode), 0.0, *self._no_drafts])
        self.num_steps += 1
        if not is_decode:
            return None
        return (num_requests, num_rows, seconds - host_s if num_rows == num_requests else seconds)

    def add_drafts(self, totals_D2: np.ndarray) -> None:
        """Draft tokens verified in the current step, and how many of them were accepted, by drafter."""
        self._steps[-1][6:] = totals_D2.ravel().tolist()

    def add_host_seconds(self, seconds: float) -> None:
        """Time that the router spent in the current step."""
        self._steps[-1][5] += seconds

    def since(self, first_step: int) -> dict[str, Any]:
        """Steps from number `first_step` on, as {"columns": [...], "rows": [[...], ...]}; the oldest may be gone."""
        count = min(max(self.num_steps - first_step, 0), len(self._steps))
        return {"columns": self.columns, "rows": [list(s) for s in islice(reversed(self._steps), count)][::-1]}
