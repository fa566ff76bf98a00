# SPDX-License-Identifier: Apache-2.0
"""Sums over an engine's steps. They add up over engines and subtract over time; ratios are computed last.

Shapes: S engine steps.
"""

from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

import numpy as np

from nemo_specrollout.telemetry.step_trace import StepRows, StepTrace

DraftCounts = tuple[tuple[str, tuple[int, ...]], ...]
"""Draft tokens by drafter and position."""


@dataclass(frozen=True)
class EngineTotals:
    """Sums over an engine's steps. Seconds are the engine's own; several engines spend them at the same time."""

    num_steps: int = 0
    num_steps_with_drafts: int = 0
    num_request_steps: int = 0
    """Requests, summed over steps: the tokens that plain decoding would emit in as many steps."""
    num_rows: int = 0
    """Rows sampled from: one for each request and one for each draft token."""
    host_s: float = 0.0
    """Seconds of our own host work within steps, without a drafter with weights."""
    draft_s: float = 0.0
    """Seconds of a drafter with weights."""
    other_s: float = 0.0
    """Seconds of steps that also computed prompts, which speculation does not change."""
    decode_s: float = 0.0
    """Seconds of pure decode steps."""
    estimated_s: float = 0.0
    """Seconds of those pure decode steps whose time without drafts is known."""
    plain_s: float = 0.0
    """Seconds that the tokens of those steps would have taken without drafts."""
    num_weight_updates: int = 0
    num_derived_seeds: int = 0
    """Requests without a seed of their own, see `nemo_rl/engine_inputs.py`."""
    proposed: DraftCounts = ()
    """Draft tokens that were verified."""
    accepted: DraftCounts = ()
    """Draft tokens that were accepted."""

    def wire(self) -> dict[str, Any]:
        """Returns the fields as plain numbers, strings and tuples, for any transport."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "EngineTotals":
        """Builds the record from `wire`, whose tuples may have become lists."""
        counts = {k: tuple((name, tuple(row)) for name, row in wire[k]) for k in ("proposed", "accepted")}
        return cls(**{**wire, **counts})

    def __add__(self, other: "EngineTotals") -> "EngineTotals":
        return self._combine(other, 1)

    def __sub__(self, other: "EngineTotals") -> "EngineTotals":
        return self._combine(other, -1)

    def _combine(self, other: "EngineTotals", sign: int) -> "EngineTotals":
        numbers = {f.name: getattr(self, f.name) + sign * getattr(other, f.name) for f in fields(self)[:-2]}
        return EngineTotals(
            **numbers,
            proposed=_combine_counts(self.proposed, other.proposed, sign),
            accepted=_combine_counts(self.accepted, other.accepted, sign),
        )


def _combine_counts(left: DraftCounts, right: DraftCounts, sign: int) -> DraftCounts:
    """Adds by name and position. A count that one side lacks is zero."""
    rows, others = dict(left), dict(right)
    return tuple(
        (name, tuple(a + sign * b for a, b in zip_longest(rows.get(name, ()), others.get(name, ()), fillvalue=0)))
        for name in {**rows, **others}
    )


class EngineAccount:
    """Sums an engine's steps. Owns the sums, and counts each step of the trace once."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._counted = 0
        self._totals = EngineTotals()

    def read(self, plain_step_s: np.ndarray | None, **known: Any) -> EngineTotals:
        """Returns the sums so far.

        Args:
            plain_step_s: Seconds of a step without drafts, by number of requests; None while unknown.
            known: Fields that the caller counts itself.
        """
        self._totals += totals_of(self._trace.since(self._counted), plain_step_s)
        self._counted = self._trace.num_steps
        return EngineTotals(**{**self._totals.wire(), **known})


def totals_of(steps: StepRows, plain_step_s: np.ndarray | None) -> EngineTotals:
    """Sums steps of a trace; `plain_step_s` as in `EngineAccount.read`."""
    requests_S, rows_S, seconds_S = map(steps.column, ("num_requests", "num_rows", "seconds"))
    is_decode_S = steps.column("is_decode") > 0
    totals = {
        "num_steps": len(requests_S),
        "num_steps_with_drafts": int((rows_S > requests_S).sum()),
        "num_request_steps": int(requests_S.sum()),
        "num_rows": int(rows_S.sum()),
        "host_s": float(steps.column("host_s").sum()),
        "draft_s": float(steps.column("draft_s").sum()),
        "other_s": float(seconds_S[~is_decode_S].sum()),
        "decode_s": float(seconds_S[is_decode_S].sum()),
    }
    if plain_step_s is not None:
        accepted = [steps.column(name) for name in steps.columns if name.startswith("accepted_")]
        tokens_S = 1 + np.sum(accepted, axis=0) / np.maximum(requests_S, 1)
        plain_S = tokens_S * plain_step_s[requests_S.astype(np.int64)]
        totals |= {"estimated_s": totals["decode_s"], "plain_s": float(plain_S[is_decode_S].sum())}
    return EngineTotals(**totals)  # type: ignore[arg-type]
