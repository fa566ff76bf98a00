# SPDX-License-Identifier: Apache-2.0
"""Requests of an asynchronous engine that begin again with new weights."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import STEP_ADDER
from safetensors.torch import load_file
from shard_world import StreamingEngine, given
from test_racing import MAX_TOKENS, SAMPLINGS, noisy, six_prompts
from test_rolling import FREE, Stream, charge

from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.generation.engine.ahead_branches import begun_again
from nemo_specrollout.generation.engine.requests import (
    EXTRA_ARGS_KEY,
    Rollout,
    RolloutRequest,
    as_bytes,
)
from nemo_specrollout.run_ahead import rolling
from nemo_specrollout.run_ahead.one_policy import InterruptedShare, OnePolicyStream, branch_request
from nemo_specrollout.run_ahead.rolling_stream import RollingStream
from nemo_specrollout.stragglers.attempts import Response

pytestmark = pytest.mark.integration

WORK = six_prompts()[:6]
BLOCK = SpecrolloutConfig(drafters=(SuffixDrafterConfig(),), run_ahead=RunAheadConfig(most_drafts=8))
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
        stream = StreamingEngine(engine)
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
        await one.change_begins()
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
        stream = StreamingEngine(engine)
        begun: list[str] = []

        async def generate(prompt: Any, params: Any, request_id: str) -> Any:
            begun.append(request_id)
            async for output in stream.generate(prompt, params, request_id):
                yield output

        one = OnePolicyStream(generate)

        async def ask() -> list[int]:
            outputs = [o async for o in one.generate(*sent(engine, row), request_id="late")]
            return Rollout.from_vllm(outputs[-1]).token_ids

        await one.change_begins()
        asked = asyncio.create_task(ask())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not begun
        engine.load_weights(NEW.items())
        one.change_ends()
        await one.change_begins()  # the waiting task has not run since the end of the first change
        for _ in range(10):
            await asyncio.sleep(0)
        assert not begun
        one.change_ends()
        return await asked

    assert asyncio.run(work()) == new[row]


def test_a_request_that_begins_again_brings_its_longest_text(engine: RolloutEngine) -> None:
    """The text is drafts. The second attempt is stopped after its first output, and the third before it has any."""
    seen: list[Any] = []
    stream = StreamingEngine(engine)  # one for all attempts: the first one of two would read what belongs to the second

    async def change() -> None:
        await one.change_begins()
        one.change_ends()

    async def generate(prompt: Any, params: Any, request_id: str) -> Any:
        seen.append(params)
        attempt = len(seen)
        if attempt == 3:
            await change()
            return
        async for output in stream.generate(prompt, params, request_id):
            if len(output.outputs[0].token_ids) > {1: 9, 2: 0}.get(attempt, MAX_TOKENS):
                await change()
            yield output

    one = OnePolicyStream(generate)

    async def work() -> list[Any]:
        return [o async for o in one.generate(*sent(engine, 0), request_id="r")]

    (output,) = asyncio.run(work())
    texts = [p.extra_args[EXTRA_ARGS_KEY].get("ahead") for p in seen]
    assert len(texts) == 4 and texts[0] is None
    assert len(texts[1]) >= 40 and texts[2].startswith(texts[1]) and texts[3] == texts[2]
    assert as_bytes(output.outputs[0].token_ids).startswith(texts[3])


LONG = {"ignore_eos": True, "stop_token_ids": [], "max_tokens": 160}
"""Responses that are long enough for branches."""


class Branching:
    """An asynchronous engine whose requests begin again with new weights, and have branches in its free slots."""

    def __init__(self, engine: RolloutEngine, most_branches: int = 3, **sampling: Any) -> None:
        self.engine = engine
        self.sampling = sampling
        self.stream = Stream(engine)
        self.rolling = RollingStream(self.stream, self.stream.generate, branch_request, most_branches)
        self.one = OnePolicyStream(self._generate, self.rolling if most_branches else None)
        self.version = 0
        self.num_tokens = 0
        """Tokens that requests have got so far, over all attempts."""

    async def _generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        num_before = 0
        async for output in self.rolling.own(self.stream.generate(prompt, params, request_id), params):
            self.num_tokens += len(output.outputs[0].token_ids) - num_before
            num_before = len(output.outputs[0].token_ids)
            yield output

    async def ask(self, i: int) -> tuple[int, list[int]]:
        """Returns the tokens of a request, and the version of the weights that they are of."""
        prompt = {"prompt_token_ids": list(WORK[i].prompt_token_ids)}
        params = given(self.engine, WORK[i], self.sampling)
        (output,) = [o async for o in self.one.generate(prompt, params, request_id=f"r{i}")]
        return self.version, Rollout.from_vllm(output).token_ids

    async def change(self, weights: dict[str, Any]) -> None:
        await self.one.change_begins()
        assert not self.rolling.has_plan and not self.rolling._tasks, "no branch is in the engine"
        self.engine.load_weights(weights.items())
        self.version += 1
        self.one.change_ends()

    def branches(self) -> set[tuple[int, int]]:
        """Seeds and positions of the branches that leave the texts of requests."""
        early = self.rolling._early
        flights = [] if early is None else early.early._flights.values()
        return {(f.row.row.seed, path.position) for f in flights for path in f.paths[1:] if path.parent == 0}


@pytest.fixture
def asks_often(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further requests cost the engine nothing, and it may ask its worker for near-ties at any time."""
    charge(engine, FREE, monkeypatch)
    monkeypatch.setattr(rolling, "_TIME_SHARE", 1.0)


@pytest.mark.usefixtures("asks_often")
@pytest.mark.parametrize("most_branches", [3, 0])
def test_a_request_follows_its_branch_when_an_update_flips_a_near_tie(
    engine: RolloutEngine, plain: RolloutEngine, most_branches: int
) -> None:
    """Where the small update first changes a text, the text with the runner-up is there already, unless branches are off."""
    sampling = {**SAMPLINGS["T=1"], **LONG}
    new = noisy(OLD, 1, 0.015)
    expected = []
    for weights in (OLD, new):
        plain.load_weights(weights.items())
        expected.append([r.token_ids for r in plain.generate(WORK[:4], **sampling)])
    seeds = [request.noise_seed(engine._seed) for request in WORK[:4]]
    parting = {
        (seed, int(np.flatnonzero(np.array(old) != np.array(later))[0]))
        for seed, old, later in zip(seeds, *expected, strict=True)
        if old != later
    }
    assert parting

    async def work() -> tuple[list[Any], Any, Any]:
        branching = Branching(engine, most_branches, **sampling)
        branching.one.expect(0.01)
        asked = [asyncio.create_task(branching.ask(i)) for i in range(4)]
        while branching.num_tokens < 4 * 100 or (most_branches and not branching.branches() & parting):
            assert not any(task.done() for task in asked)
            await asyncio.sleep(0.001)
        await branching.change(new)
        found = list(await asyncio.gather(*asked))
        assert branching.one.take_figures().num_branches == 0 or most_branches
        return found, branching.one.take_kept(), branching.one.take_kept()

    found, kept, nothing = asyncio.run(work())
    assert found == [(1, tokens) for tokens in expected[1]]
    assert (kept.num_followed > 0, kept.num_right > kept.num_kept) == (most_branches > 0,) * 2
    assert kept.num_texts == 4 and kept.num_made >= 4 * 90 and nothing.num_texts == 0
    assert kept.num_flips > 0 or not most_branches, "near-ties of the texts are known with branches"


@pytest.mark.usefixtures("asks_often")
@pytest.mark.parametrize(("sampling", "num_slots"), [("T=1", 4), ("T=0", 64)])
def test_branches_change_no_token(
    engine: RolloutEngine,
    plain: RolloutEngine,
    monkeypatch: pytest.MonkeyPatch,
    sampling: str,
    num_slots: int,
) -> None:
    """Weights change three times amid requests, of which one is cancelled. With four slots branches give way to requests."""
    way = {**SAMPLINGS[sampling], **LONG, "max_tokens": 90}
    versions = [OLD, *(noisy(OLD, i, 0.03) for i in (1, 2, 3))]

    async def work() -> list[Any]:
        branching = Branching(engine, **way)
        branching.one.expect(0.1)
        monkeypatch.setattr(branching.stream.vllm_config.scheduler_config, "max_num_seqs", num_slots)
        asked = [asyncio.create_task(branching.ask(i)) for i in range(3)]
        for change, num_tokens in enumerate((60, 200, 330)):
            while branching.num_tokens < num_tokens or (change == 0 and not branching.branches()):
                await asyncio.sleep(0.001)
            if change == 1:
                asked.pop(0).cancel()
            await branching.change(versions[change + 1])
            asked.append(asyncio.create_task(branching.ask(change + 3)))
        found = list(await asyncio.gather(*asked))
        assert branching.one.take_figures().num_branches > 0
        await branching.one.change_begins()
        assert not engine._llm.llm_engine.has_unfinished_requests()
        return found

    found = asyncio.run(work())
    for number, (version, tokens) in enumerate(found, 1):
        plain.load_weights(versions[version].items())
        assert tokens == plain.generate([WORK[number]], **way)[0].token_ids
    assert {version for version, _ in found} >= {3}


@pytest.mark.unit
def test_the_share_of_requests_that_changes_interrupt() -> None:
    share = InterruptedShare()
    assert share.probability == 1.0
    for _ in range(4):
        share.ended(is_interrupted=False)
    assert share.probability == pytest.approx(0.2)
    share.change_begins()
    for _ in range(20):
        share.ended(is_interrupted=True)
    assert share.probability > 0.9


def test_the_text_of_an_older_attempt_goes_on_where_the_newer_one_stops() -> None:
    older = as_bytes([5, 6, 7, 8])
    assert begun_again([], older, ()) == (older, ())
    assert begun_again([5, 9], older, ()) == (as_bytes([5, 9, 7, 8]), ())
    assert begun_again([1, 2, 3, 4, 5], older, ()) == (as_bytes([1, 2, 3, 4, 5]), ())


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
