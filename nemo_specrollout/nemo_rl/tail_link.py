# SPDX-License-Identifier: Apache-2.0
"""The Ray actor in which the engines of a run meet, and the ends of the lines to it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray

from nemo_specrollout.generation.shard_request import ShardRequest
from nemo_specrollout.racing.exchange import StragglerExchange
from nemo_specrollout.racing.turns import ExchangeFailed, Reply, Starts, TurnResult

# An answer that takes longer is none.
PATIENCE_S = 300.0
# Threads of the actor for each engine: one that waits for orders, others that bring requests.
THREADS_OF_ENGINE = 4


@ray.remote(num_cpus=0)
class SpecrolloutTail(StragglerExchange):
    """The actor. It ends with the driver, which made it; everybody goes on without it."""


class TailLink:
    """An engine's end."""

    def __init__(self, actor: Any, worker: int) -> None:
        self._actor, self._worker = actor, worker

    def join(self, capacity: int, requests: Sequence[ShardRequest]) -> None:
        """The engine is there, with room for `capacity` requests, and brings some."""
        answer_of(self._actor.join.remote(self._worker, capacity, requests))

    def exchange(self, result: TurnResult | None) -> Callable[[], Reply]:
        """Hands in the result of a turn; the answer is waited for when it is asked for."""
        reply = self._actor.exchange.remote(self._worker, result)
        return lambda: answer_of(reply)

    def leave(self) -> None:
        """The engine takes no part; who hears of it does not matter here."""
        with suppress(ExchangeFailed):
            answer_of(self._actor.leave.remote(self._worker))


class TailStreamLink:
    """The same for an asynchronous engine."""

    def __init__(self, actor: Any, worker: int) -> None:
        self._actor, self._worker = actor, worker

    async def join(self, capacity: int) -> None:
        """The engine is there, with room for `capacity` requests."""
        await self._answer("join", capacity)

    async def add(self, requests: Sequence[ShardRequest]) -> Starts:
        """It is asked for more; what it is to begin with at once."""
        return await self._answer("add", requests)

    async def cancel(self, numbers: Sequence[int]) -> None:
        """These are no longer wanted."""
        await self._answer("cancel", numbers)

    async def exchange(self, result: TurnResult | None) -> Reply:
        """Hands in the result of a turn."""
        return await self._answer("exchange", result)

    async def leave(self) -> None:
        """The engine goes alone."""
        await self._answer("leave")

    async def _answer(self, method: str, *arguments: Any) -> Any:
        with lost():
            return await asyncio.wait_for(getattr(self._actor, method).remote(self._worker, *arguments), PATIENCE_S)


def answer_of(call: Any) -> Any:
    """What the actor says. Raises ExchangeFailed if it is gone, or has failed."""
    with lost():
        return ray.get(call, timeout=PATIENCE_S)


@contextmanager
def lost() -> Iterator[None]:
    """Whatever Ray raises within means that the exchange is of no more use."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise ExchangeFailed(str(error.cause)) from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ExchangeFailed(f"{type(error).__name__}: {first_line}") from error
