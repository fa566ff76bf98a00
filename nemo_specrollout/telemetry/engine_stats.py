# SPDX-License-Identifier: Apache-2.0
"""Records what an engine has done, with a trace of its latest engine steps and with sums over all of its engine steps.

In this module, a step is an engine step. The sums of several engines can be added. The sums of an engine at two times can be
subtracted, which gives the sums of the time between.

Shapes: S steps, T steps that a trace keeps, C columns.
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
"""The first columns of every trace. After them, each drafter has the columns `drafted_<name>` and `accepted_<name>`."""
DraftCounts = tuple[tuple[str, tuple[int, ...]], ...]
"""Counts of draft tokens, as pairs of a drafter's name and its counts by draft position."""


@dataclass(frozen=True)
class StepRows:
    """The records of consecutive engine steps of an engine, with a row for each step and its values by column."""

    columns: list[str]
    rows: list[list[float]]

    @cached_property
    def _values_SC(self) -> np.ndarray:
        return np.array(self.rows, float).reshape(-1, len(self.columns))

    def column(self, name: str) -> np.ndarray:
        """Returns the values that the column `name` has in each step, float64, shape [S]."""
        return self._values_SC[:, self.columns.index(name)]


@dataclass(frozen=True)
class EngineTotals:
    """Sums over the steps of an engine, or of several engines.

    The seconds of several engines are added, even if the engines have run at the same time.
    """

    num_steps: int = 0
    num_steps_with_drafts: int = 0
    num_request_steps: int = 0
    """Sum over steps of the number of requests in the step. Plain decoding would make this many tokens in these steps."""
    num_rows: int = 0
    """Number of rows of logits that were sampled from. There is one for each request and one for each draft token."""
    host_s: float = 0.0
    """Seconds that this package's own work on the host took, without that of drafters with weights."""
    draft_s: float = 0.0
    """Seconds that drafters with weights took."""
    other_s: float = 0.0
    """Seconds of the steps that were not pure decode steps, for example because they also computed prompts."""
    decode_s: float = 0.0
    """Seconds of pure decode steps, which compute no prompts."""
    estimated_s: float = 0.0
    """Seconds of those pure decode steps for which `plain_s` has an estimate."""
    plain_s: float = 0.0
    """Estimated seconds that the tokens of pure decode steps would have taken without drafts."""
    num_weight_updates: int = 0
    num_derived_seeds: int = 0
    """Number of requests that had no seed, and for which `nemo_rl/engine_inputs.py` derived one."""
    proposed: DraftCounts = ()
    """Counts of verified draft tokens, by drafter and draft position."""
    accepted: DraftCounts = ()
    """Counts of accepted draft tokens, by drafter and draft position."""

    @classmethod
    def of(cls, steps: StepRows, plain_step_s: np.ndarray | None) -> "EngineTotals":
        """Returns the sums over the given steps.

        `plain_step_s` has the estimated seconds of a step without drafts, indexed by the number of requests in the step. It is
        None if there is no estimate.
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
        """Returns the sums from a dictionary of the fields, in which tuples may have become lists."""
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
    """Returns `left` plus `sign` times `right`, by drafter and draft position. A missing count is zero."""
    rows = dict(left)
    others = dict(right)
    return tuple(
        (name, tuple(a + sign * b for a, b in zip_longest(rows.get(name, ()), others.get(name, ()), fillvalue=0)))
        for name in {**rows, **others}
    )


class StepTrace:
    """Records the latest steps of an engine with their durations, and sums over all of its steps.

    A step begins at the end of the step before, and ends when the drafts for the next step have been chosen. A step is a pure
    decode step if it computes no prompts and the engine was not idle before it. Only the durations of such steps are exact.
    """

    def __init__(
        self,
        drafter_names: Sequence[str],
        draft_counts: Callable[[int, int], np.ndarray] | None = None,
        capacity: int = MAX_STEPS,
    ) -> None:
        """Creates an empty trace.

        Args:
            drafter_names: names of the drafters. Each drafter gets two columns, `drafted_<name>` and `accepted_<name>`.
            draft_counts: function that is called with a step's number and n. It returns the values of the drafters' columns in
                this step and the n - 1 steps after it, shape [n, 2 * number of drafters].
            capacity: number of steps that the trace keeps.
        """
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
        """Excludes `seconds` from the duration of the next step, because the engine was not asked for a step in this time."""
        self._still_s += seconds

    def begin_after_idle(self) -> None:
        """Notes that the engine was idle before the step that begins now."""
        self._ended = time.perf_counter()
        self._still_s = 0.0
        self._was_idle = True

    def begin_step(self, num_requests: int, num_rows: int, num_scheduled: int) -> None:
        """Begins the record of a step, just before its tokens are sampled.

        Args:
            num_requests: number of requests in the step.
            num_rows: number of rows of logits to sample from. There is one for each request and one for each draft token.
            num_scheduled: number of tokens that the model has computed in the step. If it is above `num_rows`, the step also
                computes prompts, so it is no pure decode step.
        """
        now = time.perf_counter()
        is_decode = num_rows == num_scheduled and not self._was_idle and not self._is_open
        if self._is_open:  # near the context's end vLLM asks for no drafts, so the previous step was not ended
            self._close(now)
        self.num_steps += 1
        self._row(0)[:] = now, 0.0, num_requests, num_rows, is_decode, 0.0, 0.0
        self._is_open, self._was_idle = True, False

    def end_step(self, host_s: float = 0.0, draft_s: float = 0.0) -> tuple[int, int, float] | None:
        """Ends the record of a step.

        Returns the number of requests, the number of rows, and the seconds of the step without `draft_s`. Returns None if the
        step is no pure decode step.

        Args:
            host_s: seconds that this package's work on the host took in the step.
            draft_s: seconds that a drafter with weights took in the step.
        """
        self._close(time.perf_counter())
        step_C = self._row(0)
        step_C[5:7] = host_s, draft_s
        _, seconds, num_requests, num_rows, is_decode, *_ = step_C.tolist()
        if not is_decode:
            return None
        return int(num_requests), int(num_rows), seconds - draft_s

    def since(self, first_step: int) -> StepRows:
        """Returns the records of the steps from step number `first_step` on, except those that the trace no longer has."""
        count = min(max(self.num_steps - first_step, 0), len(self._steps_TC))
        index = np.arange(self.num_steps - count, self.num_steps) % len(self._steps_TC)
        rows = self._steps_TC[index].tolist()
        if self._draft_counts is not None and rows:
            counts = self._draft_counts(self.num_steps - count, count).tolist()
            rows = [row + more for row, more in zip(rows, counts, strict=True)]
        return StepRows(self.columns, rows)

    def totals(self, plain_step_s: np.ndarray | None, **known: Any) -> EngineTotals:
        """Returns the sums over all steps of the engine.

        `plain_step_s` is as in `EngineTotals.of`, and applies to the steps since the last call. `known` has values of those
        fields of `EngineTotals` that the trace does not count.
        """
        self._totals += EngineTotals.of(self.since(self._num_counted), plain_step_s)
        self._num_counted = self.num_steps
        return EngineTotals(**{**asdict(self._totals), **known})

    def _row(self, age: int) -> np.ndarray:
        """Returns the record of the step that is `age` steps older than the newest step, float64, shape [C]."""
        return self._steps_TC[(self.num_steps - 1 - age) % len(self._steps_TC)]

    def _close(self, now: float) -> None:
        self._row(0)[1] = now - self._ended - self._still_s if self.num_steps > 1 else 0.0
        self._ended = now
        self._still_s = 0.0
        self._is_open = False
