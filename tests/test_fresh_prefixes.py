# SPDX-License-Identifier: Apache-2.0
"""Prompts that share a block of the KV cache, in engines whose weights change while requests run."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import STEP_ADDER
from safetensors.torch import load_file
from shard_world import StreamingEngine, given
from test_racing import noisy
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.fresh_prefixes import SALT_KEY, CacheSalt, FreshPrefixes, salt_synchronous
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.generation.engine.vllm_requests import REFUSALS

pytestmark = pytest.mark.integration

BLOCK_SIZE = 32
SHARED = [11 + i % 9 for i in range(3 * BLOCK_SIZE)]
"""A system prompt of three blocks."""
LENGTH = 24
OLD = load_file(STEP_ADDER / "model.safetensors")
NEW = noisy(OLD, 5)
PLAIN = SpecrolloutConfig(drafters=())


@pytest.fixture(scope="module")
def fresh(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    """An engine in which nothing runs when its weights change."""
    return start_engine(STEP_ADDER, PLAIN, LENGTH, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def small_engine(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, PLAIN, LENGTH, block_size=BLOCK_SIZE, max_num_seqs=2)


@pytest.fixture
def engine(small_engine: RolloutEngine) -> RolloutEngine:
    """An engine for two requests at a time, with its first weights."""
    small_engine.load_weights(OLD.items())
    return small_engine


class Stream(StreamingEngine):
    """An asynchronous engine."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.output_processor = engine._llm.llm_engine.output_processor

    async def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])


def request(number: int, length: int = LENGTH) -> RolloutRequest:
    return RolloutRequest([*SHARED, 11 + number], number, 0, exact_length=length)


def expected(fresh: RolloutEngine, weights: dict[str, Any], *numbers: int) -> list[Rollout]:
    """What an engine makes that has had these weights from the beginning of every request."""
    fresh.load_weights(weights.items())
    return fresh.generate([request(number) for number in numbers])


def assert_same(made: Rollout, right: Rollout) -> None:
    assert made.token_ids == right.token_ids
    assert made.logprobs == pytest.approx(right.logprobs, abs=1e-4)


class Client:
    """Asks an engine with `FreshPrefixes` for requests. Keeps the number of tokens that each has by now."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.made: dict[int, int] = {}
        stream = Stream(engine)
        self.prefixes = FreshPrefixes(stream, stream.generate, CacheSalt())

    async def ask(self, number: int, length: int = LENGTH, **changed: Any) -> Rollout:
        sent = request(number, length)
        params = given(self._engine, sent, {})
        for name, value in changed.items():
            setattr(params, name, value)
        prompt = {"prompt_token_ids": list(sent.prompt_token_ids)}
        async for output in self.prefixes.generate(prompt, params, f"r{number}"):
            self.made[number] = len(output.outputs[0].token_ids)
        return Rollout.from_vllm(output)

    def begin(self, number: int, length: int = LENGTH, **changed: Any) -> asyncio.Task[Rollout]:
        return asyncio.create_task(self.ask(number, length, **changed))

    async def until(self, number: int, num_tokens: int) -> None:
        while self.made.get(number, 0) < num_tokens:
            await asyncio.sleep(0.001)

    async def change(self, weights: dict[str, Any]) -> None:
        await self.prefixes.change_begins()
        self._engine.load_weights(weights.items())
        self.prefixes.change_ends()


def test_no_request_reads_a_prefix_of_older_weights(engine: RolloutEngine, fresh: RolloutEngine) -> None:
    """vLLM does not drop the shared prefix, because a request that runs holds it."""

    async def work() -> list[Rollout]:
        client = Client(engine)
        running = client.begin(0, 200)
        await client.until(0, 2)
        before = await client.ask(1)
        await client.change(NEW)
        assert not engine._llm.reset_prefix_cache()
        after = await client.ask(2)
        running.cancel()
        await asyncio.wait({running})
        return [before, after]

    before, after = asyncio.run(work())
    assert_same(before, expected(fresh, OLD, 1)[0])
    assert_same(after, expected(fresh, NEW, 2)[0])
    assert not engine._llm.llm_engine.has_unfinished_requests()


def test_a_request_that_waits_in_vllm_begins_after_the_change(engine: RolloutEngine, fresh: RolloutEngine) -> None:
    """Two run, and the third has no slot yet. It keeps its place before one that comes during the change."""

    async def work() -> list[Rollout]:
        client = Client(engine)
        running = [client.begin(0, 200), client.begin(1, 200)]
        await client.until(1, 2)
        waiting = client.begin(2)
        await asyncio.sleep(0.02)
        await client.prefixes.change_begins()
        late = client.begin(3)
        await asyncio.sleep(0.02)
        engine.load_weights(NEW.items())
        client.prefixes.change_ends()
        running[0].cancel()
        made = await asyncio.gather(waiting, late)
        assert client.made.keys() >= {0, 1, 2, 3}
        running[1].cancel()
        await asyncio.wait(running)
        return made

    made = asyncio.run(work())
    for found, right in zip(made, expected(fresh, NEW, 2, 3), strict=True):
        assert_same(found, right)
    assert not engine._llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_a_request_that_has_sampled_goes_on(engine: RolloutEngine, kind: RequestOutputKind) -> None:
    """Also one that yields nothing before its end. Its first tokens are the older weights' own."""

    async def work() -> Rollout:
        client = Client(engine)
        asked = client.begin(1, 60, output_kind=kind)
        while not client.prefixes._has_sampled("r1"):
            await asyncio.sleep(0.001)
        num_requests = engine._llm.llm_engine.output_processor.get_num_unfinished_requests()
        await client.change(NEW)
        assert engine._llm.llm_engine.output_processor.get_num_unfinished_requests() == num_requests == 1
        return await asked

    assert len(asyncio.run(work()).token_ids) == 60


def test_a_caller_that_leaves_leaves_no_request(engine: RolloutEngine) -> None:
    async def work() -> None:
        client = Client(engine)
        asked = [client.begin(number, 200) for number in range(4)]
        await client.until(1, 2)
        for task in asked[1:]:
            task.cancel()
        await client.prefixes.change_begins()
        asked[0].cancel()
        late = client.begin(5)
        await asyncio.sleep(0.01)
        late.cancel()
        await asyncio.wait({*asked, late})
        client.prefixes.change_ends()
        assert all(task.cancelled() for task in (*asked, late))

    asyncio.run(work())
    assert not engine._llm.llm_engine.has_unfinished_requests()


def test_requests_of_another_thread_wait_too(engine: RolloutEngine) -> None:
    """NeMo-RL's HTTP server has an event loop of its own. This engine never answers a request that is not salted anew."""
    salts: list[str] = []
    is_begun = threading.Event()

    async def generate(prompt: Any, params: Any, request_id: str) -> AsyncGenerator[str, None]:
        salts.append(prompt[SALT_KEY])
        is_begun.set()
        if len(salts) == 1:
            await asyncio.Event().wait()
        yield "output"

    async def abort(request_id: str) -> None:
        aborted.append(request_id)

    aborted: list[str] = []
    processor = SimpleNamespace(external_req_ids={}, request_states={})
    prefixes = FreshPrefixes(SimpleNamespace(output_processor=processor, abort=abort), generate, CacheSalt())

    async def serve() -> list[Any]:
        return [output async for output in prefixes.generate([1, 2], None, "served")]

    served: list[list[Any]] = []
    server = threading.Thread(target=lambda: served.append(asyncio.run(serve())))

    async def change() -> None:
        server.start()
        assert is_begun.wait(60)
        await prefixes.change_begins()
        assert aborted == ["served"] and len(salts) == 1
        prefixes.change_ends()

    asyncio.run(change())
    server.join(60)
    assert served == [["output"]] and len(set(salts)) == 2


def test_errors_of_vllm_reach_the_caller(engine: RolloutEngine) -> None:
    async def work() -> None:
        client = Client(engine)
        with pytest.raises(REFUSALS, match="10000"):
            prompt = {"prompt_token_ids": [11] * 10_000}
            async for _ in client.prefixes.generate(prompt, SamplingParams(max_tokens=2, seed=1), "long"):
                pass
        await client.change(OLD)

    asyncio.run(work())


def test_a_synchronous_engine_shares_prefixes_of_one_policy_only(start_engine: Callable[..., RolloutEngine]) -> None:
    engine, salt = start_engine(STEP_ADDER, PLAIN, LENGTH, block_size=BLOCK_SIZE), CacheSalt()
    salt_synchronous(engine._llm.llm_engine, salt)
    prompts = [{"prompt_token_ids": SHARED}]

    def num_cached() -> int:
        params = SamplingParams(max_tokens=2, detokenize=False, temperature=0)
        return int(engine._llm.generate(prompts, params, use_tqdm=False)[0].num_cached_tokens)

    found = []
    for _ in range(2):
        found += [num_cached(), num_cached()]
        salt.renew()
    assert found == [0, 2 * BLOCK_SIZE] * 2


PROMPTS: list[tuple[Any, dict[str, Any]]] = [
    ("text", {"prompt": "text"}),
    ([1, 2], {"prompt_token_ids": [1, 2]}),
    ({"prompt_token_ids": [1, 2], "multi_modal_data": {}}, {"prompt_token_ids": [1, 2], "multi_modal_data": {}}),
]


@pytest.mark.parametrize(("prompt", "salted"), PROMPTS)
def test_prompts_of_all_kinds_have_the_salt(prompt: Any, salted: dict[str, Any]) -> None:
    salt = CacheSalt()
    first = salt.of(prompt)
    salt.renew()
    assert first[SALT_KEY] != salt.of(prompt)[SALT_KEY] != CacheSalt().of(prompt)[SALT_KEY]
    assert {name: value for name, value in first.items() if name != SALT_KEY} == salted


def test_senders_with_salts_of_their_own_stay_apart() -> None:
    salt = CacheSalt()
    salts = [salt.of({"prompt": "text", **own})[SALT_KEY] for own in ({}, {SALT_KEY: "a"}, {SALT_KEY: "b"})]
    request = SimpleNamespace(cache_salt="a")
    assert len(set(salts)) == 3
    assert salt.of(request).cache_salt == salts[1] and request.cache_salt == "a"
