# SPDX-License-Identifier: Apache-2.0
"""An engine's part in moves and races of requests: its connection to the exchange, and its requests while it is connected."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from nemo_specrollout.generation.engine import HostedEngine
from nemo_specrollout.generation.requests import ShardRequest
from nemo_specrollout.generation.vllm_requests import as_vllm_returns, shard_requests
from nemo_specrollout.nemo_rl.ray_calls import PATIENCE_S, answer_of, ray_errors_as_exchange_failed
from nemo_specrollout.racing.stream_engine import Generate, StreamEngine, StreamShard
from nemo_specrollout.racing.turn_engine import ShardRollout
from nemo_specrollout.racing.turns import ExchangeFailed, Reply, Starts, TurnResult

logger = logging.getLogger(__name__)


class ExchangeLink:
    """A synchronous engine's end of the exchange."""

    def __init__(self, actor: Any, engine: int) -> None:
        self._actor, self._engine = actor, engine

    def join(self, capacity: int, requests: Sequence[ShardRequest]) -> None:
        """Enters a rollout with `requests`, and with room for `capacity` requests at a time."""
        answer_of(self._actor.join.remote(self._engine, capacity, requests))

    def exchange(self, result: TurnResult | None) -> Callable[[], Reply]:
        """Hands in the result of a turn. Returns a function that waits for the reply."""
        return partial(answer_of, self._actor.exchange.remote(self._engine, result))

    def leave(self) -> None:
        """Leaves the rollout. A failed exchange does not matter here."""
        with suppress(ExchangeFailed):
            answer_of(self._actor.leave.remote(self._engine))


class AsyncExchangeLink:
    """An asynchronous engine's end of the exchange."""

    def __init__(self, actor: Any, engine: int) -> None:
        self._actor, self._engine = actor, engine

    async def join(self, capacity: int) -> None:
        """Enters the exchange with room for `capacity` requests at a time."""
        await self._answer("join", capacity)

    async def add(self, requests: Sequence[ShardRequest]) -> Starts:
        """Brings more requests. Returns those that the engine begins at once."""
        return await self._answer("add", requests)

    async def cancel(self, numbers: Sequence[int]) -> None:
        """Withdraws the requests with these numbers."""
        await self._answer("cancel", numbers)

    async def exchange(self, result: TurnResult | None) -> Reply:
        """Hands in the result of a turn, and returns the reply."""
        return await self._answer("exchange", result)

    async def leave(self) -> None:
        """Leaves the exchange: the engine works alone."""
        await self._answer("leave")

    async def _answer(self, method: str, *arguments: Any) -> Any:
        with ray_errors_as_exchange_failed():
            return await asyncio.wait_for(getattr(self._actor, method).remote(self._engine, *arguments), PATIENCE_S)


class ShardRacing:
    """Stands in for `vllm.LLM.generate` of a synchronous engine, whose shard is rolled out together with the others'."""

    def __init__(self, llm: Any, actor: Any, engine: int) -> None:
        self._hosted, self._link, self._engine = HostedEngine(llm), ExchangeLink(actor, engine), engine
        self._has_warned = False

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], native: Callable[[], list[Any]]) -> list[Any]:
        """Returns vLLM's records of the requests, in their order.

        If one of the requests cannot go on in another engine, the engine works alone, by `native`.
        """
        requests = shard_requests(self._engine, prompts, params)
        if requests is None:
            self._link.leave()
            return native()
        rollout = ShardRollout(self._engine, self._hosted, self._link)
        made = rollout.run(requests)
        if rollout.failure is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "specrollout: the exchange failed, so each engine finishes its own requests: %s", rollout.failure
            )
        return [as_vllm_returns(r, str(i), m) for i, (r, m) in enumerate(zip(requests, made, strict=True))]


async def join_stream(llm: Any, generate: Generate, actor: Any, engine: int) -> StreamShard:
    """Enters engine number `engine`, an `AsyncLLM`, into the exchange. Returns the object that then serves its requests.

    `generate` is vLLM's own method.
    """
    capacity = int(llm.vllm_config.scheduler_config.max_num_seqs)
    shard = StreamShard(engine, StreamEngine(generate, capacity), AsyncExchangeLink(actor, engine))
    await shard.begin()
    return shard
