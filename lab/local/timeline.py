# SPDX-License-Identifier: Apache-2.0
"""The timeline of a rollout, which shows when each engine decoded which request.

An attempt is the work of one engine on one request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.placement.planner import counted
from nemo_specrollout.stragglers.attempts import AttemptOutcome, Response, covered, tail_counts


@dataclass(frozen=True)
class AttemptSpan:
    """One engine's work on one request. Times are seconds since the rollout began."""

    request: int
    """Index of the request among the timeline's requests."""
    engine: int
    start_s: float
    first_token: int
    """Number of response tokens that were known when the attempt began."""
    end_s: float
    last_token: int
    """Number of response tokens that the engine had when the attempt ended."""
    outcome: str
    """How the attempt ended, which is an `AttemptOutcome`."""


@dataclass(frozen=True)
class Timeline:
    """All attempts of engines at a rollout's requests, in the order in which the attempts ended."""

    methods: tuple[str, ...]
    """Draft method of each engine."""
    spans: tuple[AttemptSpan, ...] = ()
    saved_s: float | None = None
    """Estimated seconds that moves and races saved. None if there were none, or if no decode speeds are known to compare
    with."""

    @classmethod
    def of(cls, responses: Sequence[Response], methods: tuple[str, ...], saved_s: float | None) -> "Timeline":
        """Returns the timeline of responses, all of whose attempts must have ended."""
        ended = [(i, a) for i, r in enumerate(responses) for a in r.ended]
        first_s = min((a.start_s for _, a in ended), default=0.0)
        spans = [
            AttemptSpan(
                i, a.engine, a.start_s - first_s, a.first_token, a.end_s - first_s, a.position, a.outcome or "open"
            )
            for i, a in ended
        ]
        return cls(methods, tuple(sorted(spans, key=lambda s: s.end_s)), saved_s)

    def figures(self) -> dict[str, Any]:
        """Returns the metrics `tail.*`, which docs/reference/metrics.md explains."""
        by_request: dict[int, list[tuple[str, float]]] = {}
        for span in self.spans:
            by_request.setdefault(span.request, []).append((span.outcome, span.start_s))
        return {
            **tail_counts(by_request.values()),
            "idle_share": self._idle_share(),
            "saved_s": self.saved_s,
            "deaths": len({(s.engine, s.end_s) for s in self.spans if s.outcome == AttemptOutcome.DIED}),
        }

    def record(self) -> dict[str, Any]:
        """Returns a line of `timeline.jsonl`. Its keys call an engine a worker."""
        spans = [asdict(s) for s in self.spans]
        for span in spans:
            span["worker"] = span.pop("engine")
        return {
            "num_workers": len(self.methods),
            "methods": list(self.methods),
            "saved_s": self.saved_s,
            "spans": spans,
        }

    def _idle_share(self) -> float:
        """Returns the share of the engines' time in which they had no request, from 0 to 1."""
        if not self.spans:
            return 0.0
        engines = range(len(self.methods))
        busy_s = sum(covered([(s.start_s, s.end_s) for s in self.spans if s.engine == e]) for e in engines)
        return 1.0 - busy_s / (len(engines) * max(s.end_s for s in self.spans))


def describe(figures: Mapping[str, Any]) -> str:
    """Returns `Timeline.figures` as one line for users, or "" if no request moved or raced and no engine died."""
    if not any(figures[name] for name in ("moves", "races", "deaths", "diverged")):
        return ""
    parts = [
        counted(figures["moves"], "move"),
        counted(figures["races"], "race")
        + (f" ({figures['won_by_racer']} won by the racer)" if figures["races"] else ""),
        *([counted(figures["deaths"], "worker") + " died"] if figures["deaths"] else []),
        *([counted(figures["diverged"], "attempt") + " diverged"] if figures["diverged"] else []),
    ]
    saved = "" if figures["saved_s"] is None else f"; saved {figures['saved_s']:.2f} s (estimate)"
    return f"{', '.join(parts)}{saved}; workers idle for {figures['idle_share']:.0%} of their time"
