# SPDX-License-Identifier: Apache-2.0
"""Event loop of a simulated rollout, in which engines decode, requests end, and a tail policy decides on moves and races.

Shapes: R requests, B requests of an engine, N spans, T moments.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.simulation.simulated_engine import SimulatedEngine, Span, TailPolicy
from lab.simulation.workload import Workload
from nemo_specrollout.stragglers.decisions.straggler_policy import TailDecision


@dataclass(frozen=True)
class TailChange:
    """A move of a request, or the start of a race for it."""

    at_s: float
    is_race: bool


@dataclass(frozen=True)
class RolloutResult:
    """Result of a rollout. Token counts come from a fluid model, so they are fractional."""

    end_R: np.ndarray
    """Second at which each request ended, float64."""
    length_R: np.ndarray
    """Number of response tokens of each request, int64."""
    spans: tuple[Span, ...]
    num_engines: int
    num_tokens: float
    """Number of tokens of all responses."""
    num_wasted_tokens: float
    """Number of tokens that engines decoded for nothing, because another engine won the race."""
    changes: tuple[TailChange, ...] = ()
    """Moves and races in the order in which they happened."""

    @property
    def num_moves(self) -> int:
        return len(self.changes) - self.num_races

    @property
    def num_races(self) -> int:
        return sum(change.is_race for change in self.changes)

    @property
    def seconds(self) -> float:
        """Seconds until the last request ended."""
        return float(self.end_R.max())

    @property
    def busy_s(self) -> float:
        """Seconds in which engines were busy, summed over engines."""
        return sum(span.end_s - span.begin_s for span in self.spans)

    @property
    def num_request_steps(self) -> float:
        """Sum over all engine steps of the number of requests in the step."""
        return sum(span.num_steps * span.num_requests for span in self.spans)

    @property
    def idle_share(self) -> float:
        """Share of the engines' time in which they were idle, until the last request ended."""
        return 1.0 - self.busy_s / (self.num_engines * self.seconds)

    def idle_share_between(self, begin_s: float, end_s: float) -> float:
        """Returns the share of the engines' time in which they were idle, between two seconds."""
        busy_s = sum(max(0.0, min(s.end_s, end_s) - max(s.begin_s, begin_s)) for s in self.spans)
        return 1.0 - busy_s / (self.num_engines * (end_s - begin_s))

    def running_share(self, num_points: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `num_points` moments in seconds, and the share of busy engines around each moment, both float64 [T]."""
        edges = np.linspace(0.0, self.seconds, num_points + 1)
        begins_N = np.array([span.begin_s for span in self.spans])
        ends_N = np.array([span.end_s for span in self.spans])
        busy_s = np.diff(_seconds_since(begins_N, edges) - _seconds_since(ends_N, edges))
        return (edges[1:] + edges[:-1]) / 2, busy_s / np.diff(edges) / self.num_engines


@dataclass(frozen=True)
class StepResult:
    """Times of an RL step. If steps overlap, they are means in the steady state."""

    variant: str
    parts_s: dict[str, float]
    """Seconds of a step by part. In asynchronous training, generation counts only as far as training waits for it."""
    rollout_s: float
    """Seconds from the start of a batch until its last request ended."""
    idle_share: float
    """Share of the time of all GPUs in which they are idle during a step."""
    rollout: RolloutResult

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts_s.values())


class Rollout:
    """A simulated rollout. Owns the engines, the clock, and the attempts of engines at requests.

    Call `start` with the engine of each request, and then `run`.

    Invariant: a request runs in several engines only while they race for it. When one engine ends the request, the other
    engines stop decoding it.
    """

    def __init__(self, workload: Workload, engines: Sequence[SimulatedEngine], tail: TailPolicy | None = None) -> None:
        self.workload = workload
        self.engines = list(engines)
        self.tail = tail
        self.now_s = 0.0
        self.end_R = np.full(len(workload.length_R), np.nan)
        self._attempts: dict[int, set[int]] = defaultdict(set)
        self._queue: list[tuple[float, int, int]] = []
        self._num_wasted = 0.0
        self._changes: list[TailChange] = []
        self._given: dict[tuple[int, int], float] = {}
        """Number of tokens that an attempt took over when it began, by request and engine."""
        self._made: dict[int, float] = defaultdict(float)
        """Number of tokens that ended attempts have decoded, by request."""

    def start(self, requests_R: np.ndarray, engine_R: np.ndarray) -> None:
        """Starts requests now, each in the engine that `engine_R` names. A request waits there if no slot is free."""
        for index in np.unique(engine_R).tolist():
            engine = self.engines[index]
            engine.advance(self.now_s)
            engine.waiting.extend(requests_R[engine_R == index].tolist())
            self._admit(engine)
            self._plan(engine)

    def run(self, until_s: float = np.inf, until_ended: np.ndarray | None = None) -> None:
        """Runs until all requests have ended, until `until_s`, or until the requests `until_ended` have ended."""
        while self._queue and self._queue[0][0] <= until_s:
            if until_ended is not None and np.isfinite(self.end_R[until_ended]).all():
                break
            end_s, index, plan_number = heapq.heappop(self._queue)
            if plan_number == self.engines[index].plan_number:
                self.now_s = end_s
                self._end(self.engines[index])
        if np.isfinite(until_s):
            self.now_s = max(self.now_s, until_s)

    def result(self) -> RolloutResult:
        """Returns the result after the last request has ended."""
        spans = tuple(span for engine in self.engines for span in engine.spans)
        num_tokens = sum(span.num_tokens for span in spans) - self._num_wasted
        return RolloutResult(
            self.end_R,
            self.workload.length_R,
            spans,
            len(self.engines),
            num_tokens,
            self._num_wasted,
            tuple(self._changes),
        )

    # Events

    def _end(self, engine: SimulatedEngine) -> None:
        """Ends an engine's requests that have all their tokens now, and starts waiting ones in their slots.

        Then asks the tail policy which requests move or race, if it is due to be asked.
        """
        engine.advance(self.now_s)
        ended = engine.ended()
        engine.drop(ended)
        for request in ended.tolist():
            self._finish(request, engine)
        self._admit(engine)
        self._plan(engine)
        if self.tail is None:
            return
        if not engine.load:
            engine.became_idle()
        if self.tail.is_due(self.engines, self.now_s):
            self._carry_out(self.tail.decide(self.workload, self.engines, self.now_s))

    def _finish(self, request: int, winner: SimulatedEngine) -> None:
        self.end_R[request] = self.now_s
        length = int(self.workload.length_R[request])
        self._close(request, winner, length)
        for index in self._attempts.pop(request) - {winner.index}:
            self._take_away(self.engines[index], request)
            self._admit(self.engines[index])
            self._plan(self.engines[index])
        self._num_wasted += self._made.pop(request) - length
        if self.tail is not None:
            self.tail.estimator.finished(int(self.workload.prompt_R[request]), length)

    def _take_away(self, engine: SimulatedEngine, request: int) -> None:
        """Ends an engine's attempt at a request before the request has ended."""
        engine.advance(self.now_s)
        self._close(request, engine, engine.drop(np.array([request])))

    def _close(self, request: int, engine: SimulatedEngine, num_tokens: float) -> None:
        self._made[request] += num_tokens - self._given.pop((request, engine.index), 0.0)

    def _admit(self, engine: SimulatedEngine) -> None:
        """Starts waiting requests in free slots."""
        num = min(engine.num_slots - len(engine.requests_B), len(engine.waiting))
        if num <= 0:
            return
        requests_b = np.array([engine.waiting.popleft() for _ in range(num)])
        engine.prefill(self.now_s, self.workload.tokens_to_prefill(requests_b))
        self._take(engine, requests_b, np.zeros(num))

    def _take(self, engine: SimulatedEngine, requests_b: np.ndarray, tokens_b: np.ndarray) -> None:
        work = self.workload
        p_b = work.acceptance_RM[requests_b, engine.method]
        lengths_b = work.length_R[requests_b].astype(float)
        engine.take(requests_b, tokens_b, lengths_b, p_b)
        for request in requests_b.tolist():
            self._attempts[request].add(engine.index)

    def _plan(self, engine: SimulatedEngine) -> None:
        end_s = engine.plan(self.now_s, self.workload.prompt_tokens)
        if np.isfinite(end_s):
            heapq.heappush(self._queue, (end_s, engine.index, engine.plan_number))

    # The tail

    def _carry_out(self, decision: TailDecision) -> None:
        """Stops and starts attempts as the tail policy has decided.

        All attempts at a request make the same tokens. So a new attempt takes over the tokens of the attempt that has come
        furthest with its request.
        """
        moved = {request for request, _ in decision.stops}
        stopped = {index for _, index in decision.stops}
        furthest = {r: self._furthest(r) for r, _ in decision.starts}
        for request, index in decision.stops:
            self._attempts[request].discard(index)
            self._take_away(self.engines[index], request)
        for request, index in decision.starts:
            engine = self.engines[index]
            num_tokens = furthest[request]
            engine.advance(self.now_s)
            engine.prefill(self.now_s, self.workload.prompt_tokens + num_tokens)
            self._given[request, index] = num_tokens
            self._take(engine, np.array([request]), np.array([num_tokens]))
            self._changes.append(TailChange(self.now_s, is_race=request not in moved))
        for index in stopped | {index for _, index in decision.starts}:
            self._admit(self.engines[index])
            self._plan(self.engines[index])

    def _furthest(self, request: int) -> float:
        engines = [self.engines[index] for index in self._attempts[request]]
        return max((float(e.tokens_at(self.now_s)[e.requests_B == request][0]) for e in engines), default=0.0)


def _seconds_since(starts_N: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns for each moment in `edges` the seconds that have passed since each earlier start, summed, float64.

    This sum for the beginnings of spans, minus the sum for their ends, is the busy time of all engines up to the moment.
    """
    sorted_N = np.sort(starts_N)
    sums = np.concatenate([[0.0], np.cumsum(sorted_N)])
    num_before = np.searchsorted(sorted_N, edges, "right")
    return edges * num_before - sums[num_before]
