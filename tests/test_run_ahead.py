# SPDX-License-Identifier: Apache-2.0
"""Engines that decode a coming step's requests while they are idle, and requests that begin again with new weights."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from conftest import STEP_ADDER
from safetensors.torch import load_file
from shard_world import StreamingEngine, given
from test_racing import MAX_TOKENS, noisy, six_prompts

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, Rollout, as_bytes
from nemo_specrollout.generation.engine.vllm_requests import shard_request
from nemo_specrollout.run_ahead.early_requests import AheadTasks, AheadTurns, StaleCache
from nemo_specrollout.run_ahead.one_policy import OnePolicyStream
from nemo_specrollout.telemetry.sample_stats import SampleStats

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


def begins(texts: Sequence[bytes], tokens: Sequence[list[int]]) -> list[bool]:
    return [as_bytes(whole).startswith(text) for text, whole in zip(texts, tokens, strict=True)]


def sent(engine: RolloutEngine, i: int) -> tuple[Any, Any]:
    request = WORK[i]
    return {"prompt_token_ids": list(request.prompt_token_ids)}, given(engine, request, {})


def test_a_synchronous_engine_decodes_in_slices_and_forgets(engine: RolloutEngine, plain: RolloutEngine) -> None:
    """Its texts are beginnings of the old policy's; the new policy's rollout is exact with them as drafts."""
    turns, old = AheadTurns(engine._llm), tokens_by(plain, OLD)
    for stops_early in (True, False):
        requests = [shard_request((0, i), *sent(engine, i)) for i in range(6)]
        while turns.advance(requests, 0.02) and not stops_early:
            requests = []
        texts = turns.end(keeps_cache=False)
        assert all(begins(texts, old)) and any(texts)
        assert ([*map(len, texts)] == [4 * len(t) for t in old]) is not stops_early
        assert not engine._llm.llm_engine.has_unfinished_requests()
        engine.load_weights(NEW.items())
        again = [replace(r, ahead=text) for r, text in zip(WORK, texts, strict=True)]
        assert [r.token_ids for r in engine.generate(again)] == tokens_by(plain, NEW)
        engine.load_weights(OLD.items())


def test_texts_made_ahead_leave_no_sample_stats(engine: RolloutEngine) -> None:
    """A request has the stats of the policy that it is sampled from."""
    turns = AheadTurns(engine._llm)
    turns.advance([shard_request((0, i), *sent(engine, i)) for i in range(6)], 0.02)
    texts = turns.end(keeps_cache=False)
    version = engine.run_in_worker(lambda worker: worker.specrollout_policy_version)
    engine.load_weights(NEW.items())
    again = [replace(r, ahead=text) for r, text in zip(WORK, texts, strict=True)]
    engine.generate(again)
    for request, stats in zip(again, engine.take_sample_stats(again), strict=True):
        assert stats is not None
        assert SampleStats.from_wire(stats).policy_spans == ((version + 1, len(request.prompt_token_ids)),)


def test_cached_prefixes_that_stay_end_the_run(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(StaleCache):
        AheadTurns(engine._llm).end(keeps_cache=False)
    assert AheadTurns(engine._llm).end(keeps_cache=True) == []  # before the same weights decode again


class Stream(StreamingEngine):
    """An asynchronous engine."""

    async def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())


def test_an_asynchronous_engine_stops_at_once(engine: RolloutEngine, plain: RolloutEngine) -> None:
    async def work() -> tuple[list[bytes], list[bytes]]:
        stream = Stream(engine)
        tasks = AheadTasks(stream, stream.generate)
        for i in range(6):
            tasks.begin(*sent(engine, i))
        while not any(tasks._texts):
            assert await tasks.wait(0.01)
        early = await tasks.end(keeps_cache=False)
        assert not engine._llm.llm_engine.has_unfinished_requests()
        for i in range(6):
            tasks.begin(*sent(engine, i))
        while await tasks.wait(1.0):
            pass
        return early, await tasks.end(keeps_cache=False)

    early, whole = asyncio.run(work())
    old = tokens_by(plain, OLD)
    assert all(begins(early, old)) and list(map(as_bytes, old)) == whole


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
        one.weights_change()
        await asyncio.sleep(0.02)  # requests go on until they notice
        engine.load_weights(NEW.items())
        one.weights_change()
        return [first.token_ids, *(r.token_ids for r in await asyncio.gather(*asked))]

    found = asyncio.run(work())
    old, new = tokens_by(plain, OLD), tokens_by(plain, NEW)
    assert found[0] == old[0]
    assert found[1:] == new[1:] and new[1:] != old[1:]


def test_a_request_that_begins_again_brings_its_text(engine: RolloutEngine) -> None:
    """The text is drafts, and no prefix that older weights have cached is read."""
    seen: list[Any] = []
    stream = Stream(engine)  # one for all attempts: the first one of two would read what belongs to the second

    async def generate(prompt: Any, params: Any, request_id: str) -> Any:
        seen.append(params)
        async for output in stream.generate(prompt, params, request_id):
            if len(seen) == 1 and len(output.outputs[0].token_ids) > 9:
                one.weights_change()
                one.weights_change()
            yield output

    one = OnePolicyStream(generate)

    async def work() -> list[Any]:
        return [o async for o in one.generate(*sent(engine, 0), request_id="r")]

    (output,) = asyncio.run(work())
    first, again = (p.extra_args[EXTRA_ARGS_KEY] for p in seen)
    assert "ahead" not in first and as_bytes(output.outputs[0].token_ids).startswith(again["ahead"])
    assert len(again["ahead"]) >= 40 and seen[1].skip_reading_prefix_cache
