# SPDX-License-Identifier: Apache-2.0
"""What an engine did since its start, as sums: they add up over engines and subtract over time. Ratios come last.

Shapes: S engine steps, D drafters, K draft positions.
"""

from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

import numpy as np

from nemo_specrollout.generation.trace import StepTrace


@dataclass(frozen=True)
class EngineTotals:
    """Sums over an engine's steps; seconds are the engine's own, so those of several engines run side by side."""

    num_steps: int = 0
    num_steps_with_drafts: int = 0
    num_request_steps: int = 0
    """Requests, summed over steps: what plain decoding would emit in as many steps."""
    num_rows: int = 0
    """Rows sampled from: requests and draft tokens."""
    host_s: float = 0.0
    """Our own time on the host within steps, without a drafter with weights."""
    draft_s: float = 0.0
    """Time of a drafter with weights."""
    other_s: float = 0.0
    """Steps that also computed prompts: speculation does not change them."""
    decode_s: float = 0.0
    """Pure decode steps."""
    estimated_s: float = 0.0
    """Those of the pure decode steps whose time without drafts is known."""
    plain_s: float = 0.0
    """What the tokens of those steps would have taken one a step."""
    num_weight_updates: int = 0
    num_derived_seeds: int = 0
    """Requests without a seed of their own, see `nemo_rl/request_seeds.py`."""
    proposed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Draft tokens verified, by drafter and position."""
    accepted: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Those of them that were accepted."""

    def wire(self) -> dict[str, Any]:
        """As plain numbers, strings and lists, for any transport."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "EngineTotals":
        """The inverse of `wire`."""
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


def _combine_counts(left: Any, right: Any, sign: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """By name and position; what one side lacks counts as zero."""
    rows, others = dict(left), dict(right)
    return tuple(
        (name, tuple(a + sign * b for a, b in zip_longest(rows.get(name, ()), others.get(name, ()), fillvalue=0)))
        for name in {**rows, **others}
    )


class EngineAccount:
    """Adds an engine's steps up. Owns the sums and which steps are in them; each step is counted once."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._counted = 0
        self._totals = EngineTotals()

    def read(self, plain_step_s: np.ndarray | None, **known: Any) -> EngineTotals:
        """The sums so far; `known` are fields that the caller counts itself.

        `plain_step_s[b]` is the time of a step of b requests without drafts, None where nothing was learned yet.
        """
        self._totals += totals_of(self._trace.since(self._counted), plain_step_s)
        self._counted = self._trace.num_steps
        return EngineTotals(**{**self._totals.wire(), **known})


def totals_of(trace: dict[str, Any], plain_step_s: np.ndarray | None) -> EngineTotals:
    """Sums over the steps of a trace (`StepTrace.since`); `plain_step_s` as in `EngineAccount.read`."""
    steps = np.array(trace["rows"], float).reshape(-1, len(trace["columns"]))
    columns = dict(zip(trace["columns"], steps.T, strict=True))
    requests_S, rows_S, seconds_S = columns["num_requests"], columns["num_rows"], columns["seconds"]
    is_decode_S = columns["is_decode"] > 0
    totals = {
        "num_steps": len(steps),
        "num_steps_with_drafts": int((rows_S > requests_S).sum()),
        "num_request_steps": int(requests_S.sum()),
        "num_rows": int(rows_S.sum()),
        "host_s": float(columns["host_s"].sum()),
        "draft_s": float(columns["draft_s"].sum()),
        "other_s": float(seconds_S[~is_decode_S].sum()),
        "decode_s": float(seconds_S[is_decode_S].sum()),
    }
    if plain_step_s is not None:
        accepted_S = sum((c for name, c in columns.items() if name.startswith("accepted_")), np.zeros(len(steps)))
        tokens_S = 1 + accepted_S / np.maximum(requests_S, 1)
        plain_S = tokens_S * plain_step_s[requests_S.astype(np.int64)]
        totals |= {"estimated_s": totals["decode_s"], "plain_s": float(plain_S[is_decode_S].sum())}
    return EngineTotals(**totals)  # type: ignore[arg-type]
