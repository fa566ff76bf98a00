# SPDX-License-Identifier: Apache-2.0
"""The tail of a rollout: which straggler moves to another worker, which is raced by several, which racer gives up.

All workers make the same tokens for a request, so the first to end has made *the* response: nothing is biased towards short
ones. After Algorithm 3 of SpecActor (arXiv 2511.16193), which gives free workers to the requests with the worst acceptance;
here every step of it must promise an earlier end, by measured paces, with prefill and contention counted.

Shapes: R requests under way, M draft methods, U runs (a request on a worker), W workers, B requests of one worker.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.scheduling.racing.draft_ladder import Paces
from nemo_specrollout.scheduling.racing.drain import drain, slowdowns_of

# How many of a worker's requests are looked at, the last to end; how many changes are made at a time, at most.
NUM_LAST, MOST_CHANGES = 4, 64
# Workers of which nothing can be bettered, after which no more are looked at.
MOST_SETTLED = 16
# A racer with less of a chance to be first gives up.
LEAST_CHANCE = 0.05
# A race must promise so much more than a move to the same worker, which leaves the other one to others.
RACE_PREMIUM = 0.01


@dataclass(frozen=True)
class TailObservation:
    """What is under way. A request without a run is waiting for a worker."""

    num_tokens_R: np.ndarray
    """Length of prompt and response as far as any worker is, int64."""
    remaining_R: np.ndarray
    """Expected tokens to come from there, float64."""
    speed_RM: np.ndarray
    """Its pace under a method over a typical request's, float64."""
    doubt_RM: np.ndarray
    """Standard deviation of the logarithm of that, float64."""
    request_U: np.ndarray
    """Which request a run decodes, int64."""
    worker_U: np.ndarray
    """And on which worker."""
    lag_U: np.ndarray
    """Tokens by which a run is behind the furthest of its request, int64."""
    method_W: np.ndarray
    """The draft method of a worker, int64."""
    capacity_W: np.ndarray
    """Requests that a worker may have at a time, int64; 0 of one that is gone."""
    hop_s: float = 0.0
    """Seconds from a decision until a worker begins with what it was given."""


@dataclass(frozen=True)
class TailDecision:
    """Runs, as pairs of a request and a worker, to start and to stop. A pair of both for one request is a move."""

    starts: tuple[tuple[int, int], ...] = ()
    stops: tuple[tuple[int, int], ...] = ()


class FastestOfN:
    """The policy. Owns nothing that changes: the same observation gives the same decision.

    First everybody who waits gets a worker, then racers without a chance give up, then the worker that ends last gives one or
    several requests to one that ends earlier, or has its last one raced, as long as that brings the later of both ends forward
    by `min_gain`.
    """

    def __init__(self, config: FastestOfNConfig, paces: Paces) -> None:
        self.config = config
        self.paces = paces

    def decide(self, seen: TailObservation) -> TailDecision:
        """What to start and stop now."""
        board = _Board(seen, self.paces)
        if not (seen.capacity_W > 0).any():
            return TailDecision()
        for request in board.waiting():
            board.start(request, board.best_worker(request))
        self._give_up(board)
        settled: set[int] = set()
        while len(board.changes) < MOST_CHANGES and len(settled) < MOST_SETTLED:
            if (worker := board.last_worker(settled)) is None:
                break
            plan = self._best_plan(board, worker)
            if plan is None:
                settled.add(worker)
            else:
                board.carry_out(plan)
        return board.decision()

    def _give_up(self, board: "_Board") -> None:
        for request, worker in board.raced_runs():
            if board.chance(request, worker) < LEAST_CHANCE:
                board.stop(request, worker)

    def _best_plan(self, board: "_Board", worker: int) -> "_Plan | None":
        """What brings the end of `worker` forward most, or None if nothing is worth it. Several go at a time only where
        none gains enough by going alone."""
        alone = [
            p for r in board.last_requests(worker) for t in board.targets(r) for p in self._plans(board, r, worker, t)
        ]
        return self._worthwhile(board, worker, alone) or self._worthwhile(board, worker, self._bundles(board, worker))

    def _worthwhile(self, board: "_Board", worker: int, plans: Iterable["_Plan"]) -> "_Plan | None":
        """The best, if it is worth it."""
        end_s = board.end_s(worker)
        least_s = max(self.config.min_gain * end_s, board.seen.hop_s)
        best = max(plans, key=lambda p: end_s - p.end_s - (RACE_PREMIUM * end_s if p.is_race else 0.0), default=None)
        return best if best is not None and end_s - best.end_s > least_s else None

    def _plans(self, board: "_Board", request: int, worker: int, target: int) -> list["_Plan"]:
        runs, methods = board.workers_of(request), board.seen.method_W
        plans = []
        if self.config.moving and len(runs) == 1:
            plans.append(_Plan((request,), worker, target, False, board.end_after_move((request,), worker, target)))
        is_new = methods[target] not in methods[list(runs)]
        if is_new and len(runs) < self.config.max_racers and board.ends_last(request, worker):
            plans.append(_Plan((request,), worker, target, True, board.end_after_race(request, worker, target)))
        return plans

    def _bundles(self, board: "_Board", worker: int) -> Iterator["_Plan"]:
        """Moves of 2, 4, 8, ... of the last to end: where many end alike, one that goes alone changes little."""
        alone = [r for r in board.by_end(worker) if len(board.workers_of(r)) == 1] if self.config.moving else []
        size = 2
        while size <= min(len(alone), MOST_CHANGES // 2):
            bundle = tuple(alone[:size])
            for target in board.targets(bundle[0], size):
                yield _Plan(bundle, worker, target, False, board.end_after_move(bundle, worker, target))
            size *= 2


@dataclass(frozen=True)
class _Plan:
    """The request of `source` is raced by `target`, or one or several move there; the later of both ends at `end_s`."""

    requests: tuple[int, ...]
    source: int
    target: int
    is_race: bool
    end_s: float


@dataclass
class _Board:
    """The runs as they would be after the changes so far, and when they would end by what is known."""

    seen: TailObservation
    paces: Paces
    changes: list[tuple[int, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ends_s: dict[int, float] = {}
        self.alone_s: list[dict[int, float]] = [{} for _ in self.seen.capacity_W]
        self._workers: dict[int, dict[int, None]] = {}
        self._slow: dict[int, list[float]] = {}
        seconds_U = self._alone_s(self.seen.request_U, self.seen.worker_U, self.seen.lag_U)
        for r, w, s in zip(self.seen.request_U.tolist(), self.seen.worker_U.tolist(), seconds_U.tolist(), strict=True):
            self.alone_s[w][r] = s
            self._workers.setdefault(r, {})[w] = None

    def _alone_s(self, request_U: np.ndarray, worker_U: np.ndarray, lag_U: np.ndarray) -> np.ndarray:
        """Seconds that runs would take without others on their workers, float64 [U]."""
        method_U = self.seen.method_W[worker_U]
        pace_U = self._pace_M[method_U] * self.seen.speed_RM[request_U, method_U]
        return (self.seen.remaining_R[request_U] + lag_U) / pace_U

    @cached_property
    def _pace_M(self) -> np.ndarray:
        return np.array([self.paces.tokens_per_s(m, 1) for m in range(self.seen.speed_RM.shape[1])])

    def workers_of(self, request: int) -> dict[int, None]:
        """Where it runs."""
        return self._workers.get(request, {})

    def waiting(self) -> list[int]:
        """Requests without a run, the longest first."""
        order = np.argsort(-self.seen.remaining_R, kind="stable")
        return [r for r in order.tolist() if not self.workers_of(r)]

    def raced_runs(self) -> list[tuple[int, int]]:
        """Runs of requests that several workers decode, the last to end first."""
        runs = [(r, w) for r, workers in self._workers.items() if len(workers) > 1 for w in workers]
        return sorted(runs, key=lambda run: -self._mean_s(*run))

    # What is known of ends

    def slowdowns(self, worker: int, batch: int) -> np.ndarray:
        """How much slower than alone a request is, in batches of 1, 2, ... `batch`; float64."""
        method = int(self.seen.method_W[worker])
        known = self._slow.setdefault(method, [])
        known += slowdowns_of(self.paces, method, len(known) + 1, batch)
        return np.array(known[:batch])

    def ends_s(self, worker: int, alone_s: dict[int, float]) -> dict[int, float]:
        """When each of a worker's requests ends, if these are all that it has; a race ends when its first is expected to."""
        if not alone_s:
            return {}
        ends_B = drain(np.array(list(alone_s.values())), self.slowdowns(worker, len(alone_s)))
        return dict(zip(alone_s, ends_B.tolist(), strict=True))

    def end_s(self, worker: int) -> float:
        """When `worker` has nothing left to do."""
        if worker not in self._ends_s:
            self._ends_s[worker] = self._end_s(worker, self.alone_s[worker])
        return self._ends_s[worker]

    def _end_s(self, worker: int, alone_s: dict[int, float]) -> float:
        ends = self.ends_s(worker, alone_s)
        return max((self._first_s(r, worker, e) for r, e in ends.items()), default=0.0)

    def _first_s(self, request: int, worker: int, end_s: float) -> float:
        """When a request ends that ends on `worker` at `end_s` if no other racer is before."""
        rivals = [w for w in self.workers_of(request) if w != worker]
        for rival in rivals:
            end_s = min(end_s, self._race_s(request, worker, end_s, rival, self._mean_s(request, rival)))
        return end_s

    def _mean_s(self, request: int, worker: int) -> float:
        return self.ends_s(worker, self.alone_s[worker])[request]

    def _race_s(self, request: int, one: int, one_s: float, other: int, other_s: float) -> float:
        doubts_M, methods = self.seen.doubt_RM[request], self.seen.method_W
        if methods[one] == methods[other]:
            return min(one_s, other_s)
        return expected_first(one_s, float(doubts_M[methods[one]]), other_s, float(doubts_M[methods[other]]))

    def chance(self, request: int, worker: int) -> float:
        """P(this racer is the first), against the best of the others."""
        rivals = [w for w in self.workers_of(request) if w != worker]
        if not rivals:
            return 1.0
        rival = min(rivals, key=lambda w: self._mean_s(request, w))
        doubts_M, methods = self.seen.doubt_RM[request], self.seen.method_W
        spread = math.hypot(doubts_M[methods[worker]], doubts_M[methods[rival]])
        lead = math.log(self._mean_s(request, rival) / self._mean_s(request, worker))
        return _normal(lead / spread) if spread > 0 else float(lead >= 0)

    # What could be done

    def last_worker(self, without: set[int]) -> int | None:
        """The worker that ends last, None if no other has anything to do."""
        busy = [w for w in range(len(self.alone_s)) if self.alone_s[w] and w not in without]
        return max(busy, key=self.end_s, default=None)

    def by_end(self, worker: int) -> list[int]:
        """Its requests, those first that end last."""
        ends = self.ends_s(worker, self.alone_s[worker])
        return sorted(ends, key=lambda r: -ends[r])

    def last_requests(self, worker: int) -> list[int]:
        """Of its requests those that end last."""
        return self.by_end(worker)[:NUM_LAST]

    def ends_last(self, request: int, worker: int) -> bool:
        return self.last_requests(worker)[0] == request

    def best_worker(self, request: int) -> int:
        """Where a request would end first if it began now; if all are full, where it would wait least."""
        has_room = [w for w in range(len(self.alone_s)) if len(self.alone_s[w]) < self.seen.capacity_W[w]]
        open_ones = has_room or np.flatnonzero(self.seen.capacity_W > 0).tolist()
        return min(open_ones, key=lambda w: self.ends_s(w, self._with((request,), w))[request])

    def targets(self, request: int, room: int = 1) -> list[int]:
        """Of each method the worker that ends first, of those with so much room that do not have the request."""
        best: dict[int, int] = {}
        for worker, method in enumerate(self.seen.method_W.tolist()):
            has_room = len(self.alone_s[worker]) + room <= self.seen.capacity_W[worker]
            if has_room and request not in self.alone_s[worker]:
                before = best.get(method)
                best[method] = worker if before is None or self.end_s(worker) < self.end_s(before) else before
        return list(best.values())

    def end_after_move(self, requests: tuple[int, ...], source: int, target: int) -> float:
        """The later end of the two, if the requests go from one to the other."""
        rest = {r: s for r, s in self.alone_s[source].items() if r not in requests}
        there = self.ends_s(target, self._with(requests, target))
        ends = [e if r in requests else self._first_s(r, target, e) for r, e in there.items()]
        return max(self._end_s(source, rest), *ends)

    def end_after_race(self, request: int, source: int, target: int) -> float:
        """The later end of the two, if both have the request."""
        here, there = self.ends_s(source, self.alone_s[source]), self.ends_s(target, self._with((request,), target))
        first_s = self._race_s(request, source, self._first_s(request, source, here[request]), target, there[request])
        others_s = [self._first_s(r, source, e) for r, e in here.items() if r != request]
        others_s += [self._first_s(r, target, e) for r, e in there.items() if r != request]
        return max([first_s, *others_s])

    def _with(self, requests: tuple[int, ...], worker: int) -> dict[int, float]:
        """A worker's runs and more, which begin with a prefill that all of them wait for."""
        runs, new_R = self.alone_s[worker], np.array(requests)
        slow = float(self.slowdowns(worker, len(runs) + len(requests))[-1])
        prefill_s = self.paces.prefill_s(int(self.seen.num_tokens_R[new_R].sum())) / slow
        new_s = self._alone_s(new_R, np.full(len(new_R), worker), np.zeros(len(new_R))) + prefill_s
        new_s += self.seen.hop_s / slow
        return {r: s + prefill_s for r, s in runs.items()} | dict(zip(requests, new_s.tolist(), strict=True))

    # What is done

    def start(self, request: int, worker: int) -> None:
        self.alone_s[worker] = self._with((request,), worker)
        self._workers.setdefault(request, {})[worker] = None
        self._forget_ends(worker)
        self.changes.append((request, worker, True))

    def stop(self, request: int, worker: int) -> None:
        self._forget_ends(worker)
        del self.alone_s[worker][request], self._workers[request][worker]
        self.changes.append((request, worker, False))

    def _forget_ends(self, worker: int) -> None:
        """Of a worker that changes, and of those that race with it."""
        for rival in {worker, *(w for r in self.alone_s[worker] for w in self.workers_of(r))}:
            self._ends_s.pop(rival, None)

    def carry_out(self, plan: _Plan) -> None:
        for request in plan.requests:
            if not plan.is_race:
                self.stop(request, plan.source)
            self.start(request, plan.target)

    def decision(self) -> TailDecision:
        """All changes; what was started and stopped again is none."""
        final: dict[tuple[int, int], bool | None] = {}
        for request, worker, is_start in self.changes:
            pair = request, worker
            final[pair] = None if final.get(pair) is (not is_start) else is_start
        return TailDecision(
            tuple(pair for pair, is_start in final.items() if is_start is True),
            tuple(pair for pair, is_start in final.items() if is_start is False),
        )


def expected_first(mean_1: float, doubt_1: float, mean_2: float, doubt_2: float) -> float:
    """E[min] of two independent log-normal times with these means; `doubt` is the standard deviation of the logarithm.

    Source: the partial expectations of the log-normal distribution (Black 1976 has the same formula for an option).
    """
    spread = math.hypot(doubt_1, doubt_2)
    if spread == 0.0 or min(mean_1, mean_2) <= 0.0:
        return min(mean_1, mean_2)
    lead = math.log(mean_2 / mean_1)
    return mean_1 * _normal(lead / spread - spread / 2) + mean_2 * _normal(-lead / spread - spread / 2)


def _normal(x: float) -> float:
    """P(a standard normal number is at most x)."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))
