# SPDX-License-Identifier: Apache-2.0
"""Rollout workers on this machine: an engine in each of several Ray actors of one core."""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.run import GenerationConfig
from nemo_specrollout.generation.engine import RolloutEngine
from nemo_specrollout.generation.rollout_worker import RolloutWorker
from nemo_specrollout.generation.turns import Orders, Report

# Workers that end no turn for so long are killed; how often one may be started again.
HANG_S, MOST_RESTARTS = 300.0, 3
_RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_OBJECT_STORE_BYTES = 512 << 20
GONE = object()
"""The answer of a worker that has died."""


class RolloutActor:
    """What runs in an actor's process: an engine and the worker that takes its turns."""

    def start(
        self, model: str, generation: GenerationConfig, seed: int, weights: dict[str, torch.Tensor] | None
    ) -> int:
        """Starts the engine; how many requests it may have at a time. Raises ConfigError for what vLLM refuses."""
        self._engine = RolloutEngine(Path(model), generation, seed)
        if weights is not None:
            self._engine.load_weights(weights.items())
        self._worker = RolloutWorker(self._engine)
        return self._engine.max_num_seqs

    def pid(self) -> int:
        return os.getpid()

    def turn(self, orders: Orders) -> Report:
        return self._worker.turn(orders)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self._engine.load_weights(weights.items())

    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Any other method of the engine."""
        return getattr(self._engine, method)(*arguments)


class RolloutPool:
    """The workers of a run: Ray's, if none runs yet, the actors, and the weights that a new one starts with are its own.

    A worker is alive, or dead until `revive`. Example: `Coordinator(pool, policy, ladder, lengths).roll_out(requests)`.
    """

    def __init__(self, model: Path, generation: GenerationConfig, seed: int, num_workers: int) -> None:
        """Starts Ray on the loopback and so many workers. Raises ConfigError for what vLLM refuses."""
        blocks = worker_blocks(generation.specrollout, num_workers)
        names = [method_name(block) for block in blocks]
        self.method_names = list(dict.fromkeys(names))
        self.methods = [self.method_names.index(name) for name in names]
        self.num_restarts = [0] * num_workers
        self._orders = [(str(model), replace(generation, specrollout=block), seed) for block in blocks]
        self._actors: dict[int, Any] = {}
        self._turns: dict[Any, int] = {}
        self._weights: Any = None
        self._owns_ray = _start_ray(num_workers)
        try:
            self.capacity = min(self._start(range(num_workers)))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[int, int]:
        """The process of each worker that is alive."""
        return {w: ray.get(actor.pid.remote()) for w, actor in self._actors.items()}

    def is_alive(self, worker: int) -> bool:
        """Whether it takes orders."""
        return worker in self._actors

    def send(self, worker: int, orders: Orders) -> None:
        """Asks for a turn; a worker takes its turns in order."""
        self._turns[self._actors[worker].turn.remote(orders)] = worker

    def reports(self) -> list[tuple[int, Report | None]]:
        """Waits until a turn ends, then takes all that have; None, once, of a worker that has died."""
        ready, _ = ray.wait(list(self._turns), timeout=HANG_S)
        if not ready:
            for worker in set(self._turns.values()):
                ray.kill(self._actors[worker])
            ready, _ = ray.wait(list(self._turns))
        ready, _ = ray.wait(list(self._turns), num_returns=len(self._turns), timeout=0)
        return [self._report_of(turn) for turn in ready if turn in self._turns]

    def num_turns(self, worker: int) -> int:
        """Turns that it was asked for and has not reported."""
        return sum(w == worker for w in self._turns.values())

    def finish_turns(self) -> None:
        """Waits for the turns that are left of an earlier rollout; nobody wants to know what they report."""
        while self._turns:
            self.reports()

    def _report_of(self, turn: Any) -> tuple[int, Report | None]:
        worker = self._turns.pop(turn)
        report = self._answer(worker, turn)
        return worker, None if report is GONE else report

    def _answer(self, worker: int, ref: Any) -> Any:
        """What a worker says, or that it is gone."""
        try:
            return ray.get(ref)
        except RayActorError:
            self._actors.pop(worker, None)
            self._turns = {turn: w for turn, w in self._turns.items() if w != worker}
            return GONE

    def revive(self) -> None:
        """Starts dead workers again, with the newest weights. Raises RuntimeError if one dies too often."""
        dead = [w for w in range(len(self.methods)) if w not in self._actors]
        for worker in dead:
            self.num_restarts[worker] += 1
            if self.num_restarts[worker] > MOST_RESTARTS:
                raise RuntimeError(
                    f"rollout worker {worker} has died {self.num_restarts[worker]} times; its log is Ray's"
                )
        self._start(dead)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces the weights of all workers, by Hugging Face names, after the turns that they still have."""
        self._weights = ray.put({name: tensor.contiguous() for name, tensor in tensors})
        for worker, load in [(w, actor.load_weights.remote(self._weights)) for w, actor in self._actors.items()]:
            self._answer(worker, load)

    def ask(self, worker: int, method: str, *arguments: Any) -> Any:
        """What a method of a worker's engine returns."""
        return ray.get(self._actors[worker].ask.remote(method, arguments))

    def ask_each(self, method: str, *arguments: Any, drafting_by: str | None = None) -> dict[int, Any]:
        """What a method of the engine returns, of each worker that is alive, or of those that have a drafter of that type."""
        asked = {
            worker: actor.ask.remote(method, arguments)
            for worker, actor in sorted(self._actors.items())
            if drafting_by in (None, *self.method_names[self.methods[worker]].split("+"))
        }
        return {worker: answer for worker, ref in asked.items() if (answer := self._answer(worker, ref)) is not GONE}

    def close(self) -> None:
        """Ends the workers, and Ray if it is ours."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
        if self._owns_ray:
            ray.shutdown()

    def _start(self, workers: Iterable[int]) -> list[int]:
        """Starts engines side by side; how many requests each may have. They ask Ray for no CPU: who has more workers than
        cores is to wait for steps, not for ever for a place."""
        actor_class = ray.remote(RolloutActor)
        self._actors |= {w: actor_class.options(num_cpus=0).remote() for w in workers}
        return ray.get([self._actors[w].start.remote(*self._orders[w], self._weights) for w in workers])


def worker_blocks(block: SpecrolloutConfig, num_workers: int) -> list[SpecrolloutConfig]:
    """The block of each worker's engine: the drafters that `fastest_of_n.methods` gives it, or all."""
    kinds = block.drafters_of_workers
    return [replace(block, fastest_of_n=None, drafters=kinds[w % len(kinds)]) for w in range(num_workers)]


def method_name(block: SpecrolloutConfig) -> str:
    """How the ladder calls the drafters of an engine."""
    return "+".join(d.type for d in block.drafters) or "plain"


def _start_ray(num_cpus: int) -> bool:
    """Starts Ray in this session, reachable from this machine alone; whether there was none."""
    if ray.is_initialized():
        return False
    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
    )
    return True
