# SPDX-License-Identifier: Apache-2.0
"""The coordinator, which deals out requests to several engines, and moves and races stragglers among them.

It also collects the tokens of the engines, and gives the requests of an engine that has died to the others.

Shapes: R running requests, A attempts, E engines, as in `stragglers/decisions/straggler_policy.py`.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_specrollout.stragglers.attempts import AttemptOutcome, Response
from nemo_specrollout.stragglers.decisions.idle_time import IdleTime
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK, DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.straggler_policy import TailPolicy
from nemo_specrollout.stragglers.decisions.tail_forecast import TailObservation
from nemo_specrollout.stragglers.estimates import DecodeSpeeds, IdleLooks, Savings
from nemo_specrollout.stragglers.turns import EngineFleet, Request, Starts, TurnOrders, TurnResult

_NAMES = itertools.count()
"""Source of the numbers that identify attempts. All coordinators of the process share it, because an engine may still report
an attempt that an earlier coordinator has ordered."""
TURN_SHARE = 0.05
"""Length of a turn, as a share of the time since the requests began. Short turns cost overhead, and long ones delay
decisions."""
SHORTEST_TURN_S = 0.05
LONGEST_TURN_S = 0.5
MAX_AHEAD = 2
"""Largest number of turns that are queued for an engine. With two, the engine can begin the next turn while the coordinator
still reads the result of the last one."""


@dataclass
class _Assignments:
    """The open attempts of one engine, and the changes that the engine must still be told of."""

    attempts: dict[int, int] = field(default_factory=dict)
    """For each open attempt, by its name, the key of its request."""
    starts: dict[int, None] = field(default_factory=dict)
    """Names of the open attempts that the engine was not told to start yet, as an ordered set."""
    stops: list[int] = field(default_factory=list)
    """Names of the closed attempts that the engine was not told to stop yet."""


class Coordinator:
    """Rolls requests out over several engines, and moves and races stragglers among them.

    Owns the responses, the attempts at them, and the changes that engines must still be told of. An attempt is the work of one
    engine on one request. The engines, the decode-speed table and the length estimates belong to the caller.

    A request begins with `add`. It waits if no engine has it, runs if one engine has it, and is raced if several have it. It
    ends when one attempt completes the response. The coordinator forgets it in `take`, which returns the response, or in
    `abandon`.

    Invariant: `Response.attempts` and the engines' `_Assignments.attempts` hold the same open attempts, and a request that has
    ended has no open attempt. Closing an attempt removes it from both at once, so later reports about it are ignored.
    """

    def __init__(
        self, engines: EngineFleet, policy: TailPolicy, table: DecodeSpeedTable, lengths: LengthEstimator
    ) -> None:
        self.engines = engines
        self.policy = policy
        self.lengths = lengths
        self.responses: dict[int, Response] = {}
        """For each request that was not taken yet, by its key, the known part of its response."""
        self._active: dict[int, None] = {}
        self._ended: list[int] = []
        self._assigned = [_Assignments() for _ in engines.methods]
        self._num_requests = 0
        self._speeds = DecodeSpeeds(table)
        self._stood_still: set[int] = set()
        self._saved_s: float | None = None
        self._idle = IdleLooks()
        self._begin_afresh()

    # The life of requests

    def add(self, requests: Sequence[Request], engine: int) -> list[int]:
        """Starts requests on `engine`, which must be alive. Returns a key for each request, by which later calls name it."""
        keys = self._begin(requests)
        for key in keys:
            self._start(key, engine)
        return keys

    def _begin(self, requests: Sequence[Request], task: str = ANY_TASK) -> list[int]:
        """Registers requests and returns a key for each. The requests wait until an attempt at them is started."""
        if not self._active:
            self._begin_afresh()
        elif self._savings.before is not None:
            self._savings.is_unknown = True
        keys = list(range(self._num_requests, self._num_requests + len(requests)))
        self._num_requests += len(requests)
        self.responses |= {key: Response(r) for key, r in zip(keys, requests, strict=True)}
        self._active |= dict.fromkeys(keys)
        self._speeds.begin(keys, task)
        return keys

    def advance(self) -> list[int]:
        """Sends orders to engines, reads their results, and lets the tail policy decide about moves and races.

        Returns the keys of the requests that have ended since the last call.
        """
        if self._active:
            self.send_turns()
            self._read_results()
            self._consult_policy()
        ended = self._ended
        self._ended = []
        return ended

    def _read_results(self) -> None:
        for engine, result in self.engines.results():
            if result is None:
                self._lose(engine)
            else:
                self._read_result(engine, result)

    def take(self, keys: Sequence[int]) -> tuple[list[Response], float | None]:
        """Returns the responses of requests that have ended, and forgets these requests.

        The second value is the estimated number of seconds that moves and races have saved. It is None if nothing moved or
        raced, or if the savings cannot be estimated. It is also None if `keys` are not all the requests that ran together.
        """
        is_all = len(keys) == self._num_requests - self._first_key
        if not is_all:
            self._savings.is_unknown = True
        self._speeds.forget(keys)
        return [self.responses.pop(key) for key in keys], self._saved_s if is_all else None

    def abandon(self, keys: Iterable[int] | None = None) -> None:
        """Stops and forgets the running requests among `keys`, or all running requests if `keys` is None.

        The responses of requests that have ended stay until `take` is called. If `keys` is None, `advance` will not report
        these requests.
        """
        if keys is None:
            self._ended = []
        for key in [key for key in (self._active if keys is None else keys) if key in self._active]:
            for engine in list(self.responses[key].attempts):
                self._stop(key, engine, AttemptOutcome.ABANDONED)
            del self._active[key]
            self.take([key])
        self._send_stops()

    def take_idle_figures(self) -> dict[str, float]:
        """Returns the metrics `tail.early_worth` and `tail.declined` for the time since the last call.

        Returns nothing if no engine could decode requests of coming steps in this time.
        """
        figures = self._idle.figures()
        self._idle = IdleLooks()
        return figures

    @property
    def is_busy(self) -> bool:
        return bool(self._active)

    def request_of(self, engine: int, name: int) -> int | None:
        """Returns the key of the request of an engine's attempt, or None if the engine has no open attempt with this name."""
        return self._assigned[engine].attempts.get(name)

    # New weights

    def decide_races(self) -> None:
        """Ends every race, so that only the racer with the most tokens keeps the request.

        Call it before the engines get new weights. Racers get the weights at different tokens, so they would generate
        different responses.
        """
        self._savings.is_unknown = True
        for key in self._active:
            attempts = self.responses[key].attempts
            for engine in sorted(attempts, key=lambda e: -attempts[e].position)[1:]:
                self._stop(key, engine, AttemptOutcome.GAVE_UP)
        self._send_stops()

    def begin_again(self) -> None:
        """Makes all running requests begin again, with the tokens that they have so far as drafts.

        The engines must do the same when they get the new weights. This method first waits for the results of all turns that
        are under way, because their tokens come from the old weights. No request may be raced at this time.
        """
        while any(map(self.engines.num_turns, range(len(self._assigned)))):
            self._read_results()
        for key in self._active:
            self.responses[key].begin_again()

    def resume(self) -> None:
        """Continues after an interruption by new weights.

        No speeds are learned from the next turn of each engine, because the engine may have stood still during a part of it.
        """
        self._stood_still = set(range(len(self._assigned)))

    # Attempts

    def _start(self, key: int, engine: int) -> None:
        """Opens an attempt of `engine` at a request.

        The engine will continue the response after the tokens that are known when it is told to start (`begin_now`).
        """
        name = next(_NAMES)
        assigned = self._assigned[engine]
        self.responses[key].open(engine, name)
        assigned.attempts[name] = key
        assigned.starts[name] = None

    def _stop(self, key: int, engine: int, outcome: AttemptOutcome) -> None:
        """Closes an attempt, and tells its engine to stop it unless the engine was never told to start it."""
        name = self._close(key, engine, outcome)
        assigned = self._assigned[engine]
        if name in assigned.starts:
            del assigned.starts[name]
        else:
            assigned.stops.append(name)

    def _close(self, key: int, engine: int, outcome: AttemptOutcome, at_s: float | None = None) -> int:
        name = self.responses[key].close(engine, outcome, time.perf_counter() if at_s is None else at_s)
        del self._assigned[engine].attempts[name]
        return name

    # Turns

    def send_turns(self) -> None:
        """Sends turns to every engine that has attempts to work on or to stop, until `MAX_AHEAD` turns are queued for it."""
        for engine, assigned in enumerate(self._assigned):
            while (
                (assigned.attempts or assigned.stops)
                and self.engines.is_alive(engine)
                and self.engines.num_turns(engine) < MAX_AHEAD
            ):
                self.engines.send(engine, TurnOrders(self.begin_now(engine), tuple(assigned.stops), self._turn_s))
                assigned.stops = []

    def begin_now(self, engine: int, keys: Iterable[int] | None = None) -> Starts:
        """Returns the attempts that the engine was not told to start yet.

        If `keys` is given, only attempts at these requests are returned. The caller must pass the returned attempts to the
        engine, because from now on they count as told.
        """
        assigned = self._assigned[engine]
        wanted = None if keys is None else set(keys)
        names = [name for name in assigned.starts if wanted is None or assigned.attempts[name] in wanted]
        for name in names:
            del assigned.starts[name]
        return tuple((name, self.responses[assigned.attempts[name]].begin(engine)) for name in names)

    @property
    def _turn_s(self) -> float:
        return min(max(TURN_SHARE * (time.perf_counter() - self._busy_since_s), SHORTEST_TURN_S), LONGEST_TURN_S)

    def _send_stops(self) -> None:
        """Tells engines which attempts to stop.

        Each of these engines gets a turn for this, after those that are queued already.
        """
        for engine, assigned in enumerate(self._assigned):
            if assigned.stops and self.engines.is_alive(engine):
                self.engines.send(engine, TurnOrders(stops=tuple(assigned.stops)))
            assigned.stops = []

    # Results

    def _read_result(self, engine: int, result: TurnResult) -> None:
        """Learns speeds from the result of a turn, and adds its tokens to the responses.

        Closes the attempts that have ended, and those whose tokens differ from the known tokens of the response.
        """
        self._savings.heard_s_E[engine] = time.perf_counter()
        attempts = self._assigned[engine].attempts
        parts = {name: part for name, part in result.parts.items() if name in attempts}
        if engine in self._stood_still:
            self._stood_still.remove(engine)
        else:
            num_made = {attempts[name]: len(tokens) for name, (tokens, _) in parts.items()}
            steady = [attempts[name] for name in result.steady if name in attempts]
            self._speeds.learn(self.engines.methods[engine], result.work, num_made, steady)
        for name, part in parts.items():
            key = attempts[name]
            reason = result.finished.get(name)
            if not self.responses[key].extend(engine, *part, reason, result.policy_version):
                self._stop(key, engine, AttemptOutcome.DIVERGED)
            elif reason is not None:
                self._finish(key, engine)

    def _finish(self, key: int, winner: int) -> None:
        """Ends a request. The engine `winner` has completed its response.

        Stops the other racers, and learns the length of the response.
        """
        response = self.responses[key]
        self._close(key, winner, AttemptOutcome.WON)
        for rival in list(response.attempts):
            self._stop(key, rival, AttemptOutcome.BEATEN)
        del self._active[key]
        self._ended.append(key)
        self.lengths.finished(response.request.prompt_index, len(response.tokens))
        if not self._active:
            self._send_stops()
            now_s = time.perf_counter()
            self._saved_s = self._savings.saved_s(now_s, self.responses, self._speeds, self.engines.methods)

    def _lose(self, engine: int) -> None:
        """Closes the attempts of an engine that has died. Requests that only this engine had will wait for another engine."""
        self._savings.is_unknown = True
        died_s = time.perf_counter()
        for key in list(self._assigned[engine].attempts.values()):
            self._close(key, engine, AttemptOutcome.DIED, died_s)
        self._assigned[engine] = _Assignments()

    # Decisions

    def _begin_afresh(self) -> None:
        """Resets the clock and the estimate of savings. It is called only while no request is running."""
        self._busy_since_s = time.perf_counter()
        self._next_look_s = 0.0
        self._first_key = self._num_requests
        self._savings = Savings(len(self._assigned), self._busy_since_s)
        self._saved_s = None

    def _consult_policy(self) -> None:
        """Starts, moves and races requests as the tail policy decides.

        The tail policy is asked about once in each turn, and at once if a request waits for an engine.
        """
        if self._active and (self._waiting() or time.perf_counter() >= self._next_look_s):
            keys = list(self._active)
            seen = self._observe(keys)
            decision = self.policy.decide(seen)
            self._idle.note(seen.idle, decision)
            self._savings.note(decision, keys, self.responses)
            started = {request for request, _ in decision.starts}
            for request, engine in decision.stops:
                moves = request in started
                self._stop(keys[request], engine, AttemptOutcome.MOVED if moves else AttemptOutcome.GAVE_UP)
            for request, engine in decision.starts:
                self._start(keys[request], engine)
            self._next_look_s = time.perf_counter() + self._turn_s

    def _waiting(self) -> list[int]:
        return [key for key in self._active if not self.responses[key].attempts]

    def _is_alive_E(self) -> np.ndarray:
        return np.array([self.engines.is_alive(e) for e in range(len(self._assigned))])

    def _remaining(self, responses: Sequence[Response]) -> np.ndarray:
        lengths_R = np.array([len(r.tokens) for r in responses], np.int64)
        known_R = np.array([r.request.num_ahead for r in responses], np.int64)
        return self.lengths.remaining([r.request.prompt_index for r in responses], lengths_R, known_R)

    def _observe(self, keys: list[int]) -> TailObservation:
        """Returns what the tail policy needs to know. In it, the number of a request is its index in `keys`."""
        under_way = [self.responses[key] for key in keys]
        attempts_A = [
            (i, e, len(r.tokens) - a.position) for i, r in enumerate(under_way) for e, a in r.attempts.items()
        ]
        request_A, engine_A, lag_A = np.array(attempts_A, np.int64).reshape(-1, 3).T
        return TailObservation(
            num_tokens_R=np.array([len(r.request.prompt_token_ids) + len(r.tokens) for r in under_way]),
            remaining_R=self._remaining(under_way),
            speed_RM=self._speeds.of(keys),
            doubt_RM=self._speeds.doubts(keys),
            request_A=request_A,
            engine_A=engine_A,
            lag_A=lag_A,
            method_E=np.array(self.engines.methods),
            capacity_E=np.where(self._is_alive_E(), self.engines.capacity, 0),
            handover_s=self._turn_s,
            idle=IdleTime(tuple(self.engines.early_worth(e) for e in range(len(self._assigned)))),
        )
