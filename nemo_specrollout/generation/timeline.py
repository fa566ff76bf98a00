# SPDX-License-Identifier: Apache-2.0
"""Who worked on which request, and when: what a report shows of a rollout over several workers."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

WON, MOVED, BEATEN, GAVE_UP, DIED, DIVERGED, ABANDONED = (
    "won", "moved", "beaten", "gave up", "died", "diverged", "abandoned",
)  # fmt: skip


@dataclass
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


@dataclass
class Timeline:
    """Spans of a rollout, in the order in which they began. Owns the clock."""

    num_workers: int
    spans: list[Span] = field(default_factory=list)
    saved_s: float | None = None
    """Seconds that moves and races have saved, by estimate; None if there were none."""

    def __post_init__(self) -> None:
        self._started = time.perf_counter()
        self._open: dict[tuple[int, int], Span] = {}

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._started

    def begin(self, request: int, worker: int, token: int) -> None:
        """A run begins."""
        self._open[request, worker] = span = Span(request, worker, self.now_s, token)
        self.spans.append(span)

    def end(self, request: int, worker: int, token: int, outcome: str) -> None:
        """A run ends."""
        span = self._open.pop((request, worker))
        span.end_s, span.last_token, span.outcome = self.now_s, token, outcome

    @property
    def num_moves(self) -> int:
        return sum(s.outcome == MOVED for s in self.spans)

    @property
    def num_races(self) -> int:
        """Requests that several workers decoded at a time."""
        return len({s.request for s in self.spans if s.outcome in (BEATEN, GAVE_UP)})

    @property
    def idle_share(self) -> float:
        """Of the workers' seconds in the rollout, those in which they had no request."""
        end_s = max((s.end_s for s in self.spans), default=0.0)
        busy_s = sum(
            _covered([(s.start_s, s.end_s) for s in self.spans if s.worker == w]) for w in range(self.num_workers)
        )
        return 1.0 - busy_s / (self.num_workers * end_s) if end_s else 0.0

    def wire(self) -> dict[str, Any]:
        """As plain numbers, strings and lists."""
        return {"num_workers": self.num_workers, "saved_s": self.saved_s, "spans": [asdict(s) for s in self.spans]}


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total = reached = 0.0
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
