# SPDX-License-Identifier: Apache-2.0
"""Engines that decode a coming step's requests while they are idle, and requests that begin again with new weights."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from conftest import STEP_ADDER
from safetensors.torch import load_file
from shard_world import StreamingEngine, given
from test_racing import MAX_TOKENS, noisy, six_prompts

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.generation.engine.requests import (
    EXTRA_ARGS_KEY,
    Rollout,
    RolloutRequest,
    as_bytes,
    longest_known_text,
)
from nemo_specrollout.run_ahead.one_policy import OnePolicyStream
from nemo_specrollout.stragglers.attempts import Response

pytestmark = pytest.mark.integration

WORK = six_prompts()[:6]
BLOCK = SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), run_ahead=RunAheadConfig())
OLD = load_file(STEP_ADDER / "model.safetensors")
NEW = noisy(OLD, 5)


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), MAX_TOKENS)


@pytest.fixture
def engine(ahead_engine: RolloutEngine) -> RolloutEngine:
    """The engine with its first weights."""
    ahead_engine.load_weights(OLD.items())
    return ahead_engine


@pytest.fixture(scope="module")
def ahead_engine(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, BLOCK, MAX_TOKENS)


def tokens_by(plain: RolloutEngine, weights: dict[str, Any]) -> list[list[int]]:
    """The responses that plain decoding makes with these weights."""
    plain.load_weights(weights.items())
    return [r.token_ids for r in plain.generate(WORK)]


def sent(engine: RolloutEngine, i: int) -> tuple[Any, Any]:
    request = WORK[i]
    return {"prompt_token_ids": list(request.prompt_token_ids)}, given(engine, request, {})


class Stream(StreamingEngine):
    """An asynchronous engine."""

    async def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_a_request_under_way_becomes_a_sample_of_the_new_policy(
    engine: RolloutEngine, plain: RolloutEngine, num_tokens: int
) -> None:
    """One that ends while weights change does, too. One that has ended before stays the old policy's."""

    async def ask(one: OnePolicyStream, i: int) -> Rollout:
        outputs = [o async for o in one.generate(*sent(engine, i), request_id=f"r{i}-{num_tokens}")]
        assert len(outputs) == 1 and outputs[0].finished
        return Rollout.from_vllm(outputs[0])

    async def work() -> list[list[int]]:
        stream = Stream(engine)
        made = [0] * 6

        async def counted(prompt: Any, params: Any, request_id: str) -> Any:
            async for output in stream.generate(prompt, params, request_id):
                made[int(request_id[1])] = len(output.outputs[0].token_ids)
                yield output

        one = OnePolicyStream(counted)
        first = await ask(one, 0)
        asked = [asyncio.create_task(ask(one, i)) for i in range(1, 6)]
        while max(made[1:]) < num_tokens:
            await asyncio.sleep(0.001)
        one.change_begins()
        await asyncio.sleep(0.02)  # requests go on until they notice
        engine.load_weights(NEW.items())
        one.change_ends()
        return [first.token_ids, *(r.token_ids for r in await asyncio.gather(*asked))]

    found = asyncio.run(work())
    old, new = tokens_by(plain, OLD), tokens_by(plain, NEW)
    assert found[0] == old[0]
    assert found[1:] == new[1:] and new[1:] != old[1:]


def test_a_request_that_comes_during_a_change_waits_for_its_end(engine: RolloutEngine, plain: RolloutEngine) -> None:
    """It would else begin with old weights and go on with new ones, although it had noticed no change."""

    old, new = tokens_by(plain, OLD), tokens_by(plain, NEW)
    row = next(i for i in range(6) if old[i] != new[i])

    async def work() -> list[int]:
        stream = Stream(engine)
        begun: list[str] = []

        async def generate(prompt: Any, params: Any, request_id: str) -> Any:
            begun.append(request_id)
            async for output in stream.generate(prompt, params, request_id):
                yield output

        one = OnePolicyStream(generate)

        async def ask() -> list[int]:
            outputs = [o async for o in one.generate(*sent(engine, row), request_id="late")]
            return Rollout.from_vllm(outputs[-1]).token_ids

        one.change_begins()
        asked = asyncio.create_task(ask())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not begun
        engine.load_weights(NEW.items())
        one.change_ends()
        one.change_begins()  # the waiting task has not run since the end of the first change
        for _ in range(10):
            await asyncio.sleep(0)
        assert not begun
        one.change_ends()
        return await asked

    assert asyncio.run(work()) == new[row]


def test_a_request_that_begins_again_brings_its_longest_text(engine: RolloutEngine) -> None:
    """The text is drafts. The second attempt is stopped after its first output, and the third before it has any."""
    seen: list[Any] = []
    stream = Stream(engine)  # one for all attempts: the first one of two would read what belongs to the second

    def change() -> None:
        one.change_begins()
        one.change_ends()

    async def generate(prompt: Any, params: Any, request_id: str) -> Any:
        seen.append(params)
        attempt = len(seen)
        if attempt == 3:
            change()
            return
        async for output in stream.generate(prompt, params, request_id):
            if len(output.outputs[0].token_ids) > {1: 9, 2: 0}.get(attempt, MAX_TOKENS):
                change()
            yield output

    one = OnePolicyStream(generate)

    async def work() -> list[Any]:
        return [o async for o in one.generate(*sent(engine, 0), request_id="r")]

    (output,) = asyncio.run(work())
    texts = [p.extra_args[EXTRA_ARGS_KEY].get("ahead") for p in seen]
    assert len(texts) == 4 and texts[0] is None
    assert len(texts[1]) >= 40 and texts[2].startswith(texts[1]) and texts[3] == texts[2]
    assert as_bytes(output.outputs[0].token_ids).startswith(texts[3])


def test_the_text_of_an_older_attempt_goes_on_where_the_newer_one_stops() -> None:
    older = as_bytes([5, 6, 7, 8])
    assert longest_known_text([], older) == older
    assert longest_known_text([5, 9], older) == as_bytes([5, 9, 7, 8])
    assert longest_known_text([1, 2, 3, 4, 5], older) == as_bytes([1, 2, 3, 4, 5])


def test_a_response_that_begins_again_twice_keeps_its_longest_text() -> None:
    response = Response(WORK[0])
    response.open(0, 0)
    response.extend(0, [5, 6, 7], [0.0] * 3, None, 0)
    response.begin_again()
    response.extend(0, [5, 9], [0.0] * 2, None, 1)
    response.begin_again()
    assert isinstance(response.request, RolloutRequest) and response.request.ahead == as_bytes([5, 9, 7])
    response.begin_again()
    assert response.request.ahead == as_bytes([5, 9, 7]) and not response.tokens
