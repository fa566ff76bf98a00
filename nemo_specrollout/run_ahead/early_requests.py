# SPDX-License-Identifier: Apache-2.0
"""Requests of a coming step in an idle engine (`run_ahead`).

A synchronous engine decodes them by turns, between its other calls. An asynchronous engine decodes them as tasks.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any
from uuid import uuid4

from nemo_specrollout.generation.engine.hosted_engine import HostedEngine
from nemo_specrollout.generation.engine.requests import ShardRequest, as_bytes
from nemo_specrollout.stragglers.turn_engine import TurnEngine
from nemo_specrollout.stragglers.turns import TurnOrders

MAX_TRIES = 50
"""Attempts to make vLLM drop its cached prefixes, which the next weights must not read. It refuses amid a step."""
RETRY_S = 0.02
"""Seconds between two such attempts in an asynchronous engine."""


class StaleCache(RuntimeError):
    """vLLM keeps prefixes that older weights have cached, so the run must not go on."""


class AheadTurns:
    """Decodes requests in a synchronous engine, a while at a time. Owns their texts so far, in the order of the requests."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._turns = TurnEngine(HostedEngine(llm))
        self._texts: list[list[int]] = []

    def advance(self, requests: Sequence[ShardRequest], seconds: float) -> bool:
        """Begins more requests and decodes for about `seconds`. Returns whether any request is left."""
        starts = tuple(enumerate(requests, len(self._texts)))
        self._texts += [[] for _ in requests]
        result = self._turns.turn(TurnOrders(starts, seconds=seconds))
        for name, (tokens, _) in result.parts.items():
            self._texts[name] += tokens
        return self._turns.is_busy

    def end(self, *, keeps_cache: bool) -> list[bytes]:
        """Stops all requests and returns their texts as int32 numbers, in the order in which the requests began.

        Also makes the engine drop its cached prefixes, unless it `keeps_cache`. Raises StaleCache if it does not drop them.
        """
        self._turns.stop_all()
        for _ in range(MAX_TRIES):
            if keeps_cache or self._llm.reset_prefix_cache() is not False:
                break
            self._turns.engine.step()  # a step that was under way has ended then
        else:
            raise StaleCache
        texts = self._texts
        self._texts = []
        return list(map(as_bytes, texts))


class AheadTasks:
    """Decodes requests in an asynchronous engine. Owns a task for each, and their texts so far in the same order."""

    def __init__(self, llm: Any, generate: Callable[..., AsyncGenerator[Any, None]]) -> None:
        """`generate` is vLLM's own method of `llm`."""
        self._llm = llm
        self._generate = generate
        self._texts: list[list[int]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, prompt: Any, params: Any) -> None:
        """Begins a request of vLLM's."""
        self._texts.append([])
        self._tasks.append(asyncio.create_task(self._decode(prompt, params, self._texts[-1])))

    async def wait(self, seconds: float) -> bool:
        """Lets the engine work for at most `seconds`. Returns whether any request is left."""
        left = (await asyncio.wait(self._tasks, timeout=seconds))[1] if self._tasks else ()
        return bool(left)

    async def end(self, *, keeps_cache: bool) -> list[bytes]:
        """Stops all requests and returns their texts as int32 numbers, in the order in which the requests began.

        Also makes the engine drop its cached prefixes, unless it `keeps_cache`. Raises StaleCache if it does not drop them.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(MAX_TRIES):
            if keeps_cache or await self._llm.reset_prefix_cache() is not False:
                break
            await asyncio.sleep(RETRY_S)  # a step that was under way has ended then
        else:
            raise StaleCache
        texts = self._texts
        self._texts = []
        self._tasks = []
        return list(map(as_bytes, texts))

    async def _decode(self, prompt: Any, params: Any, text: list[int]) -> None:
        async for output in self._generate(prompt, params, request_id=f"ahead-{uuid4()}"):
            text[:] = output.outputs[0].token_ids
