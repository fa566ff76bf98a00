# SPDX-License-Identifier: Apache-2.0
"""Requests that move or race between a run's engines: the exchange's Ray actor, and the connections to it.

The driver may lack vLLM, so modules that import vLLM are imported only where an engine needs them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.generation.requests import ShardRequest
from nemo_specrollout.nemo_rl.logger import StepLog
from nemo_specrollout.nemo_rl.ray_calls import engine_environment
from nemo_specrollout.racing.engine_blocks import blocks_of_engines, method_name
from nemo_specrollout.racing.exchange import StragglerExchange
from nemo_specrollout.racing.turns import ExchangeFailed, Reply, Starts, TurnResult
from nemo_specrollout.scheduling.racing.draft_ladder import LadderFile

if TYPE_CHECKING:
    from nemo_specrollout.racing.stream_engine import Generate, StreamShard

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Seconds after which a call without an answer counts as failed."""
THREADS_OF_ENGINE = 4
"""Threads of the actor for each engine: one waits for orders, the others bring requests."""


@ray.remote(num_cpus=0)
class SpecrolloutExchange(StragglerExchange):
    """The exchange as an actor. It ends with the driver, which made it; the engines go on without it."""


class ExchangeDriver:
    """Driver's end of the exchange; owns the actor.

    If the actor is lost, the driver logs one alarm, and the run goes on without moves and races.
    """

    def __init__(self, block: SpecrolloutConfig, num_engines: int, max_new_tokens: int, log: StepLog) -> None:
        """Starts the actor. Raises ConfigError for a ladder file that is not valid."""
        config = block.fastest_of_n
        assert config is not None
        field = f"{BLOCK_PATH}.fastest_of_n.ladder"
        ladder = None if config.ladder is None else LadderFile.read(Path(config.ladder), field)
        methods = [method_name(engine_block) for engine_block in blocks_of_engines(block, num_engines)]
        actor: Any = SpecrolloutExchange
        options = {"max_concurrency": THREADS_OF_ENGINE * (num_engines + 1), "runtime_env": engine_environment()}
        self.actor = actor.options(**options).remote(methods, config, max_new_tokens, ladder)
        self._log, self._is_lost = log, False

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Encloses a rollout, in which every engine is called with its shard."""
        self._call("begin")
        try:
            yield
        finally:
            self._call("end")

    @contextmanager
    def new_weights(self) -> Iterator[None]:
        """Encloses a weight update. All races end before it, and no move or race begins during it."""
        self._call("pause")
        try:
            yield
        finally:
            self._call("resume")

    def figures(self) -> Mapping[str, float]:
        """Returns the figures since the previous call, by name. There are none if the actor is lost."""
        return self._call("take_figures") or {}

    def close(self) -> None:
        """Ends the actor."""
        ray.kill(self.actor)

    def _call(self, method: str) -> Any:
        if self._is_lost:
            return None
        try:
            return answer_of(getattr(self.actor, method).remote())
        except ExchangeFailed as error:
            self._is_lost = True
            self._log.alarms.append(f"the exchange of requests failed, so no request moves or races any more: {error}")
            return None


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
        with _ray_errors_as_exchange_failed():
            return await asyncio.wait_for(getattr(self._actor, method).remote(self._engine, *arguments), PATIENCE_S)


class ShardRacing:
    """Stands in for `vllm.LLM.generate` of a synchronous engine, whose shard is rolled out together with the others'."""

    def __init__(self, llm: Any, actor: Any, engine: int) -> None:
        from nemo_specrollout.generation.hosted_engine import HostedEngine

        self._hosted, self._link, self._engine = HostedEngine(llm), ExchangeLink(actor, engine), engine
        self._has_warned = False

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], native: Callable[[], list[Any]]) -> list[Any]:
        """Returns vLLM's records of the requests, in their order.

        If one of the requests cannot go on in another engine, the engine works alone, by `native`.
        """
        from nemo_specrollout.generation.vllm_requests import as_vllm_returns, shard_requests
        from nemo_specrollout.racing.turn_engine import ShardRollout

        requests = shard_requests(self._engine, prompts, params)
        if requests is None:
            self._link.leave()
            return native()
        rollout = ShardRollout(self._engine, self._hosted, self._link)
        made = rollout.run(requests)
        if rollout.failure is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "specrollout: the exchange of requests failed, so each engine finishes its own requests: %s",
                rollout.failure,
            )
        return [as_vllm_returns(r, str(i), m) for i, (r, m) in enumerate(zip(requests, made, strict=True))]


async def join_stream(llm: Any, generate: "Generate", actor: Any, engine: int) -> "StreamShard":
    """Enters engine number `engine`, an `AsyncLLM`, into the exchange. Returns the object that then serves its requests.

    `generate` is vLLM's own method.
    """
    from nemo_specrollout.racing.stream_engine import StreamEngine, StreamShard

    capacity = int(llm.vllm_config.scheduler_config.max_num_seqs)
    shard = StreamShard(engine, StreamEngine(generate, capacity), AsyncExchangeLink(actor, engine))
    await shard.begin()
    return shard


def answer_of(call: Any) -> Any:
    """Waits for the actor's answer to `call`. Raises ExchangeFailed if the actor is gone, failed or does not answer."""
    with _ray_errors_as_exchange_failed():
        return ray.get(call, timeout=PATIENCE_S)


@contextmanager
def _ray_errors_as_exchange_failed() -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise ExchangeFailed(str(error.cause)) from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ExchangeFailed(f"{type(error).__name__}: {first_line}") from error
