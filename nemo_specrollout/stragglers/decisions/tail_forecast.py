# SPDX-License-Identifier: Apache-2.0
"""Forecast of the tail of a rollout, which predicts when engines will end their requests, with and without changes.

An attempt is the work of one engine on one request.

Shapes: R running requests, M draft methods, A attempts, E engines, B requests of one engine.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.stragglers.decisions.idle_time import NO_EARLY_WORK, IdleTime
from nemo_specrollout.stragglers.decisions.speed_table import SpeedModel


def drain(alone_s_B: np.ndarray, slowdowns_B: np.ndarray) -> np.ndarray:
    """Returns when each of an engine's requests ends, in seconds from now, float64 [B].

    `alone_s_B` is the time that each request would take alone. `slowdowns_B` has for batches of 1, 2, ... B requests the
    factor by which each request is slower than alone. For example, with a factor of 1.5 for two requests, requests of 1 s and
    3 s end after 1.5 s and 3.5 s.
    """
    order_B = np.argsort(alone_s_B, kind="stable")
    gaps_B = np.diff(alone_s_B[order_B], prepend=0.0)
    ends_B = np.empty(len(alone_s_B))
    ends_B[order_B] = np.cumsum(gaps_B * slowdowns_B[::-1])
    return ends_B


def slowdowns_of(speeds: SpeedModel, method: int, first: int, last: int) -> list[float]:
    """Returns the factors by which a request is slower than alone, for each batch size from `first` to `last`."""
    alone = speeds.tokens_per_s(method, 1)
    return [alone / speeds.tokens_per_s(method, b) for b in range(first, last + 1)]


@dataclass(frozen=True)
class Assignment:
    """Says which engine had which request just before the first move or race of a rollout."""

    engine_R: np.ndarray
    num_tokens_R: np.ndarray
    """Number of response tokens that the engine had reported for each request, int64."""
    reported_s_E: np.ndarray
    """Time of each engine's latest report in seconds, by any clock, float64."""


def undisturbed_end_s(
    before: Assignment, lengths_R: np.ndarray, speed_RM: np.ndarray, method_E: np.ndarray, speeds: SpeedModel
) -> float:
    """Returns the time at which a rollout would have ended if every engine had kept its requests.

    The time is in seconds of the clock that `before.reported_s_E` uses.
    `lengths_R` has the final number of response tokens of each request. `speed_RM` has the decode speed of each request under
    each draft method, relative to a typical request. `method_E` has the draft method of each engine.
    """
    method_R = method_E[before.engine_R]
    typical_M = np.array([speeds.tokens_per_s(m, 1) for m in range(speed_RM.shape[1])])
    speed_R = speed_RM[np.arange(len(method_R)), method_R]
    alone_s_R = (lengths_R - before.num_tokens_R) / (typical_M[method_R] * speed_R)
    ends_E = [
        reported_s + drain(part, np.array(slowdowns_of(speeds, int(method_E[e]), 1, len(part)))).max(initial=0.0)
        for e, reported_s in enumerate(before.reported_s_E.tolist())
        if len(part := alone_s_R[before.engine_R == e])
    ]
    return float(max(ends_E))


@dataclass(frozen=True)
class TailObservation:
    """State of a rollout as the coordinator sees it. An attempt is the work of one engine on one request.

    A request without an attempt is waiting for an engine.
    """

    num_tokens_R: np.ndarray
    """Number of tokens of the prompt and the response in the attempt that is furthest ahead, int64."""
    remaining_R: np.ndarray
    """Expected number of tokens that each request still needs in the attempt that is furthest ahead, float64."""
    speed_RM: np.ndarray
    """Decode speed of each request under each draft method, relative to a typical request, float64."""
    doubt_RM: np.ndarray
    """Standard deviation of the logarithm of `speed_RM`, float64."""
    request_A: np.ndarray
    """Index of the request of each attempt, int64."""
    engine_A: np.ndarray
    """Index of the engine of each attempt, int64."""
    lag_A: np.ndarray
    """Number of tokens by which each attempt is behind the furthest attempt at the same request, int64."""
    method_E: np.ndarray
    """Draft method of each engine, int64."""
    capacity_E: np.ndarray
    """Maximum number of requests of each engine, int64. It is 0 for a dead engine."""
    handover_s: float = 0.0
    """Seconds from a decision until an engine begins to work on a new request."""
    idle: IdleTime = NO_EARLY_WORK
    """How much time engines can save in later rollouts by decoding requests of coming steps."""


class TailForecast:
    """The attempts as they will be after the planned changes, and the predicted ends of requests in seconds from now.

    An attempt is the work of one engine on one request. If several engines race for a request, all their attempts are expected
    to end when the first engine ends the request. Owns the planned changes.
    """

    def __init__(self, seen: TailObservation, speeds: SpeedModel) -> None:
        self.seen = seen
        self.speeds = speeds
        self.changes: list[tuple[int, int]] = []
        """Planned starts and stops of attempts, as pairs (request, engine)."""
        self._speed_M = np.array([speeds.tokens_per_s(m, 1) for m in range(seen.speed_RM.shape[1])])
        self._slowdowns: dict[int, list[float]] = {}
        self._ends_s: dict[int, float] = {}
        self._alone_s: list[dict[int, float]] = [{} for _ in seen.capacity_E]
        self._engines: dict[int, dict[int, None]] = {}
        """For each request, the engines that decode it, as an ordered set."""
        seconds_A = self._alone(seen.request_A, seen.engine_A, seen.lag_A)
        for r, e, s in zip(seen.request_A.tolist(), seen.engine_A.tolist(), seconds_A.tolist(), strict=True):
            self._alone_s[e][r] = s
            self._engines.setdefault(r, {})[e] = None

    def engines_of(self, request: int) -> dict[int, None]:
        """Returns the engines that decode a request, as an ordered set."""
        return self._engines.get(request, {})

    def waiting(self) -> list[int]:
        """Returns the requests that no engine decodes, beginning with those that have the most tokens left."""
        order = np.argsort(-self.seen.remaining_R, kind="stable")
        return [r for r in order.tolist() if not self.engines_of(r)]

    def raced_attempts(self) -> list[tuple[int, int]]:
        """Returns the attempts at requests for which engines race, as pairs (request, engine), the last to end first."""
        attempts = [(r, e) for r, engines in self._engines.items() if len(engines) > 1 for e in engines]
        return sorted(attempts, key=lambda attempt: -self._attempt_end_s(*attempt))

    def end_s(self, engine: int) -> float:
        """Returns when an engine ends its last request, in seconds from now, or 0 if it has no requests."""
        if engine not in self._ends_s:
            self._ends_s[engine] = self._last_end_s(engine, self._alone_s[engine])
        return self._ends_s[engine]

    def chance(self, request: int, engine: int) -> float:
        """Returns the probability that `engine` wins the race for a request against the fastest of the other racers.

        It is 1 if no other engine races for the request.
        """
        rivals = [e for e in self.engines_of(request) if e != engine]
        if not rivals:
            return 1.0
        rival = min(rivals, key=lambda e: self._attempt_end_s(request, e))
        doubts_M = self.seen.doubt_RM[request]
        methods = self.seen.method_E
        spread = math.hypot(doubts_M[methods[engine]], doubts_M[methods[rival]])
        lead = math.log(self._attempt_end_s(request, rival) / self._attempt_end_s(request, engine))
        return _normal(lead / spread) if spread > 0 else float(lead >= 0)

    def last_engine(self, excluded: set[int]) -> int | None:
        """Returns the engine that will be busy longest, or None if no engine has requests.

        Ignores the engines in `excluded`.
        """
        busy = [e for e, alone_s in enumerate(self._alone_s) if alone_s and e not in excluded]
        return max(busy, key=self.end_s, default=None)

    def by_end(self, engine: int) -> list[int]:
        """Returns the requests of an engine, the last to end first."""
        ends = self._request_ends_s(engine, self._alone_s[engine])
        return sorted(ends, key=lambda r: -ends[r])

    def best_engine(self, request: int) -> int:
        """Returns the engine where a request would end first if it started now. Full engines count only if all are full."""
        free = [e for e, alone_s in enumerate(self._alone_s) if len(alone_s) < self.seen.capacity_E[e]]
        candidates = free or np.flatnonzero(self.seen.capacity_E > 0).tolist()
        return min(candidates, key=lambda e: self._request_ends_s(e, self._with((request,), e))[request])

    def targets(self, request: int, num_free: int = 1) -> list[int]:
        """Returns for each draft method the engine that could take over the request or race for it, if there is one.

        It is the engine that ends first among those that do not have the request and have at least `num_free` free slots.
        """
        best: dict[int, int] = {}
        for engine, method in enumerate(self.seen.method_E.tolist()):
            is_free = len(self._alone_s[engine]) + num_free <= self.seen.capacity_E[engine]
            if is_free and request not in self._alone_s[engine]:
                best[method] = min(best.get(method, engine), engine, key=self.end_s)
        return list(best.values())

    def end_after_move(self, requests: tuple[int, ...], source: int, target: int) -> float:
        """Returns when both engines would have ended, in seconds from now, if the requests moved from `source` to `target`."""
        rest = {r: s for r, s in self._alone_s[source].items() if r not in requests}
        there = self._request_ends_s(target, self._with(requests, target))
        ends = [e if r in requests else self._first_end_s(r, target, e) for r, e in there.items()]
        return max(self._last_end_s(source, rest), *ends)

    def end_after_race(self, request: int, source: int, target: int) -> float:
        """Returns when both engines would have ended, in seconds from now, if both of them decoded the request."""
        here = self._request_ends_s(source, self._alone_s[source])
        there = self._request_ends_s(target, self._with((request,), target))
        source_s = self._first_end_s(request, source, here[request])
        first_s = self._race_s(request, source, source_s, target, there[request])
        others_s = [self._first_end_s(r, source, e) for r, e in here.items() if r != request]
        others_s += [self._first_end_s(r, target, e) for r, e in there.items() if r != request]
        return max([first_s, *others_s])

    def early_lost_s(
        self, requests: tuple[int, ...], engines: tuple[int, int], end_s: float, *, is_race: bool
    ) -> float:
        """Returns the seconds that later rollouts lose if a change leaves engines less time for requests of coming steps.

        In the change, `requests` move from the first of the two `engines` to the second, or the second races for them. The
        result compares the time that all engines save by decoding requests of coming steps without the change and with it.
        Without the change, decoding until the end of the first of the two engines counts. With the change, decoding until
        `end_s` counts, when both engines will have ended.
        """
        source, target = engines
        idle = self.seen.idle
        if not idle.has_worth:
            return 0.0
        until_s = self.end_s(source)
        rest = {r: s for r, s in self._alone_s[source].items() if is_race or r not in requests}
        after = {source: rest, target: self._with(requests, target)}
        lost_s = 0.0
        for engine, alone_s in enumerate(self._alone_s):
            before = self._request_ends_s(engine, alone_s)
            then = self._request_ends_s(engine, after[engine]) if engine in after else before
            lost_s += idle.spared_s(engine, list(before.values()), until_s)
            lost_s -= idle.spared_s(engine, list(then.values()), end_s)
        return lost_s / max(int((self.seen.capacity_E > 0).sum()), 1)

    def start(self, request: int, engine: int) -> None:
        self._alone_s[engine] = self._with((request,), engine)
        self._engines.setdefault(request, {})[engine] = None
        self._forget_ends(engine)
        self.changes.append((request, engine))

    def stop(self, request: int, engine: int) -> None:
        self._forget_ends(engine)
        del self._alone_s[engine][request], self._engines[request][engine]
        self.changes.append((request, engine))

    def net_changes(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Returns the attempts to start, and the attempts to stop, as pairs (request, engine).

        Planned changes of one attempt that cancel each other are left out.
        """
        changed = [pair for pair, count in Counter(self.changes).items() if count % 2]
        starts = tuple((r, e) for r, e in changed if e in self.engines_of(r))
        return starts, tuple((r, e) for r, e in changed if e not in self.engines_of(r))

    def _alone(self, request_A: np.ndarray, engine_A: np.ndarray, lag_A: np.ndarray) -> np.ndarray:
        """Returns the seconds that each attempt would take if its engine had no other request, float64 [A]."""
        method_A = self.seen.method_E[engine_A]
        speed_A = self._speed_M[method_A] * self.seen.speed_RM[request_A, method_A]
        return (self.seen.remaining_R[request_A] + lag_A) / speed_A

    def _with(self, requests: tuple[int, ...], engine: int) -> dict[int, float]:
        """Returns the seconds that each request of an engine would take alone if `requests` joined it.

        All requests of the engine wait for the prefill of the new ones. The new ones also wait until the engine gets the order
        to start. These two times do not depend on the batch. They are divided by the slowdown here, because `drain` multiplies
        everything by it.
        """
        known = self._alone_s[engine]
        new_R = np.array(requests)
        slowdown = float(self._slowdowns_for(engine, len(known) + len(requests))[-1])
        prefill_s = self.speeds.prefill_s(int(self.seen.num_tokens_R[new_R].sum())) / slowdown
        new_s = self._alone(new_R, np.full(len(new_R), engine), np.zeros(len(new_R))) + prefill_s
        new_s += self.seen.handover_s / slowdown
        return {r: s + prefill_s for r, s in known.items()} | dict(zip(requests, new_s.tolist(), strict=True))

    def _slowdowns_for(self, engine: int, batch: int) -> np.ndarray:
        """Returns the factors by which a request is slower than alone, in batches of 1, 2, ... `batch` requests, float64."""
        method = int(self.seen.method_E[engine])
        known = self._slowdowns.setdefault(method, [])
        known += slowdowns_of(self.speeds, method, len(known) + 1, batch)
        return np.array(known[:batch])

    def _request_ends_s(self, engine: int, alone_s: dict[int, float]) -> dict[int, float]:
        """Returns when each request of an engine ends if the engine has the requests in `alone_s`, without regard to races."""
        if not alone_s:
            return {}
        ends_B = drain(np.array(list(alone_s.values())), self._slowdowns_for(engine, len(alone_s)))
        return dict(zip(alone_s, ends_B.tolist(), strict=True))

    def _attempt_end_s(self, request: int, engine: int) -> float:
        return self._request_ends_s(engine, self._alone_s[engine])[request]

    def _last_end_s(self, engine: int, alone_s: dict[int, float]) -> float:
        ends = self._request_ends_s(engine, alone_s)
        return max((self._first_end_s(r, engine, e) for r, e in ends.items()), default=0.0)

    def _first_end_s(self, request: int, engine: int, end_s: float) -> float:
        """Returns when a request is expected to end, in seconds from now, with all engines that race for it.

        `end_s` is when the attempt of `engine` alone would end.
        """
        for rival in [e for e in self.engines_of(request) if e != engine]:
            end_s = min(end_s, self._race_s(request, engine, end_s, rival, self._attempt_end_s(request, rival)))
        return end_s

    def _race_s(self, request: int, one: int, one_s: float, other: int, other_s: float) -> float:
        """Returns the expected end of a race between two engines, given the expected end of each in seconds from now."""
        doubts_M = self.seen.doubt_RM[request]
        methods = self.seen.method_E
        if methods[one] == methods[other]:
            return min(one_s, other_s)
        return expected_first(one_s, float(doubts_M[methods[one]]), other_s, float(doubts_M[methods[other]]))

    def _forget_ends(self, engine: int) -> None:
        """Drops the cached ends of an engine whose requests change, and of the engines that race with it."""
        for rival in {engine, *(e for r in self._alone_s[engine] for e in self.engines_of(r))}:
            self._ends_s.pop(rival, None)


def expected_first(mean_1: float, doubt_1: float, mean_2: float, doubt_2: float) -> float:
    """Returns the expected minimum of two independent log-normal times, given their means.

    `doubt_1` and `doubt_2` are the standard deviations of the logarithms of the times. The formula is that of Black (1976).
    """
    spread = math.hypot(doubt_1, doubt_2)
    if spread == 0.0 or min(mean_1, mean_2) <= 0.0:
        return min(mean_1, mean_2)
    lead = math.log(mean_2 / mean_1)
    return mean_1 * _normal(lead / spread - spread / 2) + mean_2 * _normal(-lead / spread - spread / 2)


def _normal(x: float) -> float:
    """Returns the probability that a standard normal number is at most `x`."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))
