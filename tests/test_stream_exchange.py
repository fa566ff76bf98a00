# SPDX-License-Identifier: Apache-2.0
"""Asynchronous engines that share their requests as they come: no token changes, and weights may."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import STEP_ADDER
from counting_processor import FORCED, FORCED_AT, CountingProcessor
from rollout_world import WildPolicy
from safetensors.torch import load_file
from shard_world import LoopLink, StreamingEngine, given
from test_equality import count_equal
from test_racing import DRAFTING, MAX_TOKENS, SAMPLINGS, engine_pair, noisy, plain_rollouts, six_prompts
from test_request_kinds import REASONING

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, Rollout, RolloutRequest
from nemo_specrollout.generation.engine.vllm_requests import (
    REFUSALS,
    RolloutSamplingParams,
    reason_to_stay,
    shard_request,
)
from nemo_specrollout.stragglers import coordinator
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.stream_engine import StreamEngine, StreamShard
from nemo_specrollout.stragglers.turns import TurnOrders

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes turns short, so that a short rollout has many."""
    monkeypatch.setattr(coordinator, "SHORTEST_TURN_S", 0.01)


@pytest.fixture(scope="module")
def engines(start_engine: Callable[..., RolloutEngine]) -> list[RolloutEngine]:
    return engine_pair(start_engine)


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(plain: RolloutEngine) -> dict[str, list[Rollout]]:
    return plain_rollouts(plain)


class Fleet:
    """Two engines that are asked in turn, as NeMo-RL's collector does."""

    def __init__(self, engines: list[RolloutEngine], seed: int, dies_after: int = 1 << 60) -> None:
        self.exchange = StragglerExchange(["drafting", "plain"], FastestOfNConfig(), MAX_TOKENS)
        self.exchange._coordinator.policy = WildPolicy(seed)
        self.engines, self.streams = engines, [StreamingEngine(engine) for engine in engines]
        stays = reason_to_stay(engines[0]._llm.llm_engine.vllm_config)
        self.shards = [
            StreamShard(w, StreamEngine(stream.generate, 6), LoopLink(self.exchange, w, dies_after), stays)
            for w, stream in enumerate(self.streams)
        ]

    async def begin(self) -> "Fleet":
        for shard in self.shards:
            await shard.begin()
        return self

    async def ask(self, i: int, request: RolloutRequest, **sampling: Any) -> Any:
        """Returns vLLM's last output."""
        stream, shard = self.streams[i % 2], self.shards[i % 2]
        prompt, params = {"prompt_token_ids": list(request.prompt_token_ids)}, given(self.engines[0], request, sampling)

        def native() -> AsyncIterator[Any]:
            return stream.generate(prompt, params, f"native-{i}")

        outputs = [o async for o in shard.generate(prompt, params, f"asked-{i}", native)]
        return outputs[-1]

    async def until_some_are_under_way(self) -> None:
        """Waits until some request has a token."""
        coordinator_ = self.exchange._coordinator
        while not any(coordinator_.responses[key].tokens for key in list(coordinator_._active)):
            await asyncio.sleep(0.005)

    async def end(self, *failures: str | None) -> None:
        """Checks that engines and exchange are idle, and why each engine left the exchange (None: it did not)."""
        while any(engine._llm.llm_engine.has_unfinished_requests() for engine in self.engines):
            await asyncio.sleep(0.02)
        for shard in self.shards:
            if shard._loop is not None:
                shard._loop.cancel()
                await asyncio.gather(shard._loop, return_exceptions=True)
        assert [shard.failure for shard in self.shards] == list(failures or (None, None))
        assert not self.exchange._coordinator.is_busy and not self.exchange._keys


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def assert_same(outputs: list[Any], expected: list[Rollout]) -> None:
    made = [Rollout.from_vllm(o) for o in outputs]
    equal, total = count_equal(made, expected)
    assert equal == total and [m.finish_reason for m in made] == [e.finish_reason for e in expected]
    pairs = [p for m, e in zip(made, expected, strict=True) for p in zip(m.logprobs, e.logprobs, strict=True)]
    assert max(abs(x - y) for x, y in pairs) < 1e-4


@pytest.mark.parametrize("name", SAMPLINGS)
def test_moves_change_no_token(engines: list[RolloutEngine], expected: dict[str, list[Rollout]], name: str) -> None:
    async def work() -> tuple[list[Any], dict[str, float]]:
        fleet = await Fleet(engines, 1).begin()
        made = await asyncio.gather(*(fleet.ask(i, r, **SAMPLINGS[name]) for i, r in enumerate(six_prompts())))
        await fleet.end()
        return made, fleet.exchange.take_figures()

    num_moves = num_races = 0.0
    while not (num_moves and num_races):
        made, figures = run(work())
        assert_same(made, expected[name])
        num_moves, num_races = num_moves + figures["moves"], num_races + figures["races"]


# Every kind of request

MOVING_KINDS: tuple[dict[str, Any], ...] = (
    {}, {"top_p": 0.9, "top_k": 20, "min_p": 0.05}, {"logit_bias": {10: 1.5, 11: -1.0}}, {"ignore_eos": True},
    {"allowed_token_ids": list(range(2, 60))}, {"stop_token_ids": [12, 20]},
)  # fmt: skip
STAYING_KINDS: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 0.4, "frequency_penalty": 0.2}, {"min_tokens": 40}, {"_bad_words_token_ids": [[12], [10, 11]]},
    {"thinking_token_budget": 6}, {"thinking_token_budget": 0}, {"stop": ["7 ,"], "detokenize": True}, {"logprobs": 2},
    {"prompt_logprobs": 0}, {"structured_outputs": r"(we|so)(add[0-9]{2,4}[+=]){3}answer:[0-9]{1,3}"},
)  # fmt: skip


@pytest.fixture(scope="module")
def kinds_engines(start_engine: Callable[..., RolloutEngine]) -> list[RolloutEngine]:
    """Two engines that can take every kind of request, and one without drafters to compare them with."""
    blocks = DRAFTING, SpecrolloutConfig(drafters=()), SpecrolloutConfig(drafters=())
    kwargs = {"max_num_seqs": 6, "skip_tokenizer_init": False, "reasoning_config": REASONING}
    return [start_engine(STEP_ADDER, block, MAX_TOKENS, **kwargs) for block in blocks]


def of_kind(i: int) -> dict[str, Any]:
    """Returns the parameters of request `i`. Every second request may move."""
    from vllm.sampling_params import StructuredOutputsParams

    kinds = (STAYING_KINDS, MOVING_KINDS)[i % 2]
    kind = dict(kinds[i // 2 % len(kinds)])
    if "structured_outputs" in kind:  # vLLM changes the object
        kind["structured_outputs"] = StructuredOutputsParams(regex=kind["structured_outputs"])
    return kind


@pytest.mark.parametrize("name", SAMPLINGS)
def test_moves_change_no_token_of_any_kind_of_request(kinds_engines: list[RolloutEngine], name: str) -> None:
    *pair, plain_ = kinds_engines
    work = six_prompts()
    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in work]
    params = [given(plain_, r, {**SAMPLINGS[name], **of_kind(i)}) for i, r in enumerate(work)]
    native = plain_._llm.generate(prompts, params, use_tqdm=False)

    async def roll_out(seed: int) -> tuple[list[Any], float]:
        fleet = await Fleet(pair, seed).begin()
        asked = (fleet.ask(i, r, **SAMPLINGS[name], **of_kind(i)) for i, r in enumerate(work))
        made = await asyncio.gather(*asked)
        await fleet.end()
        figures = fleet.exchange.take_figures()
        return made, figures["moves"] + figures["races"]

    num_changes = 0.0
    seed = 1
    while num_changes <= 3:
        made, changes = run(roll_out(seed))
        assert_same(made, [Rollout.from_vllm(output) for output in native])
        assert [m.prompt_logprobs is None for m in made] == [n.prompt_logprobs is None for n in native]
        num_changes += changes
        seed += 1


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_engine_with_a_logits_processor_keeps_its_requests(
    start_engine: Callable[..., RolloutEngine], name: str
) -> None:
    """The processor counts from the end of the prompt, so that a request which moved would get other tokens."""
    processors = {"logits_processors": [CountingProcessor], "max_num_seqs": 6}
    blocks = DRAFTING, SpecrolloutConfig(drafters=()), SpecrolloutConfig(drafters=())
    *pair, plain_ = (start_engine(STEP_ADDER, block, MAX_TOKENS, **processors) for block in blocks)
    alone = plain_.generate(six_prompts(), **SAMPLINGS[name])
    assert all(r.token_ids[FORCED_AT] == FORCED for r in alone if len(r.token_ids) > FORCED_AT)

    async def work() -> tuple[list[Any], dict[str, float]]:
        fleet = await Fleet(pair, 1).begin()
        made = await asyncio.gather(*(fleet.ask(i, r, **SAMPLINGS[name]) for i, r in enumerate(six_prompts())))
        reason = "logits_processors: a logits processor may count from the end of the prompt, as budgets do"
        await fleet.end(reason, reason)
        return made, fleet.exchange.take_figures()

    made, figures = run(work())
    assert_same(made, alone)
    assert figures["moves"] == figures["races"] == 0


@pytest.mark.parametrize("dies_after", [0, 1, 7, 15])
def test_without_the_exchange_each_makes_its_own(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], dies_after: int
) -> None:
    async def work() -> list[Any]:
        fleet = await Fleet(engines, 2, dies_after).begin()
        made = await asyncio.gather(*(fleet.ask(i, r) for i, r in enumerate(six_prompts())))
        fleet.exchange.end()
        await fleet.end("it died", "it died")
        return made

    assert_same(run(work()), expected["T=1"])


def test_cancelled_requests_are_stopped(engines: list[RolloutEngine], expected: dict[str, list[Rollout]]) -> None:
    async def work() -> list[Any]:
        fleet = await Fleet(engines, 3).begin()
        asked = [asyncio.create_task(fleet.ask(i, r)) for i, r in enumerate(six_prompts())]
        await fleet.until_some_are_under_way()
        for task in asked[::3]:
            task.cancel()
        made = await asyncio.gather(*asked, return_exceptions=True)
        await fleet.end()
        return made

    made = run(work())
    kept = [i for i in range(len(made)) if i % 3]
    assert all(isinstance(made[i], asyncio.CancelledError) or made[i].finished for i in range(0, len(made), 3))
    assert_same([made[i] for i in kept], [expected["T=1"][i] for i in kept])


class SlowLink(LoopLink):
    """A link on which requests and answers are slow."""

    async def __call__(self, method: Callable[..., object], *arguments: Any) -> Any:
        if method is not StragglerExchange.add:
            return await super().__call__(method, *arguments)
        await asyncio.sleep(0.03)
        starts = await super().__call__(method, *arguments)
        await asyncio.sleep(0.03)
        return starts


@pytest.mark.parametrize("after_s", [0.015, 0.045])
def test_a_cancelled_request_in_transit_costs_no_other_request(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], after_s: float
) -> None:
    async def work() -> list[Any]:
        fleet = Fleet(engines, 5)
        for worker, shard in enumerate(fleet.shards):
            shard._ask = SlowLink(fleet.exchange, worker)
        await fleet.begin()
        asked = [asyncio.create_task(fleet.ask(i, r)) for i, r in enumerate(six_prompts())]
        await fleet.until_some_are_under_way()
        for i in range(20):
            task = asyncio.create_task(fleet.ask(100 + i, six_prompts()[i]))
            await asyncio.sleep(after_s)
            task.cancel()
        made = await asyncio.gather(*asked)
        await asyncio.sleep(0.2)
        await fleet.end()
        return made

    assert_same(run(work()), expected["T=1"])


def test_a_refused_request_fails_only_for_its_caller(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]]
) -> None:
    long = replace(six_prompts()[0], prompt_token_ids=[5] * 5000)

    async def work() -> list[Any]:
        fleet = await Fleet(engines, 6).begin()
        asked = [asyncio.create_task(fleet.ask(i, r)) for i, r in enumerate(six_prompts())]
        await fleet.until_some_are_under_way()
        with pytest.raises(REFUSALS, match="5000"):
            await fleet.ask(100, long)
        made = await asyncio.gather(*asked)
        await fleet.end()
        return made

    assert_same(run(work()), expected["T=1"])


@pytest.mark.parametrize("seed", [7, 8])
def test_an_engine_alone_leaves_the_requests_of_others(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], seed: int
) -> None:
    class Broken(StreamingEngine):
        num_outputs = 0

        async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
            async for output in super().generate(prompt, params, request_id):
                self.num_outputs += 1
                if request_id.startswith("specrollout") and self.num_outputs > 200:
                    raise RuntimeError("it is broken")
                yield output

    async def work() -> list[Any]:
        fleet = Fleet(engines, seed)
        fleet.streams[0] = Broken(engines[0])  # it steps this engine
        fleet.shards[0]._engine = StreamEngine(fleet.streams[0].generate, 6)
        await fleet.begin()
        made = await asyncio.gather(*(fleet.ask(i, r) for i, r in enumerate(six_prompts())))
        await fleet.end("RuntimeError: it is broken", None)
        return made

    assert_same(run(work()), expected["T=1"])


def test_an_attempt_that_ends_with_an_empty_record_has_ended() -> None:
    """vLLM reports an aborted request this way."""

    async def aborted(prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        for tokens, reason in (([5, 6], None), ([], "abort")):
            await asyncio.sleep(0.02)
            yield SimpleNamespace(outputs=[_record(tokens, reason)])

    def _record(tokens: list[int], reason: str | None) -> Any:
        logprobs = [{t: SimpleNamespace(logprob=-1.0)} for t in tokens]
        return SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)

    async def work() -> tuple[dict[int, Any], dict[int, str]]:
        worker, parts, finished = StreamEngine(aborted, 1), {}, {}
        orders = TurnOrders(((7, as_sent),), seconds=0.03)
        while not finished:
            result = await worker.turn(orders)
            parts.update(result.parts)
            finished.update(result.finished)
            orders = TurnOrders(seconds=0.03)
        return parts, finished

    params = RolloutSamplingParams(max_tokens=8, extra_args={EXTRA_ARGS_KEY: {"seed": 1}})
    as_sent = shard_request((0, 0), {"prompt_token_ids": [1, 2]}, params)
    assert run(work()) == ({7: ([], [])}, {7: "abort"})


def test_new_weights_end_races_and_hold_new_requests(engines: list[RolloutEngine], plain: RolloutEngine) -> None:
    """Each token is sampled from one of the two policies: first the old one, then the new one."""
    old = load_file(STEP_ADDER / "model.safetensors")
    new = noisy(old, 1)

    async def work() -> tuple[list[Any], int]:
        fleet = await Fleet(engines, 4).begin()
        asked = [asyncio.create_task(fleet.ask(i, r)) for i, r in enumerate(six_prompts())]
        await fleet.until_some_are_under_way()
        assert await asyncio.to_thread(fleet.exchange.pause) == ()
        under_way = [
            r for key in fleet.exchange._coordinator._active for r in [fleet.exchange._coordinator.responses[key]]
        ]
        assert under_way and all(len(r.attempts) <= 1 for r in under_way)
        held = [set(shard._engine._attempts) for shard in fleet.shards]
        late = asyncio.create_task(fleet.ask(50, six_prompts()[0]))
        await asyncio.sleep(0.1)
        assert all(set(shard._engine._attempts) <= names for shard, names in zip(fleet.shards, held, strict=True))
        for engine in engines:
            engine.load_weights(new.items())
        await asyncio.to_thread(fleet.exchange.resume)
        made = await asyncio.gather(*asked)
        await late
        await fleet.end()
        return made, len(under_way)

    made, num_under_way = run(work())
    first = plain.generate(six_prompts())
    plain.load_weights(new.items())
    again = plain.generate(six_prompts())
    for engine in (*engines, plain):
        engine.load_weights(old.items())
    made = [Rollout.from_vllm(o) for o in made]
    is_old = [m.token_ids == e.token_ids for m, e in zip(made, first, strict=True)]
    assert len(made) - sum(is_old) <= num_under_way + 6 and sum(is_old) < len(made)
    assert all(m.token_ids[0] in (a.token_ids[0], b.token_ids[0]) for m, a, b in zip(made, first, again, strict=True))
