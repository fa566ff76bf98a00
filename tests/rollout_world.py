# SPDX-License-Identifier: Apache-2.0
"""Real engines in the test's own process: turns of random length, deaths on order, a clock of steps, and a random policy."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lab.local.engine import RolloutEngine
from lab.local.turn_engine import ReloadingTurnEngine
from nemo_specrollout.stragglers import attempts, coordinator, turn_engine
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth
from nemo_specrollout.stragglers.decisions.straggler_policy import TailDecision
from nemo_specrollout.stragglers.decisions.tail_forecast import TailObservation
from nemo_specrollout.stragglers.turns import TurnOrders, TurnResult


def drive_clock(monkeypatch: pytest.MonkeyPatch, engines: Sequence[Any], step_s: Sequence[float]) -> None:
    """Gives the coordinator and the engines a clock that only steps move, whatever else the machine does.

    `step_s` are the seconds of a step of each engine, or of a class of engines. Reading the clock takes a microsecond.
    """
    now_s = 0.0

    def perf_counter() -> float:
        nonlocal now_s
        now_s += 1e-6
        return now_s

    def stepped(engine: Any, seconds: float) -> Any:
        step = engine.step

        def take(*arguments: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return step(*arguments)

        return take

    for module in (attempts, coordinator, turn_engine):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=perf_counter))
    for engine, seconds in zip(engines, step_s, strict=True):
        monkeypatch.setattr(engine, "step", stepped(engine, seconds))


class EnginesInTurn:
    """`racing.turns.EngineFleet` without processes. Engines take their turns when results are asked for, in random order.

    `deaths` is the number of turns after which each engine dies, again and again; 0 means never.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        seed: int,
        deaths: Sequence[int] = (),
        weights: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> None:
        self.methods = list(range(len(engines)))
        self.capacity = min(engine.max_num_seqs for engine in engines)
        self.num_deaths = 0
        self._weights = None if weights is None else list(weights.items())
        self._policy_version = 0
        self._unheard: list[tuple[int, TurnResult | None]] = []
        self._engines, self._sampling = engines, sampling
        self._rng = np.random.default_rng(seed)
        self._deaths = list(deaths) or [0] * len(engines)
        self._workers: dict[int, ReloadingTurnEngine] = {}
        self._left: dict[int, int] = {}
        self._turns: dict[int, deque[TurnOrders]] = {w: deque() for w in self.methods}
        self._revive(self.methods)

    def send(self, worker: int, orders: TurnOrders) -> None:
        self._turns[worker].append(orders)

    def num_turns(self, worker: int) -> int:
        return len(self._turns[worker])

    def is_alive(self, worker: int) -> bool:
        return worker in self._workers

    def early_worth(self, worker: int) -> EarlyWorth:
        return EarlyWorth()

    def finish_turns(self) -> None:
        while any(self._turns.values()):
            self.results()

    def has_requests(self) -> bool:
        """Returns whether any engine has requests."""
        return any(engine._llm.llm_engine.has_unfinished_requests() for engine in self._engines)

    def results(self) -> list[tuple[int, TurnResult | None]]:
        if self._unheard:
            heard, self._unheard = self._unheard, []
            return heard
        return self._results()

    def _results(self) -> list[tuple[int, TurnResult | None]]:
        worker = int(self._rng.choice([w for w, turns in self._turns.items() if turns]))
        self._left[worker] -= 1
        if self._left[worker] == 0:
            self._die(worker)
            return [(worker, None)]
        orders = replace(self._turns[worker].popleft(), seconds=float(self._rng.exponential(0.004)))
        return [(worker, self._workers[worker].turn(orders))]

    def revive(self) -> None:
        self._revive([w for w in self.methods if w not in self._workers])

    def load_weights(self, tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        known = list(tensors)
        while any(self._turns.values()):
            self._unheard += self._results()
        self._weights, self._policy_version = known, policy_version
        for worker in self._workers.values():
            worker.load_weights(known, policy_version, recompute_kv_cache=True)

    def _die(self, worker: int) -> None:
        """Ends an engine; its unreported tokens are lost."""
        self._workers.pop(worker).stop_all()
        self._turns[worker].clear()
        self.num_deaths += 1

    def _revive(self, workers: Sequence[int]) -> None:
        for worker in workers:
            self._workers[worker] = ReloadingTurnEngine(self._engines[worker], **self._sampling)
            self._left[worker] = self._deaths[worker]
            if self._weights is not None:
                self._workers[worker].load_weights(self._weights, self._policy_version, recompute_kv_cache=False)


class WildPolicy:
    """Starts, moves, races and stops requests at random: no decision of a policy may change a token."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.num_changes = 0

    def decide(self, seen: TailObservation) -> TailDecision:
        workers = np.flatnonzero(seen.capacity_E > 0)
        starts, stops = [], []
        for request in range(len(seen.remaining_R)) if len(workers) else ():
            runs = seen.engine_A[seen.request_A == request].tolist()
            others = [w for w in workers.tolist() if w not in runs]
            if others and (not runs or self._rng.random() < 0.15):
                starts.append((request, int(self._rng.choice(others))))
            if runs and self._rng.random() < 0.1 and (len(runs) > 1 or (starts and starts[-1][0] == request)):
                stops.append((request, int(self._rng.choice(runs))))
        self.num_changes += len(starts) + len(stops)
        return TailDecision(tuple(starts), tuple(stops))
