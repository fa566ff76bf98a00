# SPDX-License-Identifier: Apache-2.0
"""Rollout engines on this machine, each in a Ray actor with one core."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.local import ray_settings  # noqa: F401  comes first, because vLLM imports Ray

# isort: split
import ray
import torch

from lab.local.early_work import EarlyWork
from lab.local.engine import RolloutEngine
from lab.local.own_ray import OwnRay
from lab.local.run_sections import GenerationConfig
from lab.local.shared_weights import Packed, opened, packed, wait_for_gpu
from lab.local.turn_engine import ReloadingTurnEngine
from nemo_specrollout.run_ahead.coming_texts import AheadPlan
from nemo_specrollout.run_ahead.early_requests import EarlyMade
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth
from nemo_specrollout.stragglers.decisions.speed_table import draft_method
from nemo_specrollout.stragglers.turns import TurnOrders, TurnResult

HANG_S = 300.0
"""Seconds without an answer after which an engine that has something to do is killed."""
START_S = 1800.0
"""Seconds after which an engine that is still starting is killed."""
MAX_RESTARTS = 3
"""Most restarts of each engine."""
_LONGEST_ERROR = 300
"""Most characters of a dead engine's last error that are shown."""
DEAD = object()
"""Takes the place of an answer if the engine has died."""

Weights = tuple[Packed, int]
"""Tensors by Hugging Face name, and the version of the policy."""


@dataclass(frozen=True)
class _Sent:
    """Weights that have been sent to engines, which may still be reading them."""

    ref: Any
    """Ray's reference to `Weights`."""
    tensors: list[tuple[str, torch.Tensor]]
    """The tensors themselves, which must live as long as a process may open handles to them."""


class RolloutActor:
    """A Ray actor with an engine that works in turns. If there is a GPU, all actors and the runner use the same one."""

    def start(self, model: str, generation: GenerationConfig, seed: int, weights: Weights | None) -> tuple[int, int]:
        """Starts the engine. Returns its `max_num_seqs` and the process id. Raises ConfigError for what vLLM refuses."""
        self._engine = RolloutEngine(Path(model), generation, seed)
        self._turns = ReloadingTurnEngine(self._engine)
        self._early: EarlyWork | None = None
        if self._engine.runs_ahead:
            self._early = EarlyWork(self._engine.rolling(), lambda: self._turns.is_busy)
        if weights is not None:
            self.load_weights(weights, recompute_kv_cache=False)
        return self._engine.max_num_seqs, os.getpid()

    def turn(self, orders: TurnOrders) -> TurnResult:
        with self._alone():
            result = self._turns.turn(orders)
            if self._early is not None:
                self._early.allow()
            return result

    def load_weights(self, weights: Weights, recompute_kv_cache: bool) -> None:
        tensors, version = weights
        with self._alone():
            self._turns.load_weights(opened(tensors), version, recompute_kv_cache=recompute_kv_cache)
            wait_for_gpu()

    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Calls the engine's method of that name and returns its result."""
        with self._alone():
            return getattr(self._engine, method)(*arguments)

    def plan_ahead(self, plan: AheadPlan) -> None:
        """Sets which requests of coming steps the engine may start (`RollingEngine.plan`)."""
        assert self._early is not None
        self._early.plan(plan)

    def early_worth(self) -> EarlyWorth:
        """Returns the current worth of the early requests (`RollingEngine.worth`)."""
        assert self._early is not None
        return self._early.worth()

    def end_ahead(self, keeps_cache: bool) -> EarlyMade:
        """Stops the requests of coming steps and returns their texts (`RollingEngine.end`)."""
        assert self._early is not None
        return self._early.end(keeps_cache=keeps_cache)

    def _alone(self) -> AbstractContextManager[None]:
        """Returns a context in which the thread that decodes early requests does not use the engine."""
        return nullcontext() if self._early is None else self._early.set_aside()


@dataclass(frozen=True)
class _Start:
    """An engine that is starting, and the weights that it starts with."""

    engine: int
    actor: Any
    weights: _Sent | None


class RolloutPool:
    """The engines of a run. Owns their actors, the weights that a restarted engine gets, and Ray if the pool has started it.

    An engine is alive, dead or restarting. `results` reports each death once, whichever call has noticed it. Until a death is
    reported, the engine takes no orders, even if it has been restarted.

    Example: `Coordinator(pool, policy, ladder, lengths).roll_out(requests)`.
    """

    def __init__(
        self,
        model: Path,
        generation: GenerationConfig,
        seed: int,
        num_engines: int,
        *,
        recompute_kv_cache: bool = True,
        weights_by_handle: bool = True,
    ) -> None:
        """Starts `num_engines` engines, and Ray unless Ray already runs. Raises ConfigError for what vLLM refuses.

        With `recompute_kv_cache`, running requests compute their KV cache again after new weights
        (`ReloadingTurnEngine.load_weights`). `weights_by_handle` says how weights on a GPU are sent to the engines (`packed`).
        """
        blocks = [generation.specrollout.of_engine(engine) for engine in range(num_engines)]
        names = list(map(draft_method, blocks))
        self.method_names = list(dict.fromkeys(names))
        self.methods = [self.method_names.index(name) for name in names]
        self.num_restarts = [0] * num_engines
        self.capacity = 0
        self.pids: dict[int, int] = {}
        """Process id of each engine. A dead engine keeps its last one."""
        self._recompute_kv_cache = recompute_kv_cache
        self._weights_by_handle = weights_by_handle
        self._arguments = [(str(model), replace(generation, specrollout=block), seed) for block in blocks]
        self._actors: dict[int, Any] = {}
        self._starting: dict[Any, _Start] = {}
        self._turns: dict[Any, int] = {}
        self._deaths: dict[int, None] = {}
        """Dead engines that `results` has not reported yet."""
        self._untold: list[tuple[int, str]] = []
        """Dead engines that `take_deaths` has not reported yet, each with its last error."""
        self._last_error = ""
        self._heard_s = [0.0] * num_engines
        self._runs_ahead = generation.specrollout.runs_ahead
        self._worth: dict[int, tuple[EarlyWorth, Any]] = {}
        """Latest worth of each engine's early work, and Ray's reference to a newer answer if one was requested."""
        self._weights: _Sent | None = None
        self._ray = OwnRay()
        try:
            for engine in range(num_engines):
                self._start(engine)
            while self._starting:
                self._wait()
                self.revive()
            self._deaths.clear()
        except BaseException:
            self.close()
            raise

    # For a coordinator: see `EngineFleet`

    def is_alive(self, engine: int) -> bool:
        return engine in self._actors and engine not in self._deaths

    def send(self, engine: int, orders: TurnOrders) -> None:
        if not self.num_turns(engine):
            self._heard_s[engine] = time.monotonic()
        self._turns[self._actors[engine].turn.remote(orders)] = engine

    def num_turns(self, engine: int) -> int:
        return sum(e == engine for e in self._turns.values())

    def results(self) -> list[tuple[int, TurnResult | None]]:
        """Waits until a turn or a restart has ended, or until an engine has died.

        Returns pairs of an engine's index and the result of its turn, or None if the engine has died.
        """
        ready = [] if self._deaths else self._wait()
        answers = [(self._turns[turn], self._answer(self._turns[turn], turn)) for turn in ready if turn in self._turns]
        for turn in ready:
            self._turns.pop(turn, None)
        deaths = self._deaths
        self._deaths = {}
        return [(e, answer) for e, answer in answers if answer is not DEAD] + [(e, None) for e in deaths]

    def early_worth(self, engine: int) -> EarlyWorth:
        """Returns the latest known worth of an engine's early work. Asks for a newer one, unless a turn is queued there."""
        if not self._runs_ahead or not self.is_alive(engine):
            return EarlyWorth()
        known, call = self._worth.get(engine, (EarlyWorth(), None))
        if call is not None and ray.wait([call], timeout=0)[0]:
            answer = self._answer(engine, call)
            known, call = EarlyWorth() if answer is DEAD else answer, None
        if call is None and self.is_alive(engine) and not self.num_turns(engine):
            call = self._actors[engine].early_worth.remote()
        self._worth[engine] = known, call
        return known

    def revive(self) -> None:
        """Begins to restart dead engines with the newest weights, without waiting.

        Each is restarted at most `MAX_RESTARTS` times. Raises RuntimeError if no engine is left.
        """
        restarting = {start.engine for start in self._starting.values()}
        for engine in set(range(len(self.methods))) - self._actors.keys() - restarting:
            if self.num_restarts[engine] < MAX_RESTARTS:
                self.num_restarts[engine] += 1
                self._start(engine)
        if not self._actors and not self._starting:
            raise RuntimeError(
                f"all rollout workers have died {MAX_RESTARTS + 1} times; the last error of one: "
                f"{self._last_error or 'unknown'}"
            )

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Gives all live engines the weights `tensors`, by Hugging Face name, and waits until the engines have loaded them.

        Engines first do the turns that are queued for them. A restarting engine gets the weights before its first turn.
        """
        kept = [(name, tensor.contiguous()) for name, tensor in tensors]
        self._weights = _Sent(ray.put((packed(kept, self._weights_by_handle), policy_version)), kept)
        loads = {e: self._load(actor) for e, actor in self._actors.items()}
        for engine, load in loads.items():
            self._answer(engine, load)

    # For the run

    def alive(self) -> list[int]:
        """Returns the indices of the engines that take orders."""
        return [engine for engine in range(len(self.methods)) if self.is_alive(engine)]

    def plan_ahead(self, plans: Mapping[int, AheadPlan]) -> None:
        """Tells engines which requests of coming steps they may start. An engine that dies during the call is ignored."""
        asked = {e: self._actors[e].plan_ahead.remote(plan) for e, plan in plans.items() if self.is_alive(e)}
        for engine, ref in asked.items():
            self._answer(engine, ref)

    def end_ahead(self, *, keeps_cache: bool) -> list[EarlyMade]:
        """Stops the requests of coming steps in all live engines.

        Returns one `EarlyMade` for each of these engines, with the texts that it made. With `keeps_cache`, vLLM's cached
        prefixes stay. It must be true while engines decode requests of their own, which use these prefixes.
        """
        self._worth = {}
        asked = {engine: actor.end_ahead.remote(keeps_cache) for engine, actor in sorted(self._actors.items())}
        answers = [self._answer(engine, ref) for engine, ref in asked.items()]
        return [made for made in answers if made is not DEAD]

    def finish_turns(self) -> None:
        """Waits for the remaining turns of an earlier rollout, and drops their results."""
        while self._turns:
            self.results()

    def method_name(self, engine: int) -> str:
        """Returns the name of the engine's draft method."""
        return self.method_names[self.methods[engine]]

    def ask(self, engine: int, method: str, *arguments: Any) -> Any:
        """Calls a method of the engine, which must be alive. Returns its result, or DEAD if the engine has died."""
        return self._answer(engine, self._actors[engine].ask.remote(method, arguments))

    def ask_each(self, method: str, *arguments: Any, drafting_by: str | None = None) -> dict[int, Any]:
        """Calls a method of all live engines, or of those with a drafter of type `drafting_by`. Returns results by engine."""
        asked = {
            engine: actor.ask.remote(method, arguments)
            for engine, actor in sorted(self._actors.items())
            if drafting_by in (None, *self.method_name(engine).split("+"))
        }
        return {engine: answer for engine, ref in asked.items() if (answer := self._answer(engine, ref)) is not DEAD}

    def take_deaths(self) -> list[str]:
        """Returns a sentence for each death of an engine, or of an engine's drafter process, since the last call."""
        deaths = [sentence for sentences in self.ask_each("take_deaths").values() for sentence in sentences]
        untold = self._untold
        self._untold = []
        return deaths + [
            f"rollout worker {engine} died{f' ({error})' if error else ''}; the others take over its requests, and it "
            + (
                f"is restarted (at most {MAX_RESTARTS} times)"
                if self.num_restarts[engine] < MAX_RESTARTS
                else "has died too often to be restarted"
            )
            for engine, error in untold
        ]

    def close(self) -> None:
        """Ends the engines, and Ray if the pool has started it."""
        for actor in (*self._actors.values(), *(start.actor for start in self._starting.values())):
            ray.kill(actor)
        self._actors = {}
        self._starting = {}
        self._turns = {}
        self._ray.stop()

    # Inside

    def _start(self, engine: int) -> None:
        """Starts an engine without waiting. It requests no CPU from Ray, so that more engines than cores can run."""
        one_core = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        actor: Any = ray.remote(RolloutActor).options(num_cpus=0, runtime_env=one_core).remote()
        weights = None if self._weights is None else self._weights.ref
        started = actor.start.remote(*self._arguments[engine], weights)
        self._starting[started] = _Start(engine, actor, self._weights)
        self._heard_s[engine] = time.monotonic()

    def _load(self, actor: Any) -> Any:
        """Sends an engine the newest weights, without waiting. Returns Ray's reference to the answer."""
        assert self._weights is not None
        return actor.load_weights.remote(self._weights.ref, self._recompute_kv_cache)

    def _wait(self) -> list[Any]:
        """Waits until a turn or an engine's start has ended, or until an engine has been silent for too long.

        Returns the turns that have ended, of which there may be none.
        """
        waiting = [*self._turns, *self._starting]
        ready = self._ready(waiting)
        patience_s = self._patience_s()
        if not ready:
            ray.wait(waiting, timeout=patience_s)
            ready = self._ready(waiting)
        for start in [ref for ref in ready if ref in self._starting]:
            self._end_start(start)
        return [ref for ref in ready if ref in self._turns]

    def _end_start(self, started: Any) -> None:
        """Marks an engine as alive after its start, or as dead if the start has failed."""
        start = self._starting.pop(started)
        self._actors[start.engine] = start.actor
        answer = self._answer(start.engine, started)
        if answer is DEAD:
            return
        self.capacity, self.pids[start.engine] = answer
        if start.weights is not self._weights:  # new weights came while it started
            self._answer(start.engine, self._load(start.actor))

    def _ready(self, waiting: list[Any]) -> list[Any]:
        """Returns which of the calls `waiting` have ended, and notes the time at which their engines have answered."""
        ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for turn in ready:
            if turn in self._turns:
                self._heard_s[self._turns[turn]] = time.monotonic()
        return ready

    def _patience_s(self) -> float:
        """Kills engines that have been silent for too long. Returns after how many seconds to look again, at least 1."""
        busy = {engine: (self._actors[engine], HANG_S) for engine in self._turns.values()}
        busy |= {start.engine: (start.actor, START_S) for start in self._starting.values()}
        left_s = {engine: self._heard_s[engine] + limit_s - time.monotonic() for engine, (_, limit_s) in busy.items()}
        for engine in [engine for engine, left in left_s.items() if left <= 0]:
            ray.kill(busy[engine][0])
        return max(min(left_s.values()), 1.0)

    def _answer(self, engine: int, ref: Any) -> Any:
        """Waits for an engine's answer. Returns it, or DEAD if the engine has died or does not answer within `HANG_S`."""
        try:
            return ray.get(ref, timeout=HANG_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            actor = self._actors.pop(engine, None)
            if isinstance(error, ray.exceptions.GetTimeoutError) and actor is not None:
                ray.kill(actor)
            self._turns = {turn: e for turn, e in self._turns.items() if e != engine}
            self._deaths[engine] = None
            self._last_error = self._ray.last_error(self.pids.get(engine, 0))[:_LONGEST_ERROR]
            self._untold.append((engine, self._last_error))
            return DEAD
