# SPDX-License-Identifier: Apache-2.0
"""Measures how fast draft methods decode the task, for `nemo-specrollout ladder`: each in a rollout worker as a run has it,
one of them at work at a time, in short rounds, so that what disturbs the machine disturbs all alike.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.config.run_config import RunConfig
from nemo_specrollout.config.versions import this_machine
from nemo_specrollout.generation.requests import RolloutRequest
from nemo_specrollout.local.statistics import draft_counts
from nemo_specrollout.local.tasks import Task
from nemo_specrollout.racing.rollout_pool import RolloutPool
from nemo_specrollout.racing.turn_engine import FEW_ATTEMPTS
from nemo_specrollout.racing.turns import Orders, TurnResult, Work
from nemo_specrollout.scheduling.racing.draft_ladder import ANY_TASK, SIZES, LadderFile, Rung

WARM_UP_ROUNDS = 1
"""Rounds that do not count: kernels compile, draft boards learn."""
# After a turn what has ended is replaced, so that the batch stays what it is; a small one ends its turns by itself.
_TURN_S = 0.1
# Prompts of the task's list between those of one batch size and of the next: more than are ever used.
_PROMPTS_APART = 1_000_000

Method = tuple[str, ...]


def methods_of(block: SpecrolloutConfig) -> list[Method]:
    """The types of the drafters of each method: each drafter alone, all that may share an engine, those of
    `fastest_of_n.methods`, and none."""
    types = [d.type for d in block.drafters]
    alone: list[Method] = [(name,) for name in types]
    with_weights = [name for name in types if name in MODEL_DRAFTERS]
    together: list[Method] = [
        tuple(name for name in types if name not in with_weights or name == kept) for kept in with_weights or [""]
    ]
    of_workers: list[Method] = [tuple(d.type for d in drafters) for drafters in block.drafters_of_workers]
    of_workers = [m for m in of_workers if len(set(m) & set(with_weights)) <= 1]
    return list(dict.fromkeys([*alone, *together, *of_workers, ()]))


def batches_up_to(most: int) -> list[int]:
    """Powers of two, and the largest batch size that has figures of its own and is no larger than `most`."""
    largest = max(size for size in SIZES.tolist() if size <= max(most, 1))
    return sorted({2**i for i in range(int(math.log2(largest)) + 1)} | {largest})


@dataclass
class Stream:
    """A run's requests in their order, siblings one after another, `batch` of them under way at a time, for one method.

    Owns those under way, each with what has been made of its response: after a pause they go on from there, so that responses
    are met at every length. Invariant: no request comes twice.
    """

    batch: int
    requests: Iterator[tuple[int, RolloutRequest]]
    under_way: dict[int, RolloutRequest] = field(default_factory=dict)

    def fill(self) -> list[tuple[int, RolloutRequest]]:
        """New ones, for the places that are free."""
        new = list(itertools.islice(self.requests, self.batch - len(self.under_way)))
        self.under_way.update(new)
        return new

    def take(self, result: TurnResult) -> None:
        """What a turn has made."""
        for name, (tokens, _) in result.progress.parts().items():
            request = self.under_way[name]
            self.under_way[name] = replace(request, prefix_token_ids=(*request.prefix_token_ids, *tokens))
        for name in result.finished:
            del self.under_way[name]


@dataclass
class _Sum:
    """Tokens, and the seconds that they took."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = self.tokens + num_tokens, self.seconds + seconds


class LadderBench:
    """Owns a rollout worker for each method, their streams of requests, and what was measured."""

    def __init__(self, config: RunConfig, methods: Sequence[Method], batches: Sequence[int], task: Task) -> None:
        """Starts the workers. Raises ConfigError."""
        self.config, self.batches = config, list(batches)
        generation = config.policy.generation
        tail = FastestOfNConfig(methods=tuple(methods))
        block = replace(generation.specrollout, fastest_of_n=tail, draft_refresh=None)
        model = Path(config.policy.model_name)
        self.pool = RolloutPool(model, replace(generation, specrollout=block), config.grpo.seed, len(methods))
        self._workers = range(len(methods))
        pairs = list(itertools.product(self._workers, self.batches))
        self._streams = {(w, b): Stream(b, _requests(config, self.batches.index(b), task)) for w, b in pairs}
        self._decoded = {pair: _Sum() for pair in pairs}
        self._prefilled = _Sum()

    def measure(self, num_rounds: int, slice_s: float, on_slice: Callable[[str], object]) -> None:
        """In every round a slice of `slice_s` seconds of each method at each batch size; `on_slice` is told which."""
        self._slices(0, WARM_UP_ROUNDS, slice_s, on_slice)
        self._decoded, self._prefilled = {pair: _Sum() for pair in self._decoded}, _Sum()
        self._before = self.pool.ask_each("stats", 1 << 60)
        self._slices(WARM_UP_ROUNDS, num_rounds, slice_s, on_slice)
        self._after = self.pool.ask_each("stats", 1 << 60)

    def ladder(self, task: str) -> LadderFile:
        """What was measured, as that task's and as any's: the local runner has one."""
        own = [self._rung(task, worker) for worker in self._workers]
        own.sort(key=lambda rung: -rung.tokens_per_s[0])
        rungs = (*own, *(replace(rung, task=ANY_TASK) for rung in own))
        per_token_s = self._prefilled.seconds / self._prefilled.tokens
        return LadderFile(this_machine(), self.config.policy.model_name, per_token_s, rungs)

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()

    def _rung(self, task: str, worker: int) -> Rung:
        sums = [self._decoded[worker, batch] for batch in self.batches]
        paces = tuple(max(s.tokens, 1) / s.seconds for s in sums)
        verified, accepted = draft_counts(self._before[worker], self._after[worker])
        name = self.pool.method_name(worker)
        seconds = tuple(s.seconds for s in sums)
        return Rung(task, name, tuple(self.batches), paces, seconds, accepted / verified if verified else 0.0)

    def _slices(self, first: int, count: int, slice_s: float, on_slice: Callable[[str], object]) -> None:
        """Whose turn is first changes from round to round."""
        for number, batch in itertools.product(range(first, first + count), self.batches):
            for i in self._workers:
                worker = (i + number) % len(self._workers)
                self._slice(worker, batch, slice_s)
                on_slice(f"{self.pool.method_name(worker)}, batch {batch}")

    def _slice(self, worker: int, batch: int, slice_s: float) -> None:
        """The seconds of opening it are those of computing texts: nothing else is under way then."""
        stream, decoded = self._streams[worker, batch], self._decoded[worker, batch]
        stream.fill()
        opening = self._turn(worker, stream, Orders(tuple(stream.under_way.items())))
        self._prefilled.add(opening.num_prefilled, opening.prefill_s)
        left_s = slice_s
        while left_s > 0.0:
            turn_s = left_s if batch <= FEW_ATTEMPTS else min(_TURN_S, left_s)
            work = self._turn(worker, stream, Orders(tuple(stream.fill()), seconds=turn_s))
            decoded.add(work.num_tokens, work.request_s)
            left_s -= work.decode_s
        self._turn(worker, stream, Orders(stops=tuple(stream.under_way)))

    def _turn(self, worker: int, stream: Stream, orders: Orders) -> Work:
        self.pool.send(worker, orders)
        ((_, result),) = self.pool.results()
        if result is None:
            method = self.pool.method_name(worker)
            raise RuntimeError(f"the worker that drafts by {method}: {' '.join(self.pool.take_deaths())}")
        stream.take(result)
        return result.work


def _requests(config: RunConfig, number: int, task: Task) -> Iterator[tuple[int, RolloutRequest]]:
    """The endless list of a batch size's requests, each under a number of its own."""
    num_samples = config.grpo.num_generations_per_prompt
    for index in itertools.count(number * _PROMPTS_APART):
        ids: Any = task.encode(task.problems(config.grpo.seed, 1, index)[0])
        for sample in range(num_samples):
            yield index * num_samples + sample, RolloutRequest(ids, index, sample)
