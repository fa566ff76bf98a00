# SPDX-License-Identifier: Apache-2.0
"""Who worked on which request, and when: what a report shows of a rollout over several workers."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nemo_specrollout.scheduling.placement.planner import counted

WON, MOVED, BEATEN, GAVE_UP, DIED, DIVERGED, ABANDONED = (
    "won", "moved", "beaten", "gave up", "died", "diverged", "abandoned",
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A run: `worker` had `request` from `start_s` to `end_s`, seconds since the rollout began, from response token
    `first_token` to `last_token`. `outcome`: it won (ended the request), moved elsewhere, was beaten by another racer, gave
    up, died with its worker, diverged (floating point), or the rollout was abandoned."""

    request: int
    worker: int
    start_s: float
    first_token: int
    end_s: float = 0.0
    last_token: int = 0
    outcome: str = ""


@dataclass(frozen=True)
class Timeline:
    """Spans of a rollout's requests, in the order in which they ended. `request` is the place among them."""

    num_workers: int
    spans: tuple[Span, ...] = ()
    methods: tuple[str, ...] = ()
    """How each worker drafts."""
    saved_s: float | None = None
    """Seconds that moves and races have saved, by estimate; None if there were none, or nothing to compare with."""

    @property
    def num_moves(self) -> int:
        return sum(s.outcome == MOVED for s in self.spans)

    @property
    def num_races(self) -> int:
        """Requests that several workers decoded at a time."""
        return len({s.request for s in self.spans if s.outcome in (BEATEN, GAVE_UP)})

    @property
    def num_won_by_racer(self) -> int:
        """Raced requests that were ended by a worker which began with them after another that lost."""
        lost = {(s.request, s.start_s) for s in self.spans if s.outcome in (BEATEN, GAVE_UP)}
        won = {s.request: s.start_s for s in self.spans if s.outcome == WON}
        return len({request for request, start_s in lost if start_s < won.get(request, 0.0)})

    @property
    def num_deaths(self) -> int:
        """Workers that died while they had any of the requests."""
        return len({(s.worker, s.end_s) for s in self.spans if s.outcome == DIED})

    @property
    def idle_share(self) -> float:
        """Of the workers' seconds in the rollout, those in which they had no request."""
        end_s = max((s.end_s for s in self.spans), default=0.0)
        busy_s = sum(
            covered([(s.start_s, s.end_s) for s in self.spans if s.worker == w]) for w in range(self.num_workers)
        )
        return 1.0 - busy_s / (self.num_workers * end_s) if end_s else 0.0

    def figures(self) -> dict[str, Any]:
        """By the names of docs/reference/metrics.md."""
        return {
            "moves": self.num_moves,
            "races": self.num_races,
            "won_by_racer": self.num_won_by_racer,
            "idle_share": self.idle_share,
            "saved_s": self.saved_s,
            "deaths": self.num_deaths,
            "diverged": sum(s.outcome == DIVERGED for s in self.spans),
        }

    def wire(self) -> dict[str, Any]:
        """As plain numbers, strings and lists."""
        of_workers = {"num_workers": self.num_workers, "methods": list(self.methods), "saved_s": self.saved_s}
        return {**of_workers, "spans": [asdict(s) for s in self.spans]}


@dataclass
class SpanLog:
    """Spans as they begin and end. Owns the clock."""

    methods: tuple[str, ...]
    """How each worker drafts."""
    _open: dict[tuple[int, int], Span] = field(default_factory=dict)
    _closed: dict[int, list[Span]] = field(default_factory=dict)

    @property
    def now_s(self) -> float:
        return time.perf_counter()

    def begin(self, request: int, worker: int, token: int) -> None:
        """A run begins."""
        self._open[request, worker] = Span(request, worker, self.now_s, token)

    def end(self, request: int, worker: int, token: int, outcome: str, at_s: float | None = None) -> None:
        """A run ends, now or at `at_s`."""
        end_s = self.now_s if at_s is None else at_s
        span = self._open.pop((request, worker))
        self._closed.setdefault(request, []).append(replace(span, end_s=end_s, last_token=token, outcome=outcome))

    def take(self, requests: Sequence[int]) -> Timeline:
        """The spans of requests that have ended, which are forgotten here."""
        spans = [replace(span, request=i) for i, r in enumerate(requests) for span in self._closed.pop(r, [])]
        first_s = min((s.start_s for s in spans), default=0.0)
        spans = [replace(s, start_s=s.start_s - first_s, end_s=s.end_s - first_s) for s in spans]
        return Timeline(len(self.methods), tuple(sorted(spans, key=lambda s: s.end_s)), self.methods)


def in_words(figures: Mapping[str, Any]) -> str:
    """`Timeline.figures` in a line; empty where nothing happened."""
    if not any(figures[name] for name in ("moves", "races", "deaths", "diverged")):
        return ""
    parts = [
        counted(figures["moves"], "move"),
        counted(figures["races"], "race")
        + (f" ({figures['won_by_racer']} won by the racer)" if figures["races"] else ""),
        *([counted(figures["deaths"], "worker") + " died"] if figures["deaths"] else []),
        *([counted(figures["diverged"], "run") + " diverged"] if figures["diverged"] else []),
    ]
    saved = "" if figures["saved_s"] is None else f"; saved {figures['saved_s']:.2f} s, by estimate"
    return f"{', '.join(parts)}{saved}; workers idle for {figures['idle_share']:.0%} of their time"


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals, which begin at 0 or later."""
    total = reached = 0.0
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
