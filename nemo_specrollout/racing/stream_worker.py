# SPDX-License-Identifier: Apache-2.0
"""A rollout worker over an engine that steps by itself: a turn is a while, after which it tells what its runs have made."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_specrollout.generation.compat import REFUSALS
from nemo_specrollout.generation.hosted_engine import text_and_params
from nemo_specrollout.generation.shard_request import ShardRequest
from nemo_specrollout.racing.exchange_messages import Starts
from nemo_specrollout.racing.rollout_worker import FEW_RUNS, num_text_tokens
from nemo_specrollout.racing.timeline import covered
from nemo_specrollout.racing.turns import Orders, Progress, Report, Work

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
    waits: bool
    """For a place in the engine, which is full: when its text is computed says nothing."""

    task: asyncio.Task[None] | None = None
    first_s: float | None = None
    ended_s: float | None = None
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class StreamWorker:
    """Runs under way in an asynchronous engine, by the names that the coordinator gave them. A run goes on between turns.

    Invariant: a run's tokens are told once each and in order. Belongs to one event loop.
    """

    def __init__(self, generate: Generate, capacity: int) -> None:
        """`capacity`: requests that the engine has places for."""
        self._generate, self._capacity = generate, capacity
        self._runs: dict[int, _Run] = {}
        self._num_runs = 0
        self._not_to_begin: deque[int] = deque(maxlen=MOST_STOPPED)
        self._told_s = time.perf_counter()

    async def turn(self, orders: Orders) -> Report:
        """Stops and begins what `orders` say, lets their seconds pass, or less if nothing is left to do, and reports.

        Raises what the engine raised; but a request that vLLM refuses is reported as refused.
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
            waits = len(self._runs) >= self._capacity
            run = self._runs[name] = _Run(name, request, time.perf_counter(), waits)
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
        decoding = [run for run in self._runs.values() if run.first_s is not None and run.first_s <= before]
        work = _work(decoding, list(self._runs.values()), before, self._told_s)
        steady = tuple(run.name for run in decoding if run.ended_s is None)
        parts, finished, refused = {}, {}, []
        for run in list(self._runs.values()):
            assert run.task is not None
            if run.task.done():
                del self._runs[run.name]
                if run.first_s is None and isinstance(run.task.exception(), REFUSALS):
                    refused.append(run.name)
                    continue
                run.task.result()
                assert run.finish_reason is not None
                finished[run.name] = run.finish_reason
            if run.tokens or run.name in finished:
                parts[run.name] = run.tokens, run.logprobs
                run.tokens, run.logprobs = [], []
        return Report(Progress.of(parts), finished, work, steady=steady, refused=tuple(refused))


def _work(decoding: list[_Run], runs: list[_Run], since_s: float, now_s: float) -> Work:
    """Of runs that made tokens all the while, and of those whose text was computed in it."""
    request_s = [(now_s if run.ended_s is None else run.ended_s) - since_s for run in decoding]
    begun = [(r, r.first_s) for r in runs if r.first_s is not None and r.first_s > since_s and not r.waits]
    return Work(
        max(request_s, default=0.0),
        sum(request_s),
        sum(len(run.tokens) for run in decoding),
        covered([(run.began_s, first_s) for run, first_s in begun]),
        num_text_tokens(run.request for run, _ in begun),
    )
