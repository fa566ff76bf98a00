# SPDX-License-Identifier: Apache-2.0
"""The exchange, through which NeMo-RL's engines share requests.

An engine calls it to add requests, to hand in the result of a turn, and to fetch orders. The exchange runs no loop of its own.
Instead, each of these calls also lets the coordinator read all results that have arrived.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.generation.engine.requests import Rollout, ShardRequest
from nemo_specrollout.stragglers.attempts import tail_counts
from nemo_specrollout.stragglers.coordinator import Coordinator
from nemo_specrollout.stragglers.decisions.idle_time import NOTHING_EARLY, EarlyWorth
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile, started_table, table_file
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN
from nemo_specrollout.stragglers.turns import ExchangeFailed, ExchangeReply, Starts, TurnOrders, TurnResult

POLL_S = 1.0
"""Longest time in seconds for which a call of `exchange` waits for orders or answers. After that the engine calls again, which
shows that it is alive."""
PAUSE_PATIENCE_S = 30.0
"""Seconds for which `pause` waits until the engines end their turns. Then it returns the engines that still have some."""
SILENCE_S = 300.0
"""An engine that has turns is taken for dead if it has not called `exchange` for this number of seconds."""


@dataclass
class _Member:
    """An engine that has joined the exchange."""

    orders: deque[TurnOrders] = field(default_factory=deque)
    """Orders for the engine's coming turns, which it has not fetched yet."""
    num_turns: int = 0
    """Number of turns that were sent to the engine and whose results have not arrived."""
    heard_s: float = field(default_factory=time.monotonic)
    """Time of the engine's latest call of `exchange`, by `time.monotonic`."""
    early_worth: EarlyWorth = NOTHING_EARLY
    """How much time the engine could save by decoding requests of coming steps, as it said in its latest call."""


class PollingFleet:
    """The engines of a coordinator that cannot call them. They fetch their orders themselves.

    Owns the orders that engines have not fetched yet, and the results that the coordinator has not read yet. An engine hands
    in one result for each turn. To the coordinator this object is its `EngineFleet`.
    """

    def __init__(self, methods: Sequence[int]) -> None:
        self.methods = list(methods)
        self.capacity = 0
        self.members: dict[int, _Member] = {}
        self.inbox: list[tuple[int, TurnResult | None]] = []
        """Pairs of an engine and one of its results, which the coordinator has not read yet. None instead of a result says
        that the engine has left."""

    def join(self, engine: int, capacity: int) -> None:
        """Adds an engine that decodes up to `capacity` requests at a time.

        The capacity of the fleet is that of its smallest engine.
        """
        self.capacity = min(capacity, self.capacity or capacity)
        self.members[engine] = _Member()

    def leave(self, engine: int) -> None:
        """Removes an engine. The coordinator then treats it as dead."""
        if self.members.pop(engine, None) is not None:
            self.inbox.append((engine, None))

    # What the coordinator calls

    def send(self, engine: int, orders: TurnOrders) -> None:
        member = self.members[engine]
        member.orders.append(orders)
        member.num_turns += 1

    def results(self) -> list[tuple[int, TurnResult | None]]:
        """Returns the results that have arrived since the last call, without waiting."""
        results = self.inbox
        self.inbox = []
        return results

    def num_turns(self, engine: int) -> int:
        return self.members[engine].num_turns if engine in self.members else 0

    def is_alive(self, engine: int) -> bool:
        return engine in self.members

    def early_worth(self, engine: int) -> EarlyWorth:
        return self.members[engine].early_worth if engine in self.members else NOTHING_EARLY


class StragglerExchange:
    """The object through which engines share requests. Several threads may call it.

    Owns the coordinator of the engines, and the metrics until they are taken.

    With synchronous engines, a rollout starts with `begin`. Then each engine either joins with its own requests or leaves. The
    engines that have joined call `exchange` until all requests have ended. Finally `end` ends the rollout. Asynchronous
    engines join once, and `add` requests at any time. `pause` is called before an update of their weights, and `resume` after
    it.

    Invariant: after an error every call raises ExchangeFailed, so that each engine finishes its own requests alone.
    """

    def __init__(
        self,
        methods: Sequence[str],
        config: FastestOfNConfig,
        max_new_tokens: int,
        ladder: SpeedTableFile | None = None,
    ) -> None:
        """`methods` has the name of each engine's draft method. No response may have more than `max_new_tokens` tokens.

        `ladder` has decode speeds to start from, or is None.
        """
        names = list(dict.fromkeys(methods))
        table = self._speeds = started_table(names, ladder)
        self._fleet = PollingFleet([names.index(name) for name in methods])
        self._coordinator = Coordinator(self._fleet, FastestOfN(config, table), table, LengthEstimator(max_new_tokens))
        self._changed = threading.Condition()
        self._keys: dict[tuple[int, int], int] = {}
        """For each running request, by `ShardRequest.home`, its key in the coordinator."""
        self._answers: list[list[tuple[int, Rollout | None]]] = [[] for _ in methods]
        """For each engine, the `ExchangeReply.answers` that it has not fetched yet."""
        self._awaited: set[int] | None = None
        """Engines that have not joined the rollout yet, or None if the engines are asynchronous."""
        self._ended: list[int] = []
        """Keys of requests that have ended and were not taken from the coordinator yet."""
        self._is_paused = False
        self._totals: dict[str, float] = {}
        self._failure: str | None = None

    # A rollout of synchronous engines

    def begin(self) -> None:
        with self._guarded():
            self._begin_with(set(range(len(self._answers))))

    def end(self) -> None:
        """Ends the rollout, whether it is complete or not, so that engines no longer wait for each other."""
        with self._guarded():
            self._begin_with(set())

    def _begin_with(self, awaited: set[int]) -> None:
        self._coordinator.abandon()
        self._fleet.members.clear()
        self._fleet.inbox.clear()
        self._take_ended()
        self._keys = {}
        self._answers = [[] for _ in self._answers]
        self._awaited = awaited

    # What engines call

    def join(self, engine: int, capacity: int, requests: Sequence[ShardRequest] = ()) -> None:
        """Adds an engine that decodes up to `capacity` requests at a time, together with its own requests."""
        with self._guarded():
            self._fleet.join(engine, capacity)
            if self._awaited is not None:
                self._awaited.discard(engine)
            self._add(engine, requests)
            self._advance()

    def add(self, engine: int, requests: Sequence[ShardRequest]) -> Starts:
        """Adds requests of an engine. Returns the attempts that the engine should start at once.

        While the exchange is paused, nothing is returned, and the requests start after `resume`.
        """
        with self._guarded():
            self._member(engine)
            keys = self._add(engine, requests)
            starts = () if self._is_paused else self._coordinator.begin_now(engine, keys)
            self._advance()
            return starts

    def cancel(self, engine: int, numbers: Sequence[int]) -> None:
        with self._guarded():
            self._forget([self._keys[engine, n] for n in numbers if (engine, n) in self._keys])

    def leave(self, engine: int) -> None:
        """Removes an engine and drops its own requests.

        Requests of other engines that it was decoding continue in another engine.
        """
        with self._guarded():
            if self._awaited is not None:
                self._awaited.discard(engine)
            self._fleet.leave(engine)
            self._forget([key for (home, _), key in self._keys.items() if home == engine])
            self._advance()

    def exchange(
        self, engine: int, result: TurnResult | None = None, early_worth: EarlyWorth = NOTHING_EARLY
    ) -> ExchangeReply:
        """Takes the result of an engine's turn, if there is one, and returns the orders and answers for this engine.

        If the engine has no turn to work on and there is no answer for it, the call waits for either, but at most for `POLL_S`
        seconds. `early_worth` is how much time the engine can save by decoding requests of coming steps (`IdleWork.worth`).
        """
        with self._guarded():
            member = self._member(engine)
            member.heard_s = time.monotonic()
            member.early_worth = early_worth
            if result is not None:
                member.num_turns -= 1
                self._fleet.inbox.append((engine, result))
                self._refuse(engine, result.refused)
            self._advance()
            self._changed.wait_for(lambda: self._has_reply_for(engine), POLL_S)
            member = self._member(engine)  # raises if the engine was given up while it waited
            orders = tuple(member.orders)
            answers = tuple(self._answers[engine])
            member.orders.clear()
            self._answers[engine] = []
            return ExchangeReply(orders, answers, self._is_over)

    # What the driver calls

    def pause(self, patience_s: float = PAUSE_PATIENCE_S) -> tuple[int, ...]:
        """Prepares for new weights. Ends all races, and sends no more turns until `resume`.

        Waits at most `patience_s` seconds until all engines have ended their turns. Returns the engines that have not ended
        theirs by then. These may still decode with the old weights and use prefixes that the old weights have cached, even if
        other engines have already ended their requests. So the weights must not change unless the result is empty. Call this
        method again to wait longer.
        """
        with self._guarded():
            self._coordinator.decide_races()
            self._is_paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._engines_with_turns(), patience_s)
            return self._engines_with_turns()

    def resume(self) -> None:
        """Ends the pause, so that requests start again. All engines must have the new weights by then."""
        with self._guarded():
            self._is_paused = False
            self._advance()
            self._coordinator.resume()

    def take_figures(self) -> dict[str, float]:
        """Returns the metrics `tail.*` of the requests that have ended since the last call.

        `saved_s`, the estimated time that moves and races have saved, is missing if there is no estimate.
        """
        with self._guarded():
            totals = self._totals
            self._totals = {}
            return {**tail_counts(()), **totals, **self._coordinator.take_idle_figures()}

    def speed_table(self, device: str, policy: str) -> SpeedTableFile | None:
        """Returns the current decode speeds for a later run to start from, or None if none were measured yet.

        `device` and `policy` describe the device and the policy with which the speeds were measured.
        """
        with self._guarded():
            return table_file(self._speeds, device, policy, [0.0] * len(self._speeds.methods))

    # Internals

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Lets only one call in at a time. If a call fails, it and all later ones raise ExchangeFailed."""
        with self._changed:
            self._raise_failure()
            try:
                yield
            except ExchangeFailed:
                raise
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"
                self._changed.notify_all()
                raise ExchangeFailed(self._failure) from error

    def _engines_with_turns(self) -> tuple[int, ...]:
        return tuple(engine for engine, member in self._fleet.members.items() if member.num_turns)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ExchangeFailed(self._failure)

    def _member(self, engine: int) -> _Member:
        """Returns an engine that has joined.

        Raises ExchangeFailed if this engine has not joined, or if the exchange has failed.
        """
        self._raise_failure()
        if not self._fleet.is_alive(engine):
            raise ExchangeFailed(
                f"engine {engine} is not part of the rollout: it was silent for too long, or the rollout has ended"
            )
        return self._fleet.members[engine]

    @property
    def _is_over(self) -> bool:
        return self._awaited is not None and not self._awaited and not self._coordinator.is_busy

    def _has_reply_for(self, engine: int) -> bool:
        has_work = self._fleet.num_turns(engine) > 0 or bool(self._answers[engine])
        return has_work or self._is_over or self._failure is not None or not self._fleet.is_alive(engine)

    def _add(self, engine: int, requests: Sequence[ShardRequest]) -> list[int]:
        keys = self._coordinator.add(requests, engine) if requests else []
        self._keys |= {r.home: key for key, r in zip(keys, requests, strict=True)}
        return keys

    def _refuse(self, engine: int, names: Sequence[int]) -> None:
        """Forgets the requests of the attempts `names`, which `engine` has refused because the requests are invalid.

        The engines from which these requests came get None as the answer.
        """
        keys = [key for name in names if (key := self._coordinator.request_of(engine, name)) is not None]
        for asker, number in map(self._home, keys):
            self._answers[asker].append((number, None))
        self._forget(keys)

    def _forget(self, keys: Sequence[int]) -> None:
        """Drops requests, so that their responses are not sent to any engine."""
        for key in keys:
            del self._keys[self._home(key)]
        self._coordinator.abandon(keys)

    def _home(self, key: int) -> tuple[int, int]:
        request = self._coordinator.responses[key].request
        assert isinstance(request, ShardRequest)
        return request.home

    def _advance(self) -> None:
        if not self._is_paused:
            self._lose_silent_engines()
            for key in self._coordinator.advance():
                engine, number = self._home(key)
                del self._keys[engine, number]
                self._answers[engine].append((number, self._coordinator.responses[key].rollout))
                self._ended.append(key)
            if self._awaited is None or self._is_over:
                self._take_ended()
            self._coordinator.send_turns()
            if not self._coordinator.is_busy:
                self._fleet.inbox.clear()  # results of attempts that were beaten
        self._changed.notify_all()

    def _lose_silent_engines(self) -> None:
        now_s = time.monotonic()
        for engine, member in list(self._fleet.members.items()):
            if member.num_turns and now_s - member.heard_s > SILENCE_S:
                self._fleet.leave(engine)

    def _take_ended(self) -> None:
        """Makes the coordinator forget the requests that have ended, and adds their metrics to the totals.

        In a rollout of synchronous engines this is done once, with all requests together. Only then does the coordinator know
        how much time moves and races have saved.
        """
        if self._ended:
            responses, saved_s = self._coordinator.take(self._ended)
            ended = [[(attempt.outcome or "", attempt.start_s) for attempt in r.ended] for r in responses]
            figures = tail_counts(ended) | ({} if saved_s is None else {"saved_s": saved_s})
            for name, figure in figures.items():
                self._totals[name] = self._totals.get(name, 0.0) + figure
            self._ended = []
