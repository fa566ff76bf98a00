# SPDX-License-Identifier: Apache-2.0
"""Rolls requests out over several workers: deals them out, takes what is made, moves and races stragglers, survives deaths.

Shapes: R requests under way, K runs that made tokens, U runs, W workers; see `scheduling/fastest_of_n.py`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from nemo_specrollout.generation.engine import Rollout, RolloutRequest
from nemo_specrollout.generation.responses import Response, Run
from nemo_specrollout.generation.timeline import ABANDONED, BEATEN, DIED, DIVERGED, GAVE_UP, MOVED, WON, Timeline
from nemo_specrollout.generation.turns import Orders, Report
from nemo_specrollout.scheduling.dispatch import in_shards, longest_first
from nemo_specrollout.scheduling.fastest_of_n import FastestOfN, TailObservation
from nemo_specrollout.scheduling.ladder import ANY_TASK, Ladder
from nemo_specrollout.scheduling.response_lengths import LengthEstimator
from nemo_specrollout.scheduling.run_speeds import RunSpeeds

# A turn takes such a share of what the rollout took so far, within bounds: short ones cost, long ones delay decisions.
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
        """Asks for a turn. A worker takes its turns in order."""

    def reports(self) -> list[tuple[int, Report | None]]:
        """Waits until a turn ends; a worker that has died reports None, once, instead of all turns that it still had."""

    def num_turns(self, worker: int) -> int:
        """Turns that it was asked for and has not reported."""

    def finish_turns(self) -> None:
        """Waits for the turns that are left of an earlier rollout; nobody wants to know what they report."""

    def is_alive(self, worker: int) -> bool:
        """Whether it takes orders."""

    def revive(self) -> None:
        """Starts those that died again, with the weights of the others. Raises RuntimeError if they die too often."""


class Coordinator:
    """Rollouts over workers. Owns what is known of each response; ladder and lengths outlive a rollout.

    The loop: *while requests are under way, give workers their turns, take what they report, consult the policy.* Without a
    policy a request stays where it was dealt, unless its worker dies.
    """

    def __init__(self, workers: Workers, policy: FastestOfN | None, ladder: Ladder, lengths: LengthEstimator) -> None:
        self.workers, self.policy, self.ladder, self.lengths = workers, policy, ladder, lengths
        self._num_workers = len(workers.methods)
        self._num_runs = 0

    def roll_out(
        self,
        requests: Sequence[RolloutRequest],
        on_finished: Callable[[int], None] = lambda done: None,
        task: str = ANY_TASK,
    ) -> tuple[list[Rollout], Timeline]:
        """The responses, in the order of `requests`, and who made them. If interrupted, workers are told to forget them."""
        self._begin(requests, task)
        try:
            self._deal_out()
            while self._active:
                self._send_turns()
                self._take_reports()
                self._consult()
                on_finished(len(requests) - len(self._active))
        finally:
            self._abandon()
        return [r.rollout for r in self._responses], self.timeline

    def _begin(self, requests: Sequence[RolloutRequest], task: str) -> None:
        self.workers.finish_turns()
        self.workers.revive()
        self._responses = [Response(r) for r in requests]
        self._active = dict.fromkeys(range(len(requests)))
        self._run_names: dict[int, tuple[int, int]] = {}
        self._starts: list[dict[int, int]] = [{} for _ in range(self._num_workers)]  # request of a run, by its name
        self._stops: list[list[int]] = [[] for _ in range(self._num_workers)]
        self._task = task
        ease_M = [self.ladder.ease(task, m) for m in range(len(self.ladder.methods))]
        self._speeds = RunSpeeds(np.tile(ease_M, (len(requests), 1)))
        self._next_look_s = 0.0
        self.timeline = Timeline(self._num_workers)

    def _deal_out(self) -> None:
        requests = [r.request for r in self._responses]
        groups = [r.prompt_index for r in requests]
        expected_R = self.lengths.remaining(groups, np.zeros(len(requests), np.int64))
        if self.policy is None:
            deal = in_shards(len(requests), self._num_workers)
        else:
            deal = longest_first(groups, expected_R, self._num_workers)
        for key in np.argsort(-expected_R, kind="stable").tolist():
            self._start(key, int(deal[key]))

    def _abandon(self) -> None:
        """Whoever still has a run stops it: racers that were beaten, all if the rollout was interrupted."""
        for key in self._active:
            for worker in list(self._responses[key].runs):
                self._stop(key, worker, ABANDONED)
        for worker in filter(self.workers.is_alive, range(self._num_workers)):
            if self._stops[worker]:
                self.workers.send(worker, Orders(stops=tuple(self._stops[worker])))

    # Runs

    def _start(self, key: int, worker: int) -> None:
        """The worker is to begin with the request, at what will be known of its response when the order goes out."""
        response, name = self._responses[key], self._num_runs
        self._num_runs += 1
        self._run_names[name] = key, worker
        response.runs[worker] = Run(name, len(response.tokens))
        self._starts[worker][name] = key
        self.timeline.begin(key, worker, len(response.tokens))

    def _stop(self, key: int, worker: int, outcome: str) -> None:
        """The worker's run of a request is over; what it still reports of it is not heard."""
        name = self._close(key, worker, outcome)
        if self._starts[worker].pop(name, None) is None:
            self._stops[worker].append(name)

    def _close(self, key: int, worker: int, outcome: str) -> int:
        run = self._responses[key].runs.pop(worker)
        del self._run_names[run.name]
        self.timeline.end(key, worker, run.position, outcome)
        return run.name

    # Turns

    @property
    def _turn_s(self) -> float:
        return min(max(TURN_SHARE * self.timeline.now_s, SHORTEST_TURN_S), LONGEST_TURN_S)

    def _send_turns(self) -> None:
        for worker in range(self._num_workers):
            while self._wants_turn(worker):
                starts = tuple((n, self._responses[key].begin(worker)) for n, key in self._starts[worker].items())
                orders = Orders(starts, tuple(self._stops[worker]), self._turn_s)
                self._starts[worker], self._stops[worker] = {}, []
                self.workers.send(worker, orders)

    def _wants_turn(self, worker: int) -> bool:
        if not self.workers.is_alive(worker) or self.workers.num_turns(worker) >= MOST_AHEAD:
            return False
        has_orders = bool(self._starts[worker] or self._stops[worker])
        return has_orders or any(worker in self._responses[key].runs for key in self._active)

    def _take_reports(self) -> None:
        for worker, report in self.workers.reports():
            if report is None:
                self._lose(worker)
            else:
                self._take(worker, report)

    def _take(self, worker: int, report: Report) -> None:
        parts = {name: part for name, part in report.progress.parts().items() if name in self._run_names}
        self._learn(worker, report, {name: len(tokens) for name, (tokens, _) in parts.items()})
        for name, part in parts.items():
            key, reason = self._run_names[name][0], report.finished.get(name)
            if not self._responses[key].take(worker, *part, reason):
                self._stop(key, worker, DIVERGED)
            elif reason is not None:
                self._finish(key, worker)

    def _finish(self, key: int, winner: int) -> None:
        response = self._responses[key]
        self._close(key, winner, WON)
        for rival in list(response.runs):
            self._stop(key, rival, BEATEN)
        del self._active[key]
        self.lengths.finished(response.request.prompt_index, len(response.tokens))

    def _learn(self, worker: int, report: Report, counts: dict[int, int]) -> None:
        """What a turn tells of paces: of the method, and of each request that made tokens all through it."""
        work, method = report.work, self.workers.methods[worker]
        if work.num_prefilled:
            self.ladder.observe_prefill(work.num_prefilled, work.prefill_s)
        if not work.num_tokens:
            return
        batch = max(1, round(work.mean_batch))
        typical = self.ladder.tokens_per_s(method, batch) * work.decode_s
        self.ladder.observe(self._task, method, batch, work.num_tokens, work.request_s)
        whole = {self._run_names[name][0]: n for name, n in counts.items() if name not in report.finished}
        self._speeds.observe(np.array(list(whole), np.int64), method, np.array(list(whole.values()), float), typical)

    def _lose(self, worker: int) -> None:
        """A worker has died; its requests wait for another."""
        self._starts[worker], self._stops[worker] = {}, []
        for key in self._active:
            if worker in self._responses[key].runs:
                self._close(key, worker, DIED)
        if not any(map(self.workers.is_alive, range(self._num_workers))):
            self.workers.revive()

    # Decisions

    def _consult(self) -> None:
        """Moves and races what the policy says, now and then, and at once where a request has nobody."""
        waiting = [key for key in self._active if not self._responses[key].runs]
        if self.policy is None:
            for key in waiting:
                self._start(key, self._emptiest())
        elif self._active and (waiting or self.timeline.now_s >= self._next_look_s):
            keys = list(self._active)
            decision = self.policy.decide(self._observe(keys))
            started = {request for request, _ in decision.starts}
            for request, worker in decision.stops:
                self._stop(keys[request], worker, MOVED if request in started else GAVE_UP)
            for request, worker in decision.starts:
                self._start(keys[request], worker)
            self._next_look_s = self.timeline.now_s + self._turn_s

    def _emptiest(self) -> int:
        loads = [sum(w in self._responses[key].runs for key in self._active) for w in range(self._num_workers)]
        return min(filter(self.workers.is_alive, range(self._num_workers)), key=lambda w: loads[w])

    def _observe(self, keys: list[int]) -> TailObservation:
        under_way = [self._responses[key] for key in keys]
        lengths_R = np.array([len(r.tokens) for r in under_way])
        runs_U = [(i, w, len(r.tokens) - run.position) for i, r in enumerate(under_way) for w, run in r.runs.items()]
        runs_U3 = np.array(runs_U, np.int64).reshape(-1, 3)
        is_alive_W = np.array([self.workers.is_alive(w) for w in range(self._num_workers)])
        return TailObservation(
            num_tokens_R=np.array([r.num_text for r in under_way]),
            remaining_R=self.lengths.remaining([r.request.prompt_index for r in under_way], lengths_R),
            speed_RM=self._speeds.speeds()[keys],
            doubt_RM=self._speeds.doubts()[keys],
            request_U=runs_U3[:, 0],
            worker_U=runs_U3[:, 1],
            lag_U=runs_U3[:, 2],
            method_W=np.array(self.workers.methods),
            capacity_W=np.where(is_alive_W, self.workers.capacity, 0),
            hop_s=self._turn_s,
        )
