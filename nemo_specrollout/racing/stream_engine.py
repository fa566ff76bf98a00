# SPDX-License-Identifier: Apache-2.0
"""An asynchronous engine that works in turns: it steps by itself, and a turn is a while after which it reports."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_specrollout.generation.requests import ShardRequest
from nemo_specrollout.generation.vllm_requests import REFUSALS, text_and_params
from nemo_specrollout.racing.timeline import covered
from nemo_specrollout.racing.turn_engine import FEW_ATTEMPTS, num_text_tokens
from nemo_specrollout.racing.turns import Orders, Starts, TurnResult, Work

MOST_EARLY_STOPS = 256
"""Remembered stops of unknown attempts. Most of these attempts have ended, a few are still to begin."""
Generate = Callable[[Any, Any, str], AsyncIterator[Any]]
"""`AsyncLLM.generate`: prompt, sampling parameters and request id to vLLM's outputs."""


@dataclass
class _Attempt:
    """A request in the engine, with the tokens that were not reported yet."""

    name: int
    request: ShardRequest
    began_s: float
    waits: bool
    """Whether the engine was full when the attempt began. Then its first token says nothing about prefill."""
    task: asyncio.Task[None] | None = None
    first_s: float | None = None
    """Time of the first token."""
    ended_s: float | None = None
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class StreamEngine:
    """Wraps an `AsyncLLM`. Owns the attempts under way, which go on between turns.

    Invariant: each token of an attempt is reported once and in order. Belongs to one event loop.
    """

    def __init__(self, generate: Generate, capacity: int) -> None:
        """`capacity` is the number of requests that the engine decodes at a time."""
        self._generate, self._capacity = generate, capacity
        self._attempts: dict[int, _Attempt] = {}
        self._num_requests = 0
        self._early_stops: deque[int] = deque(maxlen=MOST_EARLY_STOPS)
        self._reported_s = time.perf_counter()

    async def turn(self, orders: Orders) -> TurnResult:
        """Stops and begins attempts as ordered, then waits until the turn's time is over or no attempt is left.

        Raises what the engine raised. Requests that vLLM refuses are reported as refused instead.
        """
        self._early_stops.extend(name for name in orders.stops if name not in self._attempts)
        await self._stop(orders.stops)
        self.begin(orders.starts)
        await self._wait(orders.seconds)
        return self._result()

    def begin(self, starts: Starts) -> None:
        """Begins attempts at once, except those that a turn has already stopped."""
        for name, request in starts:
            assert isinstance(request, ShardRequest)
            if name in self._early_stops:
                continue
            waits = len(self._attempts) >= self._capacity
            attempt = self._attempts[name] = _Attempt(name, request, time.perf_counter(), waits)
            attempt.task = asyncio.create_task(self._consume(attempt))

    async def stop_all(self) -> None:
        """Stops all attempts."""
        await self._stop(list(self._attempts))

    async def _stop(self, names: Sequence[int]) -> None:
        """Cancels attempts: vLLM aborts a request when its outputs are no longer consumed."""
        stopped = [self._attempts.pop(name) for name in names if name in self._attempts]
        tasks = [attempt.task for attempt in stopped if attempt.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _consume(self, attempt: _Attempt) -> None:
        text, params = text_and_params(attempt.request, streams=True)
        self._num_requests += 1
        async for output in self._generate({"prompt_token_ids": text}, params, f"specrollout-{self._num_requests}"):
            (made,) = output.outputs
            tokens = list(made.token_ids)
            if tokens and attempt.first_s is None:
                attempt.first_s = time.perf_counter()
            attempt.tokens += tokens
            attempt.logprobs += [entry[token].logprob for entry, token in zip(made.logprobs or (), tokens, strict=True)]
            attempt.finish_reason = made.finish_reason
        attempt.ended_s = time.perf_counter()

    async def _wait(self, seconds: float) -> None:
        """Waits; with few attempts only until one of them ends, because others may be racing for it."""
        until = time.perf_counter() + seconds
        while (left_s := until - time.perf_counter()) > 0:
            tasks = [a.task for a in self._attempts.values() if a.task is not None and not a.task.done()]
            if not tasks:
                return
            done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if done and len(tasks) <= FEW_ATTEMPTS:
                return

    def _result(self) -> TurnResult:
        before, self._reported_s = self._reported_s, time.perf_counter()
        attempts = list(self._attempts.values())
        decoding = [a for a in attempts if a.first_s is not None and a.first_s <= before]
        work = _work(decoding, attempts, before, self._reported_s)
        steady = tuple(a.name for a in decoding if a.ended_s is None)
        parts, finished, refused = {}, {}, []
        for attempt in attempts:
            assert attempt.task is not None
            if attempt.task.done():
                del self._attempts[attempt.name]
                if attempt.first_s is None and isinstance(attempt.task.exception(), REFUSALS):
                    refused.append(attempt.name)
                    continue
                attempt.task.result()
                assert attempt.finish_reason is not None
                finished[attempt.name] = attempt.finish_reason
            if attempt.tokens or attempt.name in finished:
                parts[attempt.name] = attempt.tokens, attempt.logprobs
                attempt.tokens, attempt.logprobs = [], []
        return TurnResult(parts, finished, work, steady=steady, refused=tuple(refused))


def _work(decoding: list[_Attempt], attempts: list[_Attempt], since_s: float, now_s: float) -> Work:
    """Returns the work since `since_s`.

    `decoding` are the attempts that made tokens all the time. Prefill is measured by the attempts that began to.
    """
    request_s = [(now_s if a.ended_s is None else a.ended_s) - since_s for a in decoding]
    begun = [(a, a.first_s) for a in attempts if a.first_s is not None and a.first_s > since_s and not a.waits]
    return Work(
        max(request_s, default=0.0),
        sum(request_s),
        sum(len(a.tokens) for a in decoding),
        covered([(a.began_s, first_s) for a, first_s in begun]),
        num_text_tokens(a.request for a, _ in begun),
    )
