# SPDX-License-Identifier: Apache-2.0
"""A rollout worker over an engine that steps by itself: a turn is a while, after which it tells what its runs have made."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_specrollout.generation.exchange_messages import Starts
from nemo_specrollout.generation.hosted_engine import text_and_params
from nemo_specrollout.generation.rollout_worker import FEW_RUNS
from nemo_specrollout.generation.shard_request import ShardRequest
from nemo_specrollout.generation.turns import Orders, Progress, Report, Work

# Remembered of stops for runs that are not there: mostly they have ended, seldom they are yet to begin.
MOST_STOPPED = 256
Generate = Callable[[Any, Any, str], AsyncIterator[Any]]
"""`AsyncLLM.generate`: of a prompt, its parameters and an id."""


@dataclass
class _Run:
    """A request in the engine; what it made and was not told yet."""

    name: int
    request: ShardRequest
    began_s: float
    task: asyncio.Task[None] | None = None
    first_s: float | None = None
    ended_s: float | None = None
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_text(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.request.prefix_token_ids)


class StreamWorker:
    """Runs under way in an asynchronous engine, by the names that the coordinator gave them. A run goes on between turns.

    Invariant: a run's tokens are told once each and in order. Belongs to one event loop.
    """

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._runs: dict[int, _Run] = {}
        self._num_runs = 0
        self._not_to_begin: deque[int] = deque(maxlen=MOST_STOPPED)
        self._told_s = time.perf_counter()

    async def turn(self, orders: Orders) -> Report:
        """Stops and begins what `orders` say, lets their seconds pass, or less if nothing is left to do, and reports.

        Raises what the engine raised.
        """
        self._not_to_begin.extend(name for name in orders.stops if name not in self._runs)
        await self._stop(orders.stops)
        self.begin(orders.starts)
        await self._wait(orders.seconds)
        return self._report()

    def begin(self, starts: Starts) -> None:
        """Begins these, now; but none that a turn has stopped before it came."""
        for name, request in starts:
            assert isinstance(request, ShardRequest)
            if name in self._not_to_begin:
                continue
            run = self._runs[name] = _Run(name, request, time.perf_counter())
            run.task = asyncio.create_task(self._consume(run))

    async def forget(self) -> None:
        """Stops all runs."""
        await self._stop(list(self._runs))

    async def _stop(self, names: Sequence[int]) -> None:
        """Who does not listen any more aborts the request."""
        tasks = [run.task for name in names if (run := self._runs.pop(name, None)) is not None and run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _consume(self, run: _Run) -> None:
        text, params = text_and_params(run.request, streams=True)
        self._num_runs += 1
        async for output in self._generate({"prompt_token_ids": text}, params, f"specrollout-{self._num_runs}"):
            (made,) = output.outputs
            tokens = list(made.token_ids)
            if tokens and run.first_s is None:
                run.first_s = time.perf_counter()
            run.tokens += tokens
            run.logprobs += [entry[token].logprob for entry, token in zip(made.logprobs or (), tokens, strict=True)]
            run.finish_reason = made.finish_reason
        run.ended_s = time.perf_counter()

    async def _wait(self, seconds: float) -> None:
        """With few runs until one of them ends: somebody may be racing for it."""
        until, is_first = time.perf_counter() + seconds, asyncio.FIRST_COMPLETED
        while (left := until - time.perf_counter()) > 0:
            going = [run.task for run in self._runs.values() if run.task is not None and not run.task.done()]
            if not going:
                return
            done, _ = await asyncio.wait(going, timeout=left, return_when=is_first)
            if done and len(going) <= FEW_RUNS:
                return

    def _report(self) -> Report:
        before, self._told_s = self._told_s, time.perf_counter()
        work = _work(list(self._runs.values()), before, self._told_s)
        parts, finished = {}, {}
        for run in list(self._runs.values()):
            assert run.task is not None
            if run.task.done():
                run.task.result()
                assert run.finish_reason is not None
                finished[run.name] = run.finish_reason
                del self._runs[run.name]
            if run.tokens:
                parts[run.name] = run.tokens, run.logprobs
                run.tokens, run.logprobs = [], []
        return Report(Progress.of(parts), finished, work)


def _work(runs: list[_Run], since_s: float, now_s: float) -> Work:
    """Of runs that made tokens all the while, and of those whose text was computed in it."""
    decoding = [run for run in runs if run.first_s is not None and run.first_s <= since_s]
    request_s = [(now_s if run.ended_s is None else run.ended_s) - since_s for run in decoding]
    begun = [run for run in runs if run.first_s is not None and run.first_s > since_s]
    prefill_s = max((run.first_s or 0.0 for run in begun), default=0.0) - min((r.began_s for r in begun), default=0.0)
    return Work(
        max(request_s, default=0.0),
        sum(request_s),
        sum(len(run.tokens) for run in decoding),
        prefill_s,
        sum(run.num_text for run in begun),
    )
