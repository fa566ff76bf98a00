# SPDX-License-Identifier: Apache-2.0
"""Measures how fast each draft method decodes the task, for `specrollout-lab ladder`.

Each method has its own engine. The engines work one at a time in short slices, so that other work on the machine disturbs all
methods alike.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.local.rollout_pool import RolloutPool
from lab.local.run_config import RunConfig
from lab.local.statistics import draft_counts
from lab.local.tasks import Task
from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.installed.versions import this_machine
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK, SIZES
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedRow, SpeedTableFile
from nemo_specrollout.stragglers.turn_engine import FEW_ATTEMPTS
from nemo_specrollout.stragglers.turns import TurnOrders, TurnResult, TurnWork

WARM_UP_ROUNDS = 1
"""Number of first rounds that are not measured, because kernels are compiled and draft boards learn in them."""
_TURN_S = 0.1
"""Seconds of an engine's turn, after which new requests take the places of those that have ended. With few requests, a turn
ends when the first request ends."""
_PROMPTS_APART = 1_000_000
"""Each batch size takes its prompts from a place of its own in the task's list. This is the distance between two such places,
and larger than the number of prompts that a batch size uses."""

Method = tuple[str, ...]


def methods_to_measure(block: SpecrolloutConfig) -> list[Method]:
    """Returns the drafter types of each draft method that is worth measuring.

    These methods are each drafter alone, all drafters that can share an engine, the entries of `fastest_of_n.methods`, and
    plain decoding, which has no drafter.
    """
    types = [d.type for d in block.drafters]
    alone: list[Method] = [(name,) for name in types]
    with_weights = [name for name in types if name in MODEL_DRAFTERS]
    together: list[Method] = [
        tuple(name for name in types if name not in with_weights or name == kept) for kept in with_weights or [""]
    ]
    of_engines: list[Method] = [tuple(d.type for d in drafters) for drafters in block.drafters_of_engines]
    of_engines = [m for m in of_engines if len(set(m) & set(with_weights)) <= 1]
    return list(dict.fromkeys([*alone, *together, *of_engines, ()]))


def batches_up_to(most: int) -> list[int]:
    """Returns the batch sizes to measure, in ascending order.

    The last one is the largest size in `SIZES` that is at most `most`. Before it come all smaller powers of two.
    """
    largest = max(size for size in SIZES.tolist() if size <= max(most, 1))
    return sorted({2**i for i in range(int(math.log2(largest)) + 1)} | {largest})


@dataclass
class Stream:
    """The requests that an engine decodes for one batch size, of which `batch` are running at a time.

    A slice continues the requests of the previous slice from their tokens so far, so responses of all lengths are measured.

    Invariant: no request comes twice, because drafters would remember its response.
    """

    batch: int
    requests: Iterator[tuple[int, RolloutRequest]]
    under_way: dict[int, RolloutRequest] = field(default_factory=dict)
    """Running requests, with their tokens so far as the prefix."""

    def fill(self) -> list[tuple[int, RolloutRequest]]:
        """Starts new requests until `batch` are running. Returns the new ones, each with its key."""
        new = list(itertools.islice(self.requests, self.batch - len(self.under_way)))
        self.under_way.update(new)
        return new

    def take(self, result: TurnResult) -> None:
        """Adds the tokens of a turn to their requests, and removes the requests that have ended."""
        for name, (tokens, _) in result.parts.items():
            request = self.under_way[name]
            self.under_way[name] = replace(request, prefix_token_ids=(*request.prefix_token_ids, *tokens))
        for name in result.finished:
            del self.under_way[name]


class SpeedTableBench:
    """Measures the decode speed of each draft method. Owns an engine for each method, the requests, and the measurements."""

    def __init__(self, config: RunConfig, methods: Sequence[Method], batches: Sequence[int], task: Task) -> None:
        """Starts the engines. Raises ConfigError for what vLLM refuses."""
        self.config = config
        self.batches = list(batches)
        generation = config.policy.generation
        tail = FastestOfNConfig(methods=tuple(methods))
        block = replace(generation.specrollout, fastest_of_n=tail, draft_refresh=None)
        model = Path(config.policy.model_name)
        self.pool = RolloutPool(model, replace(generation, specrollout=block), config.grpo.seed, len(methods))
        self._engines = range(len(methods))
        pairs = list(itertools.product(self._engines, self.batches))
        self._streams = {(e, b): Stream(b, _requests(config, self.batches.index(b), task)) for e, b in pairs}
        self._decoded = {pair: (0, 0.0) for pair in pairs}
        """Number of decoded tokens and the seconds of all requests for them, by engine and batch size."""
        self._prefilled = 0, 0.0

    def measure(self, num_rounds: int, slice_s: float, on_slice: Callable[[str], object]) -> None:
        """Measures each draft method and batch size for `slice_s` seconds per round.

        After each slice, it calls `on_slice` with the slice's name.
        """
        self._slices(0, WARM_UP_ROUNDS, slice_s, on_slice)
        self._decoded = {pair: (0, 0.0) for pair in self._decoded}
        self._prefilled = (0, 0.0)
        self._before = self.pool.ask_each("counters")
        self._slices(WARM_UP_ROUNDS, num_rounds, slice_s, on_slice)
        self._after = self.pool.ask_each("counters")

    def ladder(self, task: str) -> SpeedTableFile:
        """Returns the measurements as a decode-speed table, with rows for `task` and the same rows for any task.

        A local run has only one task, so the two do not differ.
        """
        own = [self._rung(task, engine) for engine in self._engines]
        own.sort(key=lambda rung: -rung.tokens_per_s[0])
        rungs = (*own, *(replace(rung, task=ANY_TASK) for rung in own))
        num_prefilled, prefill_s = self._prefilled
        return SpeedTableFile(this_machine(), self.config.policy.model_name, prefill_s / num_prefilled, rungs)

    def close(self) -> None:
        """Ends the engines."""
        self.pool.close()

    def _rung(self, task: str, engine: int) -> SpeedRow:
        sums = [self._decoded[engine, batch] for batch in self.batches]
        speeds = tuple(max(tokens, 1) / seconds for tokens, seconds in sums)
        verified, accepted = draft_counts(self._before[engine], self._after[engine])
        name = self.pool.method_name(engine)
        weights_s = tuple(seconds for _, seconds in sums)
        return SpeedRow(task, name, tuple(self.batches), speeds, weights_s, accepted / verified if verified else 0.0)

    def _slices(self, first: int, count: int, slice_s: float, on_slice: Callable[[str], object]) -> None:
        """Measures all methods and batch sizes once in each of `count` rounds, which are numbered from `first` on.

        Each round begins with another method.
        """
        for number, batch in itertools.product(range(first, first + count), self.batches):
            for i in self._engines:
                engine = (i + number) % len(self._engines)
                self._slice(engine, batch, slice_s)
                on_slice(f"{self.pool.method_name(engine)}, batch {batch}")

    def _slice(self, engine: int, batch: int, slice_s: float) -> None:
        """Measures one slice. Its first turn only computes the KV cache of the requests' texts, so it measures prefill."""
        stream = self._streams[engine, batch]
        stream.fill()
        opening = self._turn(engine, stream, TurnOrders(tuple(stream.under_way.items())))
        num_prefilled, prefill_s = self._prefilled
        self._prefilled = num_prefilled + opening.num_prefilled, prefill_s + opening.prefill_s
        left_s = slice_s
        while left_s > 0.0:
            turn_s = left_s if batch <= FEW_ATTEMPTS else min(_TURN_S, left_s)
            work = self._turn(engine, stream, TurnOrders(tuple(stream.fill()), seconds=turn_s))
            num_tokens, seconds = self._decoded[engine, batch]
            self._decoded[engine, batch] = num_tokens + work.num_tokens, seconds + work.request_s
            left_s -= work.decode_s
        self._turn(engine, stream, TurnOrders(stops=tuple(stream.under_way)))

    def _turn(self, engine: int, stream: Stream, orders: TurnOrders) -> TurnWork:
        self.pool.send(engine, orders)
        ((_, result),) = self.pool.results()
        if result is None:
            method = self.pool.method_name(engine)
            raise RuntimeError(f"the engine that drafts by {method}: {' '.join(self.pool.take_deaths())}")
        stream.take(result)
        return result.work


def _requests(config: RunConfig, number: int, task: Task) -> Iterator[tuple[int, RolloutRequest]]:
    """Yields requests for one batch size without end, each with a key of its own. `number` is the index of the batch size."""
    num_samples = config.grpo.num_generations_per_prompt
    for index in itertools.count(number * _PROMPTS_APART):
        ids: Any = task.encode(task.problems(config.grpo.seed, 1, index)[0])
        for sample in range(num_samples):
            yield index * num_samples + sample, RolloutRequest(ids, index, sample)
