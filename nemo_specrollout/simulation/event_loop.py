# SPDX-License-Identifier: Apache-2.0
"""The event core: workers decode, requests end, the tail policy moves and races them. As many events as requests, about.

Shapes: R requests, B requests of a worker.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.scheduling.racing.straggler_policy import TailDecision
from nemo_specrollout.simulation.stragglers import Tail
from nemo_specrollout.simulation.worker import Span, Worker
from nemo_specrollout.simulation.workload import Workload


@dataclass(frozen=True)
class TailChange:
    """A request goes on elsewhere, or is decoded there too."""

    at_s: float
    is_race: bool


@dataclass(frozen=True)
class RolloutResult:
    """What happened. Tokens are counts of the fluid model, so not whole."""

    end_R: np.ndarray
    """When each request ended, seconds, float64."""
    length_R: np.ndarray
    """Tokens that each was asked for, int64."""
    spans: tuple[Span, ...]
    num_workers: int
    num_tokens: float
    """Of the responses."""
    num_wasted_tokens: float
    """Made twice, by racers."""
    changes: tuple[TailChange, ...] = ()
    """What was done with the tail, in order."""

    @property
    def num_moves(self) -> int:
        return len(self.changes) - self.num_races

    @property
    def num_races(self) -> int:
        return sum(change.is_race for change in self.changes)

    @property
    def seconds(self) -> float:
        """Until the last request ended."""
        return float(self.end_R.max())

    @property
    def busy_s(self) -> float:
        """Summed over workers."""
        return sum(span.end_s - span.begin_s for span in self.spans)

    @property
    def num_request_steps(self) -> float:
        """Engine steps, each counted once for each of its requests."""
        return sum(span.num_steps * span.num_requests for span in self.spans)

    @property
    def idle_share(self) -> float:
        """Of the workers' time until the last request ended."""
        return 1.0 - self.busy_s / (self.num_workers * self.seconds)

    def idle_share_between(self, begin_s: float, end_s: float) -> float:
        """Of the workers' time in that stretch."""
        busy_s = sum(max(0.0, min(s.end_s, end_s) - max(s.begin_s, begin_s)) for s in self.spans)
        return 1.0 - busy_s / (self.num_workers * (end_s - begin_s))


class Rollout:
    """Owns the workers, the clock and who runs where. Example: `start(...)` for each worker, then `run()`.

    Invariant: a request runs on several workers only while it is raced; the first to end it ends it everywhere.
    """

    def __init__(self, workload: Workload, workers: Sequence[Worker], tail: Tail | None = None) -> None:
        self.workload, self.workers, self.tail = workload, list(workers), tail
        self.now_s = 0.0
        self.end_R = np.full(len(workload.length_R), np.nan)
        self._runs: dict[int, set[int]] = defaultdict(set)
        self._queue: list[tuple[float, int, int]] = []
        self._num_wasted = 0.0
        self._changes: list[TailChange] = []
        # Tokens with which a run began that went on from another, and those that all runs of a request have made.
        self._given: dict[tuple[int, int], float] = {}
        self._made: dict[int, float] = defaultdict(float)
        self._on_end: Callable[[int, float], None] | None = None

    def start(self, requests_R: np.ndarray, worker_R: np.ndarray) -> None:
        """Requests that begin now, each on its worker; those that find no room wait there."""
        for index in np.unique(worker_R).tolist():
            worker = self.workers[index]
            worker.advance(self.now_s)
            worker.waiting.extend(requests_R[worker_R == index].tolist())
            self._admit(worker)
            self._plan(worker)

    def run(
        self, until_s: float = np.inf, stop: Callable[[], bool] = lambda: False,
        on_end: Callable[[int, float], None] | None = None,
    ) -> None:  # fmt: skip
        """Until all requests have ended, that moment, or `stop()`; `on_end(request, seconds)` is told of each."""
        self._on_end = on_end
        while self._queue and self._queue[0][0] <= until_s and not stop():
            end_s, index, stamp = heapq.heappop(self._queue)
            if stamp == self.workers[index].stamp:
                self.now_s = end_s
                self._end(self.workers[index])
        if np.isfinite(until_s):
            self.now_s = max(self.now_s, until_s)

    def result(self) -> RolloutResult:
        """After the last request."""
        spans = tuple(span for worker in self.workers for span in worker.spans)
        num_tokens = sum(span.num_tokens for span in spans) - self._num_wasted
        return RolloutResult(
            self.end_R, self.workload.length_R, spans, len(self.workers), num_tokens, self._num_wasted,
            tuple(self._changes),
        )  # fmt: skip

    # Events

    def _end(self, worker: Worker) -> None:
        """The next request of a worker has all its tokens."""
        worker.advance(self.now_s)
        ended = worker.ended()
        worker.drop(ended)
        for request in ended.tolist():
            self._finish(request, worker)
        self._admit(worker)
        self._plan(worker)
        if self.tail is not None:
            self._tend_tail(worker)

    def _finish(self, request: int, winner: Worker) -> None:
        self.end_R[request] = self.now_s
        length = int(self.workload.length_R[request])
        self._close(request, winner, length)
        for index in self._runs.pop(request) - {winner.index}:
            self._take_away(self.workers[index], request)
            self._admit(self.workers[index])
            self._plan(self.workers[index])
        self._num_wasted += self._made.pop(request) - length
        if self.tail is not None:
            self.tail.ended(int(self.workload.prompt_R[request]), length)
        if self._on_end is not None:
            self._on_end(request, self.now_s)

    def _take_away(self, worker: Worker, request: int) -> None:
        """A run ends before its request does."""
        worker.advance(self.now_s)
        self._close(request, worker, worker.drop(np.array([request])))

    def _close(self, request: int, worker: Worker, num_tokens: float) -> None:
        self._made[request] += num_tokens - self._given.pop((request, worker.index), 0.0)

    def _admit(self, worker: Worker) -> None:
        """Waiting requests begin, as many as have room."""
        num = min(worker.num_slots - len(worker.requests_B), len(worker.waiting))
        if num <= 0:
            return
        requests_b = np.array([worker.waiting.popleft() for _ in range(num)])
        worker.prefill(self.now_s, self.workload.tokens_to_prefill(requests_b))
        self._take(worker, requests_b, np.zeros(num))

    def _take(self, worker: Worker, requests_b: np.ndarray, tokens_b: np.ndarray) -> None:
        work = self.workload
        p_b = work.acceptance_RM[requests_b, worker.method]
        worker.take(requests_b, tokens_b, work.length_R[requests_b].astype(float), p_b)
        for request in requests_b.tolist():
            self._runs[request].add(worker.index)

    def _plan(self, worker: Worker) -> None:
        end_s = worker.plan(self.now_s, self.workload.prompt_tokens)
        if np.isfinite(end_s):
            heapq.heappush(self._queue, (end_s, worker.index, worker.stamp))

    # The tail

    def _tend_tail(self, worker: Worker) -> None:
        assert self.tail is not None
        if not worker.load:
            worker.run_dry()
        if not self.tail.is_due(self.workers, self.now_s):
            return
        decision = self.tail.decide(self.workload, self.workers, self.now_s)
        if decision.starts or decision.stops:
            self._carry_out(decision)

    def _carry_out(self, decision: TailDecision) -> None:
        """A start goes on from the furthest of the request's runs: all make the same tokens."""
        moved = {request for request, _ in decision.stops}
        stopped = {index for _, index in decision.stops}
        furthest = {r: self._furthest(r) for r, _ in decision.starts}
        for request, index in decision.stops:
            self._stop(request, self.workers[index])
        for request, index in decision.starts:
            self._move_to(request, self.workers[index], furthest[request])
            self._changes.append(TailChange(self.now_s, is_race=request not in moved))
        for index in stopped | {index for _, index in decision.starts}:
            self._admit(self.workers[index])
            self._plan(self.workers[index])

    def _furthest(self, request: int) -> float:
        tokens = [0.0]
        for index in self._runs[request]:
            worker = self.workers[index]
            tokens.append(float(worker.tokens_at(self.now_s)[worker.requests_B == request][0]))
        return max(tokens)

    def _stop(self, request: int, worker: Worker) -> None:
        self._runs[request].discard(worker.index)
        self._take_away(worker, request)

    def _move_to(self, request: int, worker: Worker, num_tokens: float) -> None:
        worker.advance(self.now_s)
        worker.prefill(self.now_s, self.workload.prompt_tokens + num_tokens)
        self._given[request, worker.index] = num_tokens
        self._take(worker, np.array([request]), np.array([num_tokens]))
