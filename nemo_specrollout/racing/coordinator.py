# SPDX-License-Identifier: Apache-2.0
"""Rolls requests out over several workers: deals them out, takes what is made, moves and races stragglers, survives deaths.

Shapes: R requests under way, K runs that made tokens, U runs, W workers; see `scheduling/racing/straggler_policy.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from nemo_specrollout.generation.engine import Rollout
from nemo_specrollout.racing.responses import Response, Run
from nemo_specrollout.racing.savings import Savings
from nemo_specrollout.racing.timeline import (
    ABANDONED,
    BEATEN,
    DIED,
    DIVERGED,
    GAVE_UP,
    MOVED,
    WON,
    SpanLog,
    Timeline,
)
from nemo_specrollout.racing.turns import Orders, Report, Request
from nemo_specrollout.scheduling.racing.dispatch import in_shards, longest_first
from nemo_specrollout.scheduling.racing.draft_ladder import ANY_TASK, Ladder
from nemo_specrollout.scheduling.racing.request_speeds import RunSpeeds
from nemo_specrollout.scheduling.racing.response_lengths import LengthEstimator
from nemo_specrollout.scheduling.racing.straggler_policy import FastestOfN, TailObservation

# A turn takes such a share of what the requests under way took so far, within bounds: short ones cost, long ones delay.
TURN_SHARE, SHORTEST_TURN_S, LONGEST_TURN_S = 0.05, 0.05, 0.5
# Turns that a worker has before it: it begins the next while the report of the last is read.
MOST_AHEAD = 2


class Workers(Protocol):
    """What a coordinator drives."""

    methods: list[int]
    """The draft method of each worker, as numbered by the ladder."""
    capacity: int
    """Requests that a worker may have at a time."""

    def send(self, worker: int, orders: Orders) -> None:
        """Asks for a turn. A worker takes its turns, and new weights, in order."""

    def reports(self) -> list[tuple[int, Report | None]]:
        """Waits until a turn ends, or a worker that was being revived is alive; a worker that has died reports None, once,
        instead of all turns that it still had."""

    def num_turns(self, worker: int) -> int:
        """Turns that it was asked for and has not reported."""

    def is_alive(self, worker: int) -> bool:
        """Whether it takes orders."""

    def revive(self) -> None:
        """Begins to start those that died again, with the weights of the others. Raises RuntimeError if no worker is left."""

    def load_weights(self, tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Gives every worker new weights, after the turns that it was asked for."""


class Coordinator:
    """Rollouts over workers. Owns what is known of each response; ladder and lengths outlive them.

    A round: *give workers their turns, take what they report, consult the policy.* Without a policy a request stays where it
    was dealt, unless its worker dies.
    """

    def __init__(self, workers: Workers, policy: FastestOfN | None, ladder: Ladder, lengths: LengthEstimator) -> None:
        self.workers, self.policy, self.ladder, self.lengths = workers, policy, ladder, lengths
        self._workers = range(len(workers.methods))
        self._responses: dict[int, Response] = {}
        self._active: dict[int, None] = {}
        self._waiting: dict[int, None] = {}  # of those, who has no run
        self._ended: list[int] = []
        self._starts: list[dict[int, int]] = [{} for _ in self._workers]  # request of a run, by its name
        self._stops: list[list[int]] = [[] for _ in self._workers]
        self._run_names: dict[int, tuple[int, int]] = {}
        self._num_runs_W = [0] * len(workers.methods)
        self._num_requests = self._num_runs = 0
        self._speeds = RunSpeeds(np.ones((0, len(ladder.methods))))
        self._rows: dict[int, int] = {}  # of requests that were not taken, among the speeds
        self._first_key = 0  # of those that began since nothing was under way
        self._log = SpanLog(tuple(ladder.methods[m] for m in workers.methods))
        self._busy_since_s = self._next_look_s = 0.0
        self._savings = Savings(len(self._workers), 0.0)
        self._saved_s: float | None = None
        self._stood_still: set[int] = set()

    def roll_out(
        self,
        requests: Sequence[Request],
        on_finished: Callable[[int], None] = lambda done: None,
        task: str = ANY_TASK,
    ) -> tuple[list[Rollout], Timeline]:
        """The responses, in the order of `requests`, and who made them. If interrupted, workers are told to forget them."""
        keys = self.add(requests, task)
        try:
            num_done = 0
            while num_done < len(keys):
                num_done += len(self.advance())
                on_finished(num_done)
        except BaseException:
            self.abandon()
            raise
        responses, timeline = self.take(keys)
        return [r.rollout for r in responses], timeline

    @property
    def is_busy(self) -> bool:
        """Whether any request is under way."""
        return bool(self._active)

    def add(self, requests: Sequence[Request], task: str = ANY_TASK, worker: int | None = None) -> list[int]:
        """More requests are under way from the next round on; their numbers. They begin on `worker` if one is named, who is
        alive, else they are dealt out."""
        self.workers.revive()
        if not self._active:
            self._begin_afresh()
        else:
            self._savings.more()
        keys = list(range(self._num_requests, self._num_requests + len(requests)))
        self._num_requests += len(requests)
        self._responses |= {key: Response(r, task) for key, r in zip(keys, requests, strict=True)}
        self._active |= dict.fromkeys(keys)
        self._waiting |= dict.fromkeys(keys)
        ease_M = np.array([self.ladder.ease(task, m) for m in range(len(self.ladder.methods))])
        self._rows |= zip(keys, self._speeds.begin(len(keys), ease_M), strict=True)
        if worker is None:
            self._deal_out(keys)
        else:
            for key in keys:
                self._start(key, worker)
        return keys

    def _begin_afresh(self) -> None:
        """Nothing is under way."""
        self._busy_since_s, self._next_look_s = self._log.now_s, 0.0
        self._first_key = self._num_requests
        self._savings, self._saved_s = Savings(len(self._workers), self._busy_since_s), None

    def advance(self) -> list[int]:
        """One round; the requests that ended in it."""
        if not self._active:
            return []
        self.send_turns()
        self._take_reports()
        self._consult()
        ended, self._ended = self._ended, []
        return ended

    def take(self, keys: Sequence[int]) -> tuple[list[Response], Timeline]:
        """Responses that have ended, which are forgotten here, and who made them. What moves and races saved is known if they
        were under way together and without others."""
        is_all = len(keys) == self._num_requests - self._first_key
        if not is_all:
            self._savings.give_up()
        timeline = replace(self._log.take(keys), saved_s=self._saved_s if is_all else None)
        self._speeds.forget([self._rows.pop(key) for key in keys])
        return [self._responses.pop(key) for key in keys], timeline

    def response(self, key: int) -> Response:
        """What is known of a response that was not taken yet."""
        return self._responses[key]

    def abandon(self, keys: Iterable[int] | None = None) -> None:
        """These are no longer wanted, or nothing of what is under way is; what ended is none of them."""
        self._ended = [] if keys is None else self._ended
        for key in [key for key in (self._active if keys is None else keys) if key in self._active]:
            for worker in list(self._responses[key].runs):
                self._stop(key, worker, ABANDONED)
            self.take([key])
            del self._active[key], self._waiting[key]
        self._send_stops()

    def load_weights(self, tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """New weights for all workers, also amid requests."""
        self.settle()
        self.workers.load_weights(tensors, policy_version)

    def settle(self) -> None:
        """New weights are to come. A race ends with its leader: racers that get new weights at different tokens would make
        different texts."""
        self._savings.give_up()
        for key in self._active:
            runs = self._responses[key].runs
            for worker in sorted(runs, key=lambda w: -runs[w].position)[1:]:
                self._stop(key, worker, GAVE_UP)
        self._send_stops()

    def resumed(self) -> None:
        """They are there: the next report of each worker is also of a time in which it may have stood still."""
        self._stood_still = set(self._workers)

    # Runs

    def request_of(self, name: int) -> int | None:
        """Whose run that is, if it is one of those under way."""
        return self._run_names[name][0] if name in self._run_names else None

    def _deal_out(self, keys: Sequence[int]) -> None:
        requests = [self._responses[key].request for key in keys]
        groups = [r.prompt_index for r in requests]
        expected_R = self.lengths.remaining(groups, np.zeros(len(keys), np.int64))
        alive = [w for w in self._workers if self.workers.is_alive(w)]
        if not alive:
            return
        if self.policy is None:
            deal_R = np.array(alive)[in_shards(len(keys), len(alive))]
        else:
            deal_R = longest_first(groups, expected_R, self._loads())
        for i in np.argsort(-expected_R, kind="stable").tolist():
            self._start(keys[i], int(deal_R[i]))

    def _loads(self) -> np.ndarray:
        """Expected tokens that each worker has before it, float64 [W]; infinite of one that is gone."""
        loads_W = np.where([self.workers.is_alive(w) for w in self._workers], 0.0, np.inf)
        responses = [self._responses[key] for key in self._active if self._responses[key].runs]
        remaining_R = self._remaining(responses)
        for response, tokens in zip(responses, remaining_R.tolist(), strict=True):
            for worker in response.runs:
                loads_W[worker] += tokens
        return loads_W

    def _remaining(self, responses: Sequence[Response]) -> np.ndarray:
        lengths_R = np.array([len(r.tokens) for r in responses], np.int64)
        return self.lengths.remaining([r.request.prompt_index for r in responses], lengths_R)

    def _start(self, key: int, worker: int) -> None:
        """The worker is to begin with the request, at what will be known of its response when the order goes out."""
        response, name = self._responses[key], self._num_runs
        self._num_runs += 1
        self._run_names[name] = key, worker
        response.runs[worker] = Run(name, len(response.tokens))
        self._num_runs_W[worker] += 1
        self._waiting.pop(key, None)
        self._starts[worker][name] = key
        self._log.begin(key, worker, len(response.tokens))

    def _stop(self, key: int, worker: int, outcome: str) -> None:
        """The worker's run of a request is over; what it still reports of it is not heard."""
        name = self._close(key, worker, outcome)
        if self._starts[worker].pop(name, None) is None:
            self._stops[worker].append(name)

    def _close(self, key: int, worker: int, outcome: str, at_s: float | None = None) -> int:
        runs = self._responses[key].runs
        run = runs.pop(worker)
        self._num_runs_W[worker] -= 1
        if not runs:
            self._waiting[key] = None
        del self._run_names[run.name]
        self._log.end(key, worker, run.position, outcome, at_s)
        return run.name

    # Turns

    @property
    def _turn_s(self) -> float:
        return min(max(TURN_SHARE * (self._log.now_s - self._busy_since_s), SHORTEST_TURN_S), LONGEST_TURN_S)

    def send_turns(self) -> None:
        """Gives every worker the turns that it wants."""
        for worker in self._workers:
            while self._wants_turn(worker):
                orders = Orders(self.begin_now(worker), tuple(self._stops[worker]), self._turn_s)
                self._stops[worker] = []
                self.workers.send(worker, orders)

    def begin_now(self, worker: int, keys: Iterable[int] | None = None) -> tuple[tuple[int, Request], ...]:
        """What the worker is to begin with, or of it these requests, by name: in its next turn, or before if the caller sees
        to it."""
        starts, wanted = self._starts[worker], None if keys is None else set(keys)
        names = [name for name, key in starts.items() if wanted is None or key in wanted]
        return tuple((name, self._responses[starts.pop(name)].begin(worker)) for name in names)

    def _wants_turn(self, worker: int) -> bool:
        if not self.workers.is_alive(worker) or self.workers.num_turns(worker) >= MOST_AHEAD:
            return False
        return bool(self._num_runs_W[worker] or self._starts[worker] or self._stops[worker])

    def _send_stops(self) -> None:
        """At once, whatever turns a worker has before it."""
        for worker in filter(self.workers.is_alive, self._workers):
            if self._stops[worker]:
                self.workers.send(worker, Orders(stops=tuple(self._stops[worker])))
            self._stops[worker] = []

    def _take_reports(self) -> None:
        for worker, report in self.workers.reports():
            if report is None:
                self._lose(worker)
            else:
                self._take_report(worker, report)

    def _take_report(self, worker: int, report: Report) -> None:
        self._savings.told(worker, self._log.now_s)
        parts = {name: part for name, part in report.progress.parts().items() if name in self._run_names}
        self._learn(worker, report, {name: len(tokens) for name, (tokens, _) in parts.items()})
        for name, part in parts.items():
            key, reason = self._run_names[name][0], report.finished.get(name)
            if not self._responses[key].take(worker, *part, reason, report.policy_version):
                self._stop(key, worker, DIVERGED)
            elif reason is not None:
                self._finish(key, worker)

    def _finish(self, key: int, winner: int) -> None:
        response = self._responses[key]
        self._close(key, winner, WON)
        for rival in list(response.runs):
            self._stop(key, rival, BEATEN)
        del self._active[key], self._waiting[key]
        self._ended.append(key)
        self.lengths.finished(response.request.prompt_index, len(response.tokens))
        if not self._active:
            self._send_stops()
            self._estimate_savings()

    def _estimate_savings(self) -> None:
        if not self._savings.is_known:
            return
        rows_R = np.array([self._rows[key] for key in self._savings.keys], np.int64)
        speed_RM, method_W = self._speeds.speeds(rows_R), np.array(self.workers.methods)
        self._saved_s = self._savings.saved_s(self._log.now_s, self._responses, speed_RM, method_W, self.ladder)

    def _learn(self, worker: int, report: Report, counts: dict[int, int]) -> None:
        """What a turn tells of paces: of the method, and of each request that made tokens all through it."""
        work, method = report.work, self.workers.methods[worker]
        if worker in self._stood_still:
            self._stood_still.discard(worker)
            return
        if work.num_prefilled:
            self.ladder.observe_prefill(work.num_prefilled, work.prefill_s)
        if not work.num_tokens or not counts:
            return
        batch = max(1, round(work.mean_batch))
        typical = self.ladder.tokens_per_s(method, batch) * work.decode_s
        tasks = {self._responses[self._run_names[name][0]].task for name in counts}
        self.ladder.observe(
            tasks.pop() if len(tasks) == 1 else ANY_TASK, method, batch, work.num_tokens, work.request_s
        )
        steady = [name for name in report.steady if name in self._run_names]
        whole = {self._rows[self._run_names[name][0]]: counts.get(name, 0) for name in steady}
        self._speeds.observe(np.array(list(whole), np.int64), method, np.array(list(whole.values()), float), typical)

    def _lose(self, worker: int) -> None:
        """A worker has died; its requests wait for another."""
        self._starts[worker], self._stops[worker] = {}, []
        self._savings.give_up()
        now_s = self._log.now_s
        for key in self._active:
            if worker in self._responses[key].runs:
                self._close(key, worker, DIED, now_s)
        self.workers.revive()

    # Decisions

    def _consult(self) -> None:
        """Moves and races what the policy says, now and then, and at once where a request has no worker."""
        if self.policy is None:
            if self._waiting:
                self._deal_out(list(self._waiting))
        elif self._active and (self._waiting or self._log.now_s >= self._next_look_s):
            keys = list(self._active)
            decision = self.policy.decide(self._observe(keys))
            self._savings.before(decision, keys, self._responses)
            started = {request for request, _ in decision.starts}
            for request, worker in decision.stops:
                self._stop(keys[request], worker, MOVED if request in started else GAVE_UP)
            for request, worker in decision.starts:
                self._start(keys[request], worker)
            self._next_look_s = self._log.now_s + self._turn_s

    def _observe(self, keys: list[int]) -> TailObservation:
        under_way, rows_R = [self._responses[key] for key in keys], np.array([self._rows[key] for key in keys])
        runs_U = [(i, w, len(r.tokens) - run.position) for i, r in enumerate(under_way) for w, run in r.runs.items()]
        runs_U3 = np.array(runs_U, np.int64).reshape(-1, 3)
        is_alive_W = np.array([self.workers.is_alive(w) for w in self._workers])
        return TailObservation(
            num_tokens_R=np.array([r.num_text for r in under_way]),
            remaining_R=self._remaining(under_way),
            speed_RM=self._speeds.speeds(rows_R),
            doubt_RM=self._speeds.doubts(rows_R),
            request_U=runs_U3[:, 0],
            worker_U=runs_U3[:, 1],
            lag_U=runs_U3[:, 2],
            method_W=np.array(self.workers.methods),
            capacity_W=np.where(is_alive_W, self.workers.capacity, 0),
            hop_s=self._turn_s,
        )
