# SPDX-License-Identifier: Apache-2.0
"""Timeline of a rollout over several engines: which engine worked on which request, and when."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from nemo_specrollout.scheduling.placement.planner import counted


class Outcome(StrEnum):
    """Outcome of an attempt."""

    WON = "won"
    """The attempt completed the response."""
    MOVED = "moved"
    """The request went on with another engine."""
    BEATEN = "beaten"
    """Another racer completed the response."""
    GAVE_UP = "gave up"
    """The policy, or new weights, ended the race."""
    DIED = "died"
    """The engine died."""
    DIVERGED = "diverged"
    """The engine made another token than is known, because of floating point."""
    ABANDONED = "abandoned"
    """The request was no longer wanted."""


@dataclass(frozen=True)
class Span:
    """One attempt. Times are seconds since the rollout began."""

    request: int
    """Place of the request among the timeline's requests."""
    engine: int
    """Number of the engine."""
    start_s: float
    """Begin of the attempt."""
    first_token: int
    """Response tokens known when the attempt began."""
    end_s: float = 0.0
    """End of the attempt."""
    last_token: int = 0
    """Response tokens that the engine had when the attempt ended."""
    outcome: str = ""
    """An `Outcome`; empty while the attempt is open."""


@dataclass(frozen=True)
class Timeline:
    """Spans of a rollout's requests, in the order in which they ended."""

    num_engines: int
    """Engines of the rollout, with or without spans."""
    spans: tuple[Span, ...] = ()
    """All attempts."""
    methods: tuple[str, ...] = ()
    """Draft method of each engine."""
    saved_s: float | None = None
    """Estimated seconds that moves and races saved; None without any, or with nothing to compare with."""

    @property
    def num_moves(self) -> int:
        """Attempts that ended because the request moved."""
        return sum(s.outcome == Outcome.MOVED for s in self.spans)

    @property
    def num_races(self) -> int:
        """Requests that several engines decoded at a time."""
        return len({s.request for s in self._lost()})

    @property
    def num_won_by_racer(self) -> int:
        """Raced requests whose winner began later than one of the losers."""
        won_s = {s.request: s.start_s for s in self.spans if s.outcome == Outcome.WON}
        return len({s.request for s in self._lost() if s.start_s < won_s.get(s.request, 0.0)})

    @property
    def num_deaths(self) -> int:
        """Engines that died while they had any of the requests."""
        return len({(s.engine, s.end_s) for s in self.spans if s.outcome == Outcome.DIED})

    @property
    def idle_share(self) -> float:
        """Share of the engines' seconds in which they had no request."""
        end_s = max((s.end_s for s in self.spans), default=0.0)
        busy_s = sum(
            covered([(s.start_s, s.end_s) for s in self.spans if s.engine == e]) for e in range(self.num_engines)
        )
        return 1.0 - busy_s / (self.num_engines * end_s) if end_s else 0.0

    def figures(self) -> dict[str, Any]:
        """Returns the metrics `tail.*` of docs/reference/metrics.md."""
        return {
            "moves": self.num_moves,
            "races": self.num_races,
            "won_by_racer": self.num_won_by_racer,
            "idle_share": self.idle_share,
            "saved_s": self.saved_s,
            "deaths": self.num_deaths,
            "diverged": sum(s.outcome == Outcome.DIVERGED for s in self.spans),
        }

    def record(self) -> dict[str, Any]:
        """Returns a line of `timeline.jsonl`, whose keys call an engine a worker."""
        spans = [asdict(s) for s in self.spans]
        for span in spans:
            span["worker"] = span.pop("engine")
        return {
            "num_workers": self.num_engines,
            "methods": list(self.methods),
            "saved_s": self.saved_s,
            "spans": spans,
        }

    def _lost(self) -> list[Span]:
        """Returns the attempts that lost a race."""
        return [s for s in self.spans if s.outcome in (Outcome.BEATEN, Outcome.GAVE_UP)]


@dataclass
class SpanLog:
    """Attempts as they begin and end. Owns the clock."""

    methods: tuple[str, ...]
    """Draft method of each engine."""
    _open: dict[tuple[int, int], Span] = field(default_factory=dict)
    _closed: dict[int, list[Span]] = field(default_factory=dict)

    @property
    def now_s(self) -> float:
        """Seconds of the clock that spans are measured with."""
        return time.perf_counter()

    def begin(self, request: int, engine: int, token: int) -> None:
        """Begins an attempt at response token `token`."""
        self._open[request, engine] = Span(request, engine, self.now_s, token)

    def end(self, request: int, engine: int, token: int, outcome: Outcome, at_s: float | None = None) -> None:
        """Ends an attempt, now or at `at_s`."""
        end_s = self.now_s if at_s is None else at_s
        span = self._open.pop((request, engine))
        self._closed.setdefault(request, []).append(replace(span, end_s=end_s, last_token=token, outcome=outcome))

    def take(self, requests: Sequence[int]) -> Timeline:
        """Returns and forgets the spans of requests that have ended."""
        spans = [replace(span, request=i) for i, r in enumerate(requests) for span in self._closed.pop(r, [])]
        first_s = min((s.start_s for s in spans), default=0.0)
        spans = [replace(s, start_s=s.start_s - first_s, end_s=s.end_s - first_s) for s in spans]
        return Timeline(len(self.methods), tuple(sorted(spans, key=lambda s: s.end_s)), self.methods)


def describe(figures: Mapping[str, Any]) -> str:
    """Returns `Timeline.figures` in one line for users; empty if no request moved or raced and no engine died."""
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


def covered(intervals: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals, which begin at 0 or later."""
    total = reached = 0.0
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
