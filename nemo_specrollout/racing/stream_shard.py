# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous engine is asked for, rolled out together with what others are asked for, as it comes.

If the exchange is gone the engine makes its own requests alone, from their beginning: the same tokens, later.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from nemo_specrollout.generation.compat import is_portable
from nemo_specrollout.generation.engine import Rollout
from nemo_specrollout.generation.hosted_engine import as_vllm_returns, shard_request
from nemo_specrollout.generation.shard_request import ShardRequest
from nemo_specrollout.racing.exchange_messages import ExchangeFailed, Reply, Starts
from nemo_specrollout.racing.stream_worker import StreamWorker
from nemo_specrollout.racing.turns import Orders, Report

logger = logging.getLogger(__name__)


class StreamLink(Protocol):
    """An engine's end of the exchange, which is elsewhere. Every call raises ExchangeFailed where that is gone."""

    async def join(self, capacity: int) -> None: ...

    async def add(self, requests: Sequence[ShardRequest]) -> Starts: ...

    async def cancel(self, numbers: Sequence[int]) -> None: ...

    async def exchange(self, report: Report | None) -> Reply: ...

    async def leave(self) -> None: ...


class StreamShard:
    """One engine's part. Owns who waits for which response.

    States: at work from `begin` on; alone, after the exchange has failed.
    """

    def __init__(self, worker: int, capacity: int, engine: StreamWorker, link: StreamLink) -> None:
        self._worker, self._capacity, self._engine, self._link = worker, capacity, engine, link
        self._waiting: dict[int, asyncio.Future[Rollout | None]] = {}
        self._num_requests = 0
        self._loop: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.failure: str | None = None
        """Why it is alone, if it is."""

    async def begin(self) -> None:
        """The engine takes part from now on."""
        try:
            await self._link.join(self._capacity)
        except ExchangeFailed as error:
            await self._go_alone(error)
        else:
            self._loop = asyncio.create_task(self._take_turns())

    async def generate(
        self, prompt: Any, params: Any, request_id: str, native: Callable[[], AsyncIterator[Any]]
    ) -> AsyncIterator[Any]:
        """Stands in for `AsyncLLM.generate`: yields the one, last record. `native` makes what cannot go on elsewhere."""
        rollout = None
        if self.failure is None and is_portable(prompt, params):
            request = shard_request((self._worker, self._num_requests), prompt, params)
            self._num_requests += 1
            rollout = await self._rolled_out(request)
        if rollout is not None:
            yield as_vllm_returns(request, request_id, rollout)
            return
        async for output in native():
            yield output

    async def _rolled_out(self, request: ShardRequest) -> Rollout | None:
        """None if the exchange failed, or an engine refused it."""
        number = request.home[1]
        self._waiting[number] = asyncio.get_running_loop().create_future()
        adding = asyncio.ensure_future(self._link.add([request]))
        try:
            self._engine.begin(await asyncio.shield(adding))
            return await self._waiting[number]
        except ExchangeFailed as error:
            await self._go_alone(error)
            return None
        except asyncio.CancelledError:
            self._in_background(self._cancel(number, adding))
            raise
        finally:
            del self._waiting[number]

    async def _cancel(self, number: int, adding: asyncio.Future[Starts]) -> None:
        """After the exchange knows of it: calls may overtake each other."""
        with suppress(ExchangeFailed):
            await adding
            await self._link.cancel([number])

    async def _leave(self) -> None:
        with suppress(ExchangeFailed):
            await self._link.leave()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _take_turns(self) -> None:
        turns, report = deque[Orders](), None
        answer = asyncio.create_task(self._link.exchange(None))
        try:
            while True:
                if turns:
                    report = await self._engine.turn(turns.popleft())
                reply = await answer
                self._deliver(reply)
                turns.extend(reply.orders)
                answer, report = asyncio.create_task(self._link.exchange(report)), None
        except Exception as error:  # the engine's own too: what is asked for natively will raise it again
            await self._go_alone(error)
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def _deliver(self, reply: Reply) -> None:
        for made in reply.made:
            future = self._waiting.get(made.number)
            if future is not None and not future.done():
                future.set_result(made.rollout)

    async def _go_alone(self, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = f"{error}" if isinstance(error, ExchangeFailed) else f"{type(error).__name__}: {error}"
        logger.warning("specrollout: nothing moves any more, each engine makes what it is asked for: %s", self.failure)
        if self._loop is not None and self._loop is not asyncio.current_task():
            self._loop.cancel()
        self._in_background(self._leave())
        await self._engine.forget()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ExchangeFailed(self.failure))
