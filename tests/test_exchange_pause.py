# SPDX-License-Identifier: Apache-2.0
"""New weights wait until no engine takes turns for others, whatever an engine does; through Ray, as in NeMo-RL."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from own_ray import ray_for_actors_of

from lab.local.own_ray import ray
from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY
from nemo_specrollout.nemo_rl.ray_calls import ask_exchange_async
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.nemo_rl.supervisor import EngineStillDecodes, ExchangeDriver, SpecrolloutExchange
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.stream_engine import StreamEngine, StreamShard

pytestmark = pytest.mark.integration

NUM_TOKENS = 5
FOREVER_S = 600.0


class Engines:
    """Two asynchronous engines of one process. Engine 1 can be made silent, and its requests stay when they are stopped.

    Requests end when `finish` lets them, and each token is 7.
    """

    def __init__(self, exchange: Any) -> None:
        self._speaks = [asyncio.Event(), asyncio.Event()]
        self._may_end = asyncio.Event()
        self._lets_go = asyncio.Event()
        self._lets_go.set()
        self._num_decoding = [0, 0]
        self._shards = [
            StreamShard(e, StreamEngine(partial(self._decode, e), 4), partial(self._ask, e, exchange), None)
            for e in (0, 1)
        ]
        for speaks in self._speaks:
            speaks.set()

    async def begin(self) -> None:
        for shard in self._shards:
            await shard.begin()

    async def start(self) -> None:
        """Begins a request in each engine, and returns when both decode."""
        self._asked = [asyncio.create_task(self._request(engine)) for engine in (0, 1)]
        while not all(self._num_decoding):
            await asyncio.sleep(0.01)

    async def be_silent(self, *, keeps_requests: bool = False) -> None:
        """Makes engine 1 hand in no result. It may also never let go of requests that are stopped."""
        self._speaks[1].clear()
        if keeps_requests:
            self._lets_go.clear()

    async def speak(self) -> None:
        self._speaks[1].set()

    async def finish(self) -> list[int]:
        """Lets all requests end. Returns the number of tokens of each response."""
        self._may_end.set()
        return [len(output.outputs[0].token_ids) for output in await asyncio.gather(*self._asked)]

    async def specrollout_leave_exchange(self, engine: int) -> None:
        await self._shards[engine].leave("the test says so")

    async def num_decoding(self, engine: int) -> int:
        """Returns the number of requests of the exchange that the engine decodes."""
        return self._num_decoding[engine]

    async def _ask(self, engine: int, exchange: Any, method: Callable[..., object], *arguments: Any) -> Any:
        if method.__name__ == StragglerExchange.exchange.__name__:  # the actor has a copy of the class
            await self._speaks[engine].wait()
        return await ask_exchange_async(exchange, engine, method, *arguments)

    async def _request(self, engine: int) -> Any:
        from nemo_specrollout.generation.engine.vllm_requests import RolloutSamplingParams

        extra_args = {EXTRA_ARGS_KEY: {"seed": engine}}
        params = RolloutSamplingParams(max_tokens=NUM_TOKENS, logprobs=0, detokenize=False, extra_args=extra_args)
        prompt = {"prompt_token_ids": [1, 2, 3]}
        shard = self._shards[engine]
        outputs = shard.generate(prompt, params, f"r{engine}", lambda: self._decode_alone(engine))
        return [output async for output in outputs][-1]

    async def _decode(self, engine: int, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self._num_decoding[engine] += 1
        try:
            yield _output([7], None)
            await self._may_end.wait()
            yield _output([7] * (params.max_tokens - 1), "length")
        except asyncio.CancelledError:
            await self._lets_go.wait()
            raise
        finally:
            self._num_decoding[engine] -= 1

    async def _decode_alone(self, engine: int) -> AsyncIterator[Any]:
        await self._may_end.wait()
        yield _output([7] * NUM_TOKENS, "length")


def _output(tokens: list[int], reason: str | None) -> Any:
    logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)])


class Workers:
    """Engines as the driver reaches them."""

    num_engines = 2

    def __init__(self, engines: Any) -> None:
        self.engines = engines

    def start(self, engine: int, method: Callable[..., object], /, **arguments: Any) -> Any:
        return getattr(self.engines, method.__name__).remote(engine, **arguments)


class World:
    """An exchange, two engines in an actor, and the driver's end."""

    def __init__(self) -> None:
        kind: Any = SpecrolloutExchange
        config = FastestOfNConfig(moving=False)
        self.exchange = kind.options(max_concurrency=12).remote(["suffix", "suffix"], config, NUM_TOKENS)
        self.engines = ray.remote(Engines).options(num_cpus=0, max_concurrency=20).remote(self.exchange)
        self.log = StepLog()
        self.driver = ExchangeDriver(self.exchange, Workers(self.engines), self.log)
        ray.get(self.engines.begin.remote())

    def silence(self, *, keeps_requests: bool = False) -> None:
        """Returns when engine 1 is the only one whose turns have not ended, and both engines decode."""
        ray.get(self.engines.start.remote())
        ray.get(self.engines.be_silent.remote(keeps_requests=keeps_requests))
        while ray.get(self.exchange.pause.remote(0.05)) != (1,):
            pass

    def close(self) -> None:
        for actor in (self.exchange, self.engines):
            ray.kill(actor)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_for_actors_of(__name__):
        yield


@pytest.fixture
def world(cluster: None) -> Iterator[World]:
    world = World()
    yield world
    world.close()


class Waiting(logging.Handler):
    """Knows whether a sentence has said that new weights wait for engine 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.said = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().endswith(" by now: 1"):
            self.said.set()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    handler = Waiting()
    logger = logging.getLogger("nemo_specrollout.nemo_rl.supervisor")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_new_weights_wait_for_an_engine_that_is_late(world: World, waiting: Waiting) -> None:
    world.silence()
    refitted = threading.Event()

    def refit() -> None:
        with world.driver.paused(0.05, FOREVER_S):
            refitted.set()

    thread = threading.Thread(target=refit)
    thread.start()
    assert waiting.said.wait(60) and not refitted.is_set()
    ray.get(world.engines.speak.remote())
    thread.join(60)
    assert refitted.is_set() and not world.log.alarms
    assert ray.get(world.engines.finish.remote(), timeout=60) == [NUM_TOKENS, NUM_TOKENS]


def test_an_engine_that_stays_silent_stops_its_requests_before_new_weights(world: World) -> None:
    world.silence()
    with world.driver.paused(0.05, 0.2):
        num_decoding = ray.get([world.engines.num_decoding.remote(engine) for engine in (0, 1)])
        assert num_decoding == [1, 0], "engine 1 still decodes for the exchange"
    (alarm,) = world.log.alarms
    assert alarm.startswith("engine 1 ended no turn for")
    assert ray.get(world.engines.finish.remote(), timeout=60) == [NUM_TOKENS, NUM_TOKENS]


def test_a_dead_engine_does_not_hold_new_weights(world: World) -> None:
    """NeMo-RL's own calls notice its death."""
    world.silence()
    ray.kill(world.engines)
    has_refitted = False
    with world.driver.paused(0.05, 0.2):
        has_refitted = True
    assert has_refitted and [alarm.split(" ended")[0] for alarm in world.log.alarms] == ["engine 1"]


def test_an_engine_that_cannot_stop_gets_no_new_weights(world: World) -> None:
    world.silence(keeps_requests=True)
    has_refitted = False
    with (
        pytest.raises(EngineStillDecodes, match="engine 1 has not ended its turn"),
        world.driver.paused(0.05, 0.2, 0.2),
    ):
        has_refitted = True
    assert not has_refitted
