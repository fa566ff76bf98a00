# SPDX-License-Identifier: Apache-2.0
"""Engines for `tail_bench`. Each has a process and a core of its own, or all are in one process with a clock of CPU seconds.

If there were more engines than cores, an idle engine would leave its core to the others, which an idle GPU cannot do.
Therefore `EnginesApart` lets only one engine compute at a time. It counts time as if each engine had a core of its own, by a
clock for each engine that advances by the CPU seconds of the engine's turns.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lab.local.engine import RolloutEngine
from lab.local.rollout_pool import RolloutPool
from lab.local.run_sections import GenerationConfig
from lab.local.turn_engine import ReloadingTurnEngine
from nemo_specrollout.drafters.text import LookupDrafter
from nemo_specrollout.stragglers import attempts, coordinator, turn_engine
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth
from nemo_specrollout.stragglers.decisions.speed_table import draft_method
from nemo_specrollout.stragglers.turns import TurnOrders, TurnResult


def forget_texts(worker: Any) -> None:
    """Empties the context indexes of an engine's text drafters, because they would know a response that is generated again."""
    router = worker.specrollout_router
    for drafter in () if router is None else router._drafters:
        if isinstance(drafter, LookupDrafter):
            drafter.index.words.zero_()
            drafter.index.candidates.zero_()


class EngineProcesses(RolloutPool):
    """The engines of a local run, each in a process with one core."""

    def engine_s(self) -> float:
        """Returns the CPU seconds that the processes of all engines have used so far."""
        ticks = 0
        for pid in self.pids.values():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def forget(self) -> None:
        """Lets the engines forget all texts and drop their prefix caches."""
        self.ask_each("run_in_worker", forget_texts)
        self.ask_each("_drop_cache")

    def now_s(self) -> float:
        """Returns the time in seconds on the machine's own clock."""
        return time.perf_counter()


class EnginesApart:
    """A `LocalFleet` whose engines are all in this process. Owns the engines and a simulated clock.

    On this clock, each engine makes its turns one after another. A turn begins when it was sent or when the engine's turn
    before it ends, whichever is later. Its result can be read when the clock has reached the turn's end.
    """

    def __init__(self, model: Path, generation: GenerationConfig, seed: int, num_engines: int) -> None:
        blocks = [generation.specrollout.of_engine(engine) for engine in range(num_engines)]
        names = list(map(draft_method, blocks))
        self.method_names = list(dict.fromkeys(names))
        self.methods = [self.method_names.index(name) for name in names]
        arguments = [(model, replace(generation, specrollout=block), seed) for block in blocks]
        self._engines = [RolloutEngine(*of_engine) for of_engine in arguments]
        self.capacity = min(engine.max_num_seqs for engine in self._engines)
        self._turns = [ReloadingTurnEngine(engine) for engine in self._engines]
        self._queues: list[deque[tuple[float, TurnOrders]]] = [deque() for _ in blocks]
        self._ended: dict[int, tuple[float, TurnResult]] = {}
        """The end time and the result of each engine's turn that was computed and not yet read."""
        self._free_s = [0.0] * num_engines
        self._now_s = 0.0
        self._engine_s = 0.0

    def send(self, engine: int, orders: TurnOrders) -> None:
        self._queues[engine].append((self._now_s, orders))

    def num_turns(self, engine: int) -> int:
        return len(self._queues[engine]) + (engine in self._ended)

    def is_alive(self, engine: int) -> bool:
        return True

    def early_worth(self, engine: int) -> EarlyWorth:
        return EarlyWorth()

    def results(self) -> list[tuple[int, TurnResult | None]]:
        """Computes the next turn of each engine that has no computed turn left.

        Returns the result of the turn that ends first.
        """
        for engine, queue in enumerate(self._queues):
            if queue and engine not in self._ended:
                self._compute(engine, *queue.popleft())
        engine = min(self._ended, key=lambda e: self._ended[e][0])
        end_s, result = self._ended.pop(engine)
        self._now_s = max(self._now_s, end_s)
        return [(engine, result)]

    def _compute(self, engine: int, sent_s: float, orders: TurnOrders) -> None:
        started_s = time.thread_time()
        result = self._turns[engine].turn(orders)
        seconds = time.thread_time() - started_s
        self._free_s[engine] = max(self._free_s[engine], sent_s) + seconds
        self._ended[engine] = self._free_s[engine], result
        self._engine_s += seconds

    def finish_turns(self) -> None:
        """Finishes the turns that are left from an earlier rollout."""
        while any(map(self.num_turns, range(len(self.methods)))):
            self.results()

    def revive(self) -> None:
        """Does nothing, because an engine of this process cannot die alone."""

    def load_weights(self, tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        raise NotImplementedError("the bench has one policy")

    def engine_s(self) -> float:
        """Returns the CPU seconds of all turns so far."""
        return self._engine_s

    def now_s(self) -> float:
        """Returns the time in seconds on the simulated clock."""
        return self._now_s

    def forget(self) -> None:
        """Lets the engines forget all texts and drop their prefix caches."""
        for engine in self._engines:
            engine.run_in_worker(forget_texts)
            engine._drop_cache()

    def close(self) -> None:
        """Ends all engines."""
        for engine in self._engines:
            engine.close()


def use_clocks_of(fleets: Sequence[EnginesApart]) -> None:
    """Makes coordinators read the simulated clocks of these fleets, and makes engines measure their turns in CPU seconds.

    Only one of the fleets may be at work at a time.
    """
    clock = SimpleNamespace(perf_counter=lambda: sum(fleet.now_s() for fleet in fleets))
    for module in (attempts, coordinator):
        module.time = clock  # type: ignore[attr-defined]
    turn_engine.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[assignment]
