# SPDX-License-Identifier: Apache-2.0
"""Rollout workers on this machine: an engine in each of several Ray actors of one core."""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nemo_specrollout.config.run_config import GenerationConfig
from nemo_specrollout.generation.engine import RolloutEngine
from nemo_specrollout.racing.private_ray import OwnRay, ray
from nemo_specrollout.racing.rollout_worker import RolloutWorker
from nemo_specrollout.racing.turns import Orders, Report
from nemo_specrollout.racing.worker_blocks import method_name, worker_blocks

# A worker that ends no turn for so long is killed, and one that is not there so long after its start; how often one may be
# started again.
HANG_S, START_S, MOST_RESTARTS = 300.0, 1800.0, 3
_LONGEST_WORDS = 300
ONE_CORE = {"env_vars": {"OMP_NUM_THREADS": "1"}}
GONE = object()
"""The answer of a worker that has died."""

Weights = tuple[dict[str, torch.Tensor], int]
"""Tensors by Hugging Face names, and the version of the policy."""


@dataclass(frozen=True)
class _Start:
    """A worker that is being started, and the weights that it starts with."""

    worker: int
    actor: Any
    weights: Any


class RolloutActor:
    """What runs in an actor's process: an engine and the worker that takes its turns."""

    def start(self, model: str, generation: GenerationConfig, seed: int, weights: Weights | None) -> tuple[int, int]:
        """Starts the engine; how many requests it may have at a time, and its process. Raises ConfigError for what vLLM
        refuses."""
        self._engine = RolloutEngine(Path(model), generation, seed)
        self._worker = RolloutWorker(self._engine)
        if weights is not None:
            self.load_weights(weights, recompute_kv_cache=False)
        return self._engine.max_num_seqs, os.getpid()

    def turn(self, orders: Orders) -> Report:
        return self._worker.turn(orders)

    def load_weights(self, weights: Weights, recompute_kv_cache: bool) -> None:
        tensors, version = weights
        self._worker.load_weights(tensors.items(), version, recompute_kv_cache=recompute_kv_cache)

    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Any other method of the engine."""
        return getattr(self._engine, method)(*arguments)


class RolloutPool:
    """The workers of a run: Ray's, if none runs yet, the actors, and the weights that a new one starts with are its own.

    A worker is alive, or dead, or being revived. Its death is reported once, whoever notices it. Until then it
    takes no orders, even if it is alive again. Example: `Coordinator(pool, policy, ladder, lengths).roll_out(requests)`.
    """

    def __init__(
        self, model: Path, generation: GenerationConfig, seed: int, num_workers: int, *, recompute_kv_cache: bool = True
    ) -> None:
        """Starts Ray, unless one runs, and `num_workers` workers. Raises ConfigError for what vLLM refuses.

        `recompute_kv_cache`: what new weights amid requests mean for what those have so far (`RolloutWorker.load_weights`).
        """
        blocks = worker_blocks(generation.specrollout, num_workers)
        names = [method_name(block) for block in blocks]
        self.method_names = list(dict.fromkeys(names))
        self.methods = [self.method_names.index(name) for name in names]
        self.num_restarts = [0] * num_workers
        self._recompute_kv_cache = recompute_kv_cache
        self._orders = [(str(model), replace(generation, specrollout=block), seed) for block in blocks]
        self._actors: dict[int, Any] = {}
        self._starting: dict[Any, _Start] = {}
        self._turns: dict[Any, int] = {}
        self._deaths: dict[int, None] = {}  # that were not reported to the coordinator
        self._untold: list[tuple[int, str]] = []
        """Dead workers that `take_deaths` has not told of, each with its last words."""
        self._last_words = ""
        self.pids: dict[int, int] = {}
        """The process of each worker, of one that died the last."""
        self._heard_s = [0.0] * num_workers
        self._weights: Any = None
        self.capacity = 0
        self._ray = OwnRay()
        try:
            for worker in range(num_workers):
                self._start(worker)
            self._wait_for_starts()
            self._deaths.clear()
        except BaseException:
            self.close()
            raise

    def is_alive(self, worker: int) -> bool:
        """Whether it takes orders."""
        return worker in self._actors and worker not in self._deaths

    def send(self, worker: int, orders: Orders) -> None:
        """Asks for a turn; a worker takes its turns, and new weights, in order."""
        if not self.num_turns(worker):
            self._heard_s[worker] = time.monotonic()
        self._turns[self._actors[worker].turn.remote(orders)] = worker

    def num_turns(self, worker: int) -> int:
        """Turns that it was asked for and has not reported."""
        return sum(w == worker for w in self._turns.values())

    def reports(self) -> list[tuple[int, Report | None]]:
        """Waits until a turn ends, or a worker that was being revived is alive, and takes all that have; None, once, of a
        worker that has died, without waiting if that is known by now."""
        ready = [] if self._deaths else self._wait()
        answers = [(self._turns[turn], self._answer(self._turns[turn], turn)) for turn in ready if turn in self._turns]
        for turn in ready:
            self._turns.pop(turn, None)
        deaths, self._deaths = self._deaths, {}
        return [(w, answer) for w, answer in answers if answer is not GONE] + [(w, None) for w in deaths]

    def finish_turns(self) -> None:
        """Waits for the turns that are left of an earlier rollout; what they report is dropped."""
        while self._turns:
            self.reports()

    def revive(self) -> None:
        """Begins to start dead workers again, with the newest weights, but none that has died too often. Raises RuntimeError
        if that leaves no worker."""
        being_revived = {start.worker for start in self._starting.values()}
        for worker in set(range(len(self.methods))) - self._actors.keys() - being_revived:
            if self.num_restarts[worker] < MOST_RESTARTS:
                self.num_restarts[worker] += 1
                self._start(worker)
        if not self._actors and not self._starting:
            raise RuntimeError(
                f"all rollout workers have died, each {MOST_RESTARTS + 1} times; the last words of one: "
                f"{self._last_words or 'none'}"
            )

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Gives every worker new weights, by Hugging Face names, after the turns that it was asked for; waits for it.

        A worker that is being revived is not waited for: it gets them before its first turn.
        """
        self._weights = ray.put(({name: tensor.contiguous() for name, tensor in tensors}, policy_version))
        loads = {w: a.load_weights.remote(self._weights, self._recompute_kv_cache) for w, a in self._actors.items()}
        for worker, load in loads.items():
            self._answer(worker, load)

    def ask(self, worker: int, method: str, *arguments: Any) -> Any:
        """What a method of the engine of a worker that is alive returns, or GONE."""
        return self._answer(worker, self._actors[worker].ask.remote(method, arguments))

    def ask_each(self, method: str, *arguments: Any, drafting_by: str | None = None) -> dict[int, Any]:
        """What a method of the engine returns, of each worker that is alive, or of those that have a drafter of that type."""
        asked = {
            worker: actor.ask.remote(method, arguments)
            for worker, actor in sorted(self._actors.items())
            if drafting_by in (None, *self.method_names[self.methods[worker]].split("+"))
        }
        return {worker: answer for worker, ref in asked.items() if (answer := self._answer(worker, ref)) is not GONE}

    def take_deaths(self) -> list[str]:
        """A sentence for each death of a worker, or of a drafter process of one, since last asked."""
        deaths = [sentence for sentences in self.ask_each("take_deaths").values() for sentence in sentences]
        untold, self._untold = self._untold, []
        return deaths + [
            f"rollout worker {worker} died{f' ({words})' if words else ''}; others make its requests, and it "
            + (
                f"is started again (at most {MOST_RESTARTS} times)"
                if self.num_restarts[worker] < MOST_RESTARTS
                else "has died too often to be started again"
            )
            for worker, words in untold
        ]

    def close(self) -> None:
        """Ends the workers, and Ray if it is ours."""
        for actor in (*self._actors.values(), *(start.actor for start in self._starting.values())):
            ray.kill(actor)
        self._actors, self._starting, self._turns = {}, {}, {}
        self._ray.stop()

    def _start(self, worker: int) -> None:
        """Begins to start a worker. It asks Ray for no CPU: if there are more workers than cores, each is slower, and none
        waits for ever for a place."""
        actor: Any = ray.remote(RolloutActor).options(num_cpus=0, runtime_env=ONE_CORE).remote()
        started = actor.start.remote(*self._orders[worker], self._weights)
        self._starting[started] = _Start(worker, actor, self._weights)
        self._heard_s[worker] = time.monotonic()

    def _wait(self) -> list[Any]:
        """Turns that have ended, at least one unless a worker is alive now that was not, or is to be killed."""
        waiting = [*self._turns, *self._starting]
        ready = self._ready(waiting)
        patience_s = self._patience_s()
        if not ready:
            ray.wait(waiting, timeout=patience_s)
            ready = self._ready(waiting)
        for start in [ref for ref in ready if ref in self._starting]:
            begun = self._starting.pop(start)
            self._actors[begun.worker] = begun.actor
            answer = self._answer(begun.worker, start)
            if answer is GONE:
                continue
            self.capacity, self.pids[begun.worker] = answer
            if begun.weights is not self._weights:  # new ones came while it started
                self._answer(begun.worker, begun.actor.load_weights.remote(self._weights, self._recompute_kv_cache))
        return [ref for ref in ready if ref in self._turns]

    def _ready(self, waiting: list[Any]) -> list[Any]:
        """Those of them that have ended, whose workers are heard of by that."""
        ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for turn in ready:
            if turn in self._turns:
                self._heard_s[self._turns[turn]] = time.monotonic()
        return ready

    def _patience_s(self) -> float:
        """Until somebody will have been silent for too long; kills who has been."""
        at_work = {worker: (self._actors[worker], HANG_S) for worker in self._turns.values()}
        at_work |= {start.worker: (start.actor, START_S) for start in self._starting.values()}
        left_s = {worker: self._heard_s[worker] + most_s - time.monotonic() for worker, (_, most_s) in at_work.items()}
        for worker in [worker for worker, left in left_s.items() if left <= 0]:
            ray.kill(at_work[worker][0])
        return max(min(left_s.values()), 1.0)

    def _wait_for_starts(self) -> None:
        while self._starting:
            ray.wait(list(self._starting), timeout=self._patience_s())
            self._wait()
            self.revive()

    def _answer(self, worker: int, ref: Any) -> Any:
        """Returns a worker's answer, or GONE if it has died. Kills a worker that does not answer within `HANG_S`."""
        try:
            return ray.get(ref, timeout=HANG_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            actor = self._actors.pop(worker, None)
            if isinstance(error, ray.exceptions.GetTimeoutError) and actor is not None:
                ray.kill(actor)
            self._turns = {turn: w for turn, w in self._turns.items() if w != worker}
            self._deaths[worker] = None
            self._last_words = self._ray.last_words(self.pids.get(worker, 0))[:_LONGEST_WORDS]
            self._untold.append((worker, self._last_words))
            return GONE
