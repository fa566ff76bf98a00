# SPDX-License-Identifier: Apache-2.0
"""Records of what an engine did, with a trace of its latest steps, sums over all steps, and counters.

A step is an engine step in this module. Sums can be added over engines, and subtracted to get the sums of a period.

Shapes: S steps, T steps that are kept, C columns.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np

MAX_STEPS = 1 << 16
COLUMNS = ("time_s", "seconds", "num_requests", "num_rows", "is_decode", "host_s", "draft_s")
"""Columns of every trace, which are followed by `drafted_<name>` and `accepted_<name>` of each drafter."""
DraftCounts = tuple[tuple[str, tuple[int, ...]], ...]
"""Numbers of draft tokens by drafter and position."""


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


@dataclass(frozen=True)
class EngineTotals:
    """Sums over an engine's steps. Seconds are counted per engine, although several engines spend them at the same time."""

    num_steps: int = 0
    num_steps_with_drafts: int = 0
    num_request_steps: int = 0
    """Number of requests summed over steps, which equals the tokens that plain decoding would emit in as many steps."""
    num_rows: int = 0
    """Number of rows that were sampled, which are one for each request and one for each draft token."""
    host_s: float = 0.0
    """Seconds of this package's own work on the host within steps, not counting that of drafters with weights."""
    draft_s: float = 0.0
    """Seconds that a drafter with weights took."""
    other_s: float = 0.0
    """Seconds of steps that also computed prompts, where speculation changes nothing."""
    decode_s: float = 0.0
    """Seconds of pure decode steps."""
    estimated_s: float = 0.0
    """Seconds that pure decode steps took, as far as it can be estimated how long their tokens would take without drafts."""
    plain_s: float = 0.0
    """Estimated seconds that the tokens of the steps in `estimated_s` would have taken without drafts."""
    num_weight_updates: int = 0
    num_derived_seeds: int = 0
    """Number of requests that came without a seed and got one (`nemo_rl/engine_inputs.py`)."""
    proposed: DraftCounts = ()
    """Numbers of draft tokens that were verified, by drafter and position."""
    accepted: DraftCounts = ()

    @classmethod
    def of(cls, steps: StepRows, plain_step_s: np.ndarray | None) -> "EngineTotals":
        """Returns the sums over steps of a trace.

        `plain_step_s` has the seconds of a step without drafts, by its number of requests, or is None if not known.
        """
        requests_S, rows_S, seconds_S = map(steps.column, ("num_requests", "num_rows", "seconds"))
        is_decode_S = steps.column("is_decode") > 0
        decode_s = float(seconds_S[is_decode_S].sum())
        plain_s = 0.0
        if plain_step_s is not None:
            accepted = [steps.column(name) for name in steps.columns if name.startswith("accepted_")]
            tokens_S = 1 + np.sum(accepted, axis=0) / np.maximum(requests_S, 1)
            plain_s = float((tokens_S * plain_step_s[requests_S.astype(np.int64)])[is_decode_S].sum())
        return cls(
            num_steps=len(requests_S),
            num_steps_with_drafts=int((rows_S > requests_S).sum()),
            num_request_steps=int(requests_S.sum()),
            num_rows=int(rows_S.sum()),
            host_s=float(steps.column("host_s").sum()),
            draft_s=float(steps.column("draft_s").sum()),
            other_s=float(seconds_S[~is_decode_S].sum()),
            decode_s=decode_s,
            estimated_s=0.0 if plain_step_s is None else decode_s,
            plain_s=plain_s,
        )

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "EngineTotals":
        """Returns the record with these fields, whose tuples may have become lists on the way."""
        counts = {k: tuple((name, tuple(row)) for name, row in wire[k]) for k in ("proposed", "accepted")}
        return cls(**{**wire, **counts})

    def __add__(self, other: "EngineTotals") -> "EngineTotals":
        return self._combine(other, 1)

    def __sub__(self, other: "EngineTotals") -> "EngineTotals":
        return self._combine(other, -1)

    def _combine(self, other: "EngineTotals", sign: int) -> "EngineTotals":
        numbers = {f.name: getattr(self, f.name) + sign * getattr(other, f.name) for f in fields(self)[:-2]}
        proposed = _combine_counts(self.proposed, other.proposed, sign)
        return EngineTotals(**numbers, proposed=proposed, accepted=_combine_counts(self.accepted, other.accepted, sign))


def _combine_counts(left: DraftCounts, right: DraftCounts, sign: int) -> DraftCounts:
    """Adds counts by name and position, with `sign` for the right side. A count that one side lacks is zero."""
    rows = dict(left)
    others = dict(right)
    return tuple(
        (name, tuple(a + sign * b for a, b in zip_longest(rows.get(name, ()), others.get(name, ()), fillvalue=0)))
        for name in {**rows, **others}
    )


class StepTrace:
    """Keeps the latest steps of an engine with their durations, and sums over all of its steps.

    A step lasts from the end of the step before to its own end, when the drafts for the next step are chosen. `seconds` is
    meaningful only for pure decode steps, which sample from every row, in an engine that was not idle before.
    """

    def __init__(
        self,
        drafter_names: Sequence[str],
        draft_counts: Callable[[int, int], np.ndarray] | None = None,
        capacity: int = MAX_STEPS,
    ) -> None:
        """`draft_counts(first, n)` returns the drafters' columns of n steps from number `first` on, [n, columns]."""
        self.columns = [*COLUMNS, *(f"{kind}_{name}" for name in drafter_names for kind in ("drafted", "accepted"))]
        self._draft_counts = draft_counts if drafter_names else None
        # The array is filled so that its memory is committed now and not while the engine runs.
        self._steps_TC = np.full((capacity, len(COLUMNS)), 0.0)
        self._ended = self._still_s = 0.0
        self._is_open, self._was_idle = False, True
        self._totals = EngineTotals()
        self._num_counted = 0
        self.num_steps = 0

    def stood_still(self, seconds: float) -> None:
        """Excludes `seconds`, in which the engine was not asked for a step, from the next step's time."""
        self._still_s += seconds

    def begin_after_idle(self) -> None:
        """Notes that the engine was idle before the step that begins now."""
        self._ended = time.perf_counter()
        self._still_s = 0.0
        self._was_idle = True

    def begin_step(self, num_requests: int, num_rows: int, num_scheduled: int) -> None:
        """Records the step whose tokens are about to be sampled.

        Args:
            num_requests: Number of requests in the step.
            num_rows: Number of rows of logits to sample, which are one for each request and one for each draft token.
            num_scheduled: Number of tokens that the model has computed in the step. There are more of them than rows if the
                step also computes prompts, and then it is no pure decode step.
        """
        now = time.perf_counter()
        is_decode = num_rows == num_scheduled and not self._was_idle and not self._is_open
        if self._is_open:  # near the context's end vLLM asks for no drafts, so the previous step was not ended
            self._close(now)
        self.num_steps += 1
        self._row(0)[:] = now, 0.0, num_requests, num_rows, is_decode, 0.0, 0.0
        self._is_open, self._was_idle = True, False

    def end_step(self, host_s: float = 0.0, draft_s: float = 0.0) -> tuple[int, int, float] | None:
        """Ends the step, in which this package's host work took `host_s` and a drafter with weights took `draft_s`.

        Returns (requests, rows, seconds without `draft_s`) for a pure decode step, and None for any other step.
        """
        self._close(time.perf_counter())
        step_C = self._row(0)
        step_C[5:7] = host_s, draft_s
        _, seconds, num_requests, num_rows, is_decode, *_ = step_C.tolist()
        if not is_decode:
            return None
        return int(num_requests), int(num_rows), seconds - draft_s

    def since(self, first_step: int) -> StepRows:
        """Returns the steps from number `first_step` on, as far as the trace still has them."""
        count = min(max(self.num_steps - first_step, 0), len(self._steps_TC))
        index = np.arange(self.num_steps - count, self.num_steps) % len(self._steps_TC)
        rows = self._steps_TC[index].tolist()
        if self._draft_counts is not None and rows:
            counts = self._draft_counts(self.num_steps - count, count).tolist()
            rows = [row + more for row, more in zip(rows, counts, strict=True)]
        return StepRows(self.columns, rows)

    def totals(self, plain_step_s: np.ndarray | None, **known: Any) -> EngineTotals:
        """Returns `EngineTotals.of` all steps, each counted once. `known` has the fields that the caller counts."""
        self._totals += EngineTotals.of(self.since(self._num_counted), plain_step_s)
        self._num_counted = self.num_steps
        return EngineTotals(**{**asdict(self._totals), **known})

    def _row(self, age: int) -> np.ndarray:
        """Returns the step that is `age` steps older than the newest one, float64 [C]."""
        return self._steps_TC[(self.num_steps - 1 - age) % len(self._steps_TC)]

    def _close(self, now: float) -> None:
        self._row(0)[1] = now - self._ended - self._still_s if self.num_steps > 1 else 0.0
        self._ended = now
        self._still_s = 0.0
        self._is_open = False
