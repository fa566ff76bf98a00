# SPDX-License-Identifier: Apache-2.0
"""A record of every engine step, kept in fixed arrays so that recording costs a microsecond.

Column names are those of `StepTrace.COLUMNS`; drafters follow as `drafted_<name>` and `accepted_<name>`.
"""

import time
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
        self._data = np.zeros((capacity, len(self.columns)))
        self._drafters = len(self.COLUMNS) + 2 * np.arange(len(drafter_names))
        self.num_steps = 0

    def begin(self, num_requests: int, num_rows: int, num_scheduled: int) -> tuple[int, bool, float] | None:
        """A step samples now. Returns (rows, had drafts, seconds) of this step if it was a pure decode step."""
        now = time.perf_counter()
        is_decode = num_rows == num_scheduled and self.num_steps > 0
        row = self._data[self.num_steps % len(self._data)]
        previous = self._data[(self.num_steps - 1) % len(self._data)]
        seconds = now - previous[0] if self.num_steps else 0.0
        row[:6] = now, seconds, num_requests, num_rows, is_decode, 0.0
        row[6:] = 0.0
        self.num_steps += 1
        return (num_rows, num_rows > num_requests, seconds) if is_decode else None

    def add_drafts(self, drafted_D: np.ndarray, accepted_D: np.ndarray) -> None:
        """Draft tokens verified in the current step, and how many of them were accepted, by drafter."""
        row = self._data[(self.num_steps - 1) % len(self._data)]
        row[self._drafters] = drafted_D
        row[self._drafters + 1] = accepted_D

    def add_host_seconds(self, seconds: float) -> None:
        """Time that the router spent in the current step."""
        self._data[(self.num_steps - 1) % len(self._data), 5] += seconds

    def since(self, first_step: int) -> dict[str, Any]:
        """Steps from number `first_step` on, as {"columns": [...], "rows": [[...], ...]}; the oldest may be gone."""
        first = max(first_step, self.num_steps - len(self._data))
        rows = self._data[np.arange(first, self.num_steps) % len(self._data)]
        return {"columns": self.columns, "rows": rows.tolist()}
