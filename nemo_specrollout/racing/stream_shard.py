# SPDX-License-Identifier: Apache-2.0
"""An asynchronous engine's part in an exchange: what it is asked for is rolled out together with other engines' requests.

If the exchange is lost, the engine makes its own requests alone from their beginning: the same tokens, later.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from nemo_specrollout.generation.requests import Rollout, ShardRequest
from nemo_specrollout.generation.vllm_requests import as_vllm_returns, is_portable, shard_request
from nemo_specrollout.racing.stream_engine import StreamEngine
from nemo_specrollout.racing.turns import ExchangeFailed, Orders, Reply, Starts, TurnResult

logger = logging.getLogger(__name__)


class StreamLink(Protocol):
    """An engine's connection to the exchange. Every call raises ExchangeFailed if the exchange is lost."""

    async def join(self, capacity: int) -> None: ...

    async def add(self, requests: Sequence[ShardRequest]) -> Starts: ...

    async def cancel(self, numbers: Sequence[int]) -> None: ...

    async def exchange(self, result: TurnResult | None) -> Reply: ...

    async def leave(self) -> None: ...


class StreamShard:
    """One engine's part in the exchange. Owns the futures of the responses that callers wait for.

    States: connected from `begin` on; alone after the exchange is lost or the engine has failed.
    """

    def __init__(self, number: int, capacity: int, engine: StreamEngine, link: StreamLink) -> None:
        """`number` is the engine's; `capacity` is the number of requests that it decodes at a time."""
        self._number, self._capacity, self._engine, self._link = number, capacity, engine, link
        self._waiting: dict[int, asyncio.Future[Rollout | None]] = {}
        self._num_requests = 0
        self._loop: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.failure: str | None = None
        """Reason why the engine is alone; None while it is connected."""

    async def begin(self) -> None:
        """Joins the exchange and begins to take turns."""
        try:
            await self._link.join(self._capacity)
        except ExchangeFailed as error:
            await self._go_alone(error)
        else:
            self._loop = asyncio.create_task(self._take_turns())

    async def generate(
        self, prompt: Any, params: Any, request_id: str, native: Callable[[], AsyncIterator[Any]]
    ) -> AsyncIterator[Any]:
        """Replaces `AsyncLLM.generate`: yields the last output only. `native` serves what other engines cannot take over."""
        rollout = None
        if self.failure is None and is_portable(prompt, params):
            request = shard_request((self._number, self._num_requests), prompt, params)
            self._num_requests += 1
            rollout = await self._roll_out(request)
        if rollout is not None:
            yield as_vllm_returns(request, request_id, rollout)
            return
        async for output in native():
            yield output

    async def _roll_out(self, request: ShardRequest) -> Rollout | None:
        """Returns the response, or None if the exchange is lost or an engine refused the request."""
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
        """Cancels a request after the exchange has got it: calls may overtake each other."""
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
        turns, result = deque[Orders](), None
        receiving = asyncio.create_task(self._link.exchange(None))
        try:
            while True:
                if turns:
                    result = await self._engine.turn(turns.popleft())
                reply = await receiving
                self._deliver(reply)
                turns.extend(reply.orders)
                receiving, result = asyncio.create_task(self._link.exchange(result)), None
        except Exception as error:  # an error of the engine, too: a native request will raise it again
            await self._go_alone(error)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    def _deliver(self, reply: Reply) -> None:
        for number, rollout in reply.answers:
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_result(rollout)

    async def _go_alone(self, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = f"{error}" if isinstance(error, ExchangeFailed) else f"{type(error).__name__}: {error}"
        logger.warning(
            "specrollout: requests no longer move between engines; each engine decodes its own: %s", self.failure
        )
        if self._loop is not None and self._loop is not asyncio.current_task():
            self._loop.cancel()
        self._in_background(self._leave())
        await self._engine.stop_all()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ExchangeFailed(self.failure))
