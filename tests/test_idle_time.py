# SPDX-License-Identifier: Apache-2.0
"""Engines that make texts of coming steps while a shared rollout leaves them nothing else to do."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from conftest import STEP_ADDER
from rollout_world import WildPolicy
from shard_world import IdleInTurn, LoopLink, OneAtATime, Shard, ThreadLink, given, rolled_out, sharded
from test_equality import assert_equal
from test_racing import SAMPLINGS
from test_rolling import BLOCK, FREE, MAX_TOKENS, SLOTS, Rolling, RollingAsync, charge, load_noisy, of_step

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import Rollout, ShardRequest
from nemo_specrollout.run_ahead.early_requests import EarlyMade
from nemo_specrollout.stragglers import coordinator
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth
from nemo_specrollout.stragglers.decisions.straggler_policy import TailDecision
from nemo_specrollout.stragglers.decisions.tail_forecast import TailObservation
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.stream_engine import StreamEngine, StreamShard

pytestmark = pytest.mark.integration


class Watching:
    """Passes on the decisions of a policy, and keeps what it saw of early work."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.worths: list[tuple[EarlyWorth, ...]] = []

    def decide(self, seen: TailObservation) -> TailDecision:
        self.worths.append(seen.idle.worth_E)
        decision: TailDecision = self.policy.decide(seen)
        return decision


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "SHORTEST_TURN_S", 0.01)


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), MAX_TOKENS)


@pytest.fixture(scope="module")
def pair(start_engine: Callable[..., RolloutEngine]) -> list[RolloutEngine]:
    return [start_engine(STEP_ADDER, BLOCK, MAX_TOKENS, max_num_seqs=SLOTS) for _ in range(2)]


@pytest.fixture
def engines(pair: list[RolloutEngine], monkeypatch: pytest.MonkeyPatch) -> list[RolloutEngine]:
    for engine in pair:
        charge(engine, FREE, monkeypatch)
    return pair


def exchange_of(policy: Any) -> tuple[StragglerExchange, Watching]:
    exchange = StragglerExchange(["suffix", "suffix"], FastestOfNConfig(), MAX_TOKENS)
    watching = exchange._coordinator.policy = Watching(policy or exchange._coordinator.policy)
    return exchange, watching


def given_texts(engine: RolloutEngine, rollings: list[Rolling], step: int, **sampling: Any) -> list[list[ShardRequest]]:
    """Returns the requests of a step in the shard of the first engine, with the texts that either has made."""
    texts = {seed: text for rolling in rollings for seed, text in rolling.texts.items()}
    for rolling in rollings:
        rolling.texts = texts
    requests = [rollings[0].with_text(request) for request in of_step(step)]
    return sharded(engine, requests, [len(requests)], **sampling)


@pytest.mark.parametrize(("name", "is_wild"), [("T=1", True), ("T=0", True), ("T=1", False)])
def test_a_synchronous_engine_that_waits_for_orders_makes_texts(
    engines: list[RolloutEngine], plain: RolloutEngine, name: str, is_wild: bool
) -> None:
    """All requests are dealt to the first engine. The second makes texts from the beginning, and takes over some."""
    rollings = [Rolling(engine, **SAMPLINGS[name]) for engine in engines]
    worths = []
    for step in range(3):
        load_noisy(step, *engines, plain)
        exchange, watching = exchange_of(WildPolicy(step) if is_wild else None)
        for i, rolling in enumerate(rollings):
            rows = rolling.rows(step, 1)
            rolling.rolling.plan(rows[i::2], 1e-3, kept=0.9)
        idle = [IdleInTurn(rolling.rolling) for rolling in rollings]
        links = [ThreadLink(exchange, i) for i in range(2)]
        links[0].when_exchanged(1, partial(idle[1].has_begun.wait, 300.0))
        exchange.begin()
        shards = [Shard(OneAtATime(e._llm), links[i], idle[i]) for i, e in enumerate(engines)]
        made = rolled_out(shards, given_texts(engines[0], rollings, step, **SAMPLINGS[name]), [None, None])
        exchange.end()
        assert_equal(made, plain.generate(of_step(step), **SAMPLINGS[name]))
        assert [shard.failure for shard in shards] == [None, None]
        ended = [rolling.end() for rolling in rollings]
        assert ended[1].figures.num_steps_alone and ended[1].figures.alone_s > 0
        worths += [worth for seen in watching.worths for worth in seen]
        figures = exchange.take_figures()
        assert ("early_worth" in figures) == any(worth.left_s for seen in watching.worths for worth in seen)
    assert any(worth.left_s and worth.rates[0] for worth in worths), (
        "an engine without requests says what its texts are worth"
    )


@pytest.mark.parametrize("name", SAMPLINGS)
def test_asynchronous_engines_make_texts_beside_the_exchange(
    engines: list[RolloutEngine], plain: RolloutEngine, name: str
) -> None:
    async def step_of(rollings: list[RollingAsync], step: int) -> tuple[list[Rollout], list[EarlyMade]]:
        exchange, _ = exchange_of(WildPolicy(step))
        shards = []
        for i, rolling in enumerate(rollings):
            await rolling.rolling_stream.plan(rolling.rows(step, 1)[i::2], 1e-3, 0.9)

            def generate(prompt: Any, params: Any, request_id: str, rolling: RollingAsync = rolling) -> Any:
                outputs = rolling.stream.generate(prompt, params, request_id)
                return rolling.rolling_stream.own(outputs, params)

            link = LoopLink(exchange, i)
            worth = rolling.rolling_stream.worth
            shards.append(StreamShard(i, StreamEngine(generate, SLOTS), link, None, worth))
        for shard in shards:
            await shard.begin()

        async def ask(request: Any) -> Rollout:
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            params = given(engines[0], rollings[0].with_text(request), SAMPLINGS[name])
            outputs = [o async for o in shards[0].generate(prompt, params, f"asked-{id(request)}", None)]  # type: ignore[arg-type]
            return Rollout.from_vllm(outputs[-1])

        made = await asyncio.gather(*map(ask, of_step(step)))
        assert [shard.failure for shard in shards] == [None, None]
        for shard in shards:
            assert shard._loop is not None
            shard._loop.cancel()
            await asyncio.gather(shard._loop, return_exceptions=True)
        while any([await rolling.rolling_stream.wait(0.05) for rolling in rollings]):
            pass
        return list(made), [await rolling.end_stream() for rolling in rollings]

    async def work() -> None:
        rollings = [RollingAsync(engine, **SAMPLINGS[name]) for engine in engines]
        for step in range(3):
            load_noisy(step, *engines, plain)
            made, ended = await step_of(rollings, step)
            assert_equal(made, plain.generate(of_step(step), **SAMPLINGS[name]))
            assert all(e.figures.num_tokens for e in ended)

    asyncio.run(work())
