# SPDX-License-Identifier: Apache-2.0
"""Requests of coming steps in the free slots of an engine change no token of its own requests, whatever happens to them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from conftest import STEP_ADDER
from safetensors.torch import load_file
from shard_world import StreamingEngine
from test_equality import assert_equal
from test_racing import SAMPLINGS, noisy, six_prompts
from tqdm import tqdm

from lab.local.engine import Generation, RolloutEngine
from nemo_specrollout.config.block import BudgetConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import SuffixDrafterConfig
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest, as_bytes
from nemo_specrollout.run_ahead.early_requests import EarlyMade, EarlyRequests, early_params
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyStart
from nemo_specrollout.run_ahead.rolling import StaleCache
from nemo_specrollout.run_ahead.rolling_engine import RollingEngine
from nemo_specrollout.run_ahead.rolling_stream import RollingStream
from nemo_specrollout.run_ahead.texts import KeptCounts, TextAhead, compare
from nemo_specrollout.telemetry.sample_stats import SampleStats

pytestmark = pytest.mark.integration

MAX_TOKENS = 80
SLOTS = 6
BLOCK = SpecrolloutConfig(
    drafters=(SuffixDrafterConfig(),), run_ahead=RunAheadConfig(most_drafts=8), budget=BudgetConfig("fixed", k=4)
)
OLD = load_file(STEP_ADDER / "model.safetensors")
FREE = ([0.01] * (SLOTS + 1), 0.0)
"""Step times with which a further request costs nothing."""
DEAR = ([0.01 * n for n in range(SLOTS + 1)], 0.001)
"""Step times with which each request costs as much as the first."""


@dataclass(frozen=True)
class RequestRow:
    """A request of the tests as a row of a coming step."""

    seed: int
    request: RolloutRequest


def of_step(step: int) -> list[RolloutRequest]:
    """The requests of a step, which has a policy version of its own. There are more than the engine has slots."""
    return [replace(request, policy_version=step) for request in six_prompts()[: SLOTS + 3]]


class Rolling:
    """An engine with early requests, and the texts that it has made of each step."""

    def __init__(self, engine: RolloutEngine, most_branches: int = 2, **sampling: Any) -> None:
        self.engine = engine
        self.sampling = sampling
        self.rolling = RollingEngine(engine._llm, self._request_of, most_branches)
        self.texts: dict[int, TextAhead] = {}
        self.starts: list[EarlyStart] = []

    def _request_of(self, start: EarlyStart) -> tuple[Any, Any]:
        self.starts.append(start)
        text, params = self.engine._text_and_params(start.row.row.request, self.sampling)  # type: ignore[attr-defined]
        return {"prompt_token_ids": [*text, *start.prefix]}, early_params(params, start)

    def row(self, request: RolloutRequest, ahead: int) -> EarlyRow:
        seed = request.noise_seed(self.engine._seed)
        return EarlyRow(list(request.prompt_token_ids), RequestRow(seed, request), ahead, self.texts.get(seed))

    def rows(self, step: int, num_steps: int) -> list[EarlyRow]:
        return [self.row(request, k) for k in range(1, num_steps + 1) for request in of_step(step + k)]

    def plan(self, step: int, num_steps: int, scale: float = 1e-3) -> None:
        self.rolling.plan(self.rows(step, num_steps), scale, kept=0.9)

    def generate(self, step: int) -> list[Rollout]:
        """Makes the responses of a step, whose requests bring what was made for them."""
        return self.engine.generate([self.with_text(request) for request in of_step(step)], **self.sampling)

    def with_text(self, request: RolloutRequest) -> RolloutRequest:
        text = self.texts.get(request.noise_seed(self.engine._seed))
        return request if text is None else replace(request, ahead=text.tokens, branches=text.branches)

    def texts_of(self, step: int) -> list[TextAhead]:
        """What is known of a step's requests."""
        seeds = [request.noise_seed(self.engine._seed) for request in of_step(step)]
        return [self.texts[seed] for seed in seeds if seed in self.texts]

    @property
    def early(self) -> EarlyRequests:
        assert self.rolling._early is not None
        return self.rolling._early

    def end(self) -> EarlyMade:
        made = self.rolling.end(keeps_cache=False)
        self.texts.update(made.texts)
        assert not self.engine._llm.llm_engine.has_unfinished_requests()
        return made


def load_noisy(step: int, *engines: RolloutEngine) -> None:
    """Gives engines the weights of a step."""
    weights = noisy(OLD, step) if step else OLD
    for engine in engines:
        engine.load_weights(weights.items())


def interrupted() -> Any:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), MAX_TOKENS)


@pytest.fixture(scope="module")
def shared(start_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return start_engine(STEP_ADDER, BLOCK, MAX_TOKENS, max_num_seqs=SLOTS)


@pytest.fixture
def engine(shared: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> RolloutEngine:
    """The engine with its first weights. A further request costs it nothing."""
    shared.load_weights(OLD.items())
    charge(shared, FREE, monkeypatch)
    return shared


def charge(engine: RolloutEngine, prices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives an engine's worker these step times."""
    name = WorkerCalls.specrollout_step_seconds.__name__
    native = engine._llm.collective_rpc

    def answer(method: Any, *arguments: Any, **options: Any) -> Any:
        return [prices] if method == name else native(method, *arguments, **options)

    monkeypatch.setattr(engine._llm, "collective_rpc", answer)


@pytest.mark.parametrize(("num_steps", "sampling"), [(1, "T=1"), (3, "T=1"), (2, "T=0")])
def test_several_phases_with_changed_weights(
    engine: RolloutEngine, plain: RolloutEngine, num_steps: int, sampling: str
) -> None:
    """Each step's requests are those of plain decoding, whatever was made for them under earlier weights."""
    rolling = Rolling(engine, **SAMPLINGS[sampling])
    for step in range(4):
        load_noisy(step, engine, plain)
        rolling.plan(step, num_steps)
        assert_equal(rolling.generate(step), plain.generate(of_step(step), **rolling.sampling))
        while step == 2 and rolling.rolling.slice(0.05):
            pass
        figures = rolling.end().figures
        assert figures.num_steps_beside and figures.num_tokens
    assert all(text.is_complete for text in rolling.texts_of(3)), "the slices of step 2 ended them"


def test_a_text_is_what_the_weights_sample_of_it(engine: RolloutEngine, plain: RolloutEngine) -> None:
    """Under the same weights a complete text is the response, and the others are beginnings of it."""
    rolling = Rolling(engine)
    load_noisy(0, plain)
    rolling.plan(0, 1)
    rolling.generate(0)
    rolling.rolling.slice(0.0)
    rolling.end()
    expected = [as_bytes(r.token_ids) for r in plain.generate(of_step(1))]
    texts = rolling.texts_of(1)
    assert len(texts) > 2
    for request, whole in zip(of_step(1), expected, strict=True):
        text = rolling.texts.get(request.noise_seed(engine._seed))
        if text is not None:
            assert text.tokens == whole if text.is_complete else whole.startswith(text.tokens)


@pytest.mark.parametrize("seed", range(3))
def test_own_requests_come_at_any_moment_and_early_ones_are_stopped_at_any(
    engine: RolloutEngine, plain: RolloutEngine, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    load_noisy(0, plain)
    rolling = Rolling(engine)
    waiting = of_step(0)
    names: dict[str, int] = {}
    done: dict[int, Rollout] = {}
    rolling.plan(0, 2)
    while len(done) < len(of_step(0)):
        if waiting and (not engine._llm.llm_engine.has_unfinished_requests() or rng.random() < 0.1):
            number = len(names)
            new = waiting[: rng.integers(1, 4)]
            del waiting[: len(new)]
            names |= {name: number + i for i, name in enumerate(engine.submit(new, {}))}
        if rng.random() < 0.04:
            rolling.rolling.end(keeps_cache=True)
            rolling.plan(0, 2)
        early = rolling.early
        if early.running and rng.random() < 0.1:
            rolling.rolling._stop(early, [int(rng.choice(early.running))])
        if engine._llm.llm_engine.has_unfinished_requests():
            done |= {names[name]: rollout for name, rollout in engine.step().items()}
    assert_equal([done[i] for i in range(len(done))], plain.generate(of_step(0)))
    rolling.end()


def test_branches_at_near_ties_foresee_what_new_weights_sample(engine: RolloutEngine, plain: RolloutEngine) -> None:
    """Idle time ends the texts and decodes branches. A small update flips near-ties, and some branches are the new texts."""
    rolling = Rolling(engine)
    rolling.plan(0, 1, scale=0.1)
    rolling.generate(0)
    while rolling.rolling.slice(0.5):
        pass
    figures = rolling.end().figures
    assert figures.num_texts == len(of_step(1)) and figures.num_branches > figures.num_texts
    for each in (engine, plain):
        each.load_weights(noisy(OLD, 1, 0.015).items())
    found = rolling.generate(1)
    assert_equal(found, plain.generate(of_step(1)))
    texts = rolling.texts_of(1)
    assert all(text.is_complete and len(text.gaps) * 2 == len(text.tokens) for text in texts)
    counts = KeptCounts()
    for text, rollout in zip(texts, found, strict=True):
        counts = counts.plus(compare(text, rollout.token_ids))
    assert counts.num_flips > 1 and counts.num_runners_up > 0.5 * counts.num_flips
    assert counts.num_followed > 0 and counts.num_right > counts.num_kept


def test_early_requests_give_way_when_slots_are_needed(engine: RolloutEngine, plain: RolloutEngine) -> None:
    """All slots are given to early requests. Own ones get theirs with their first step, and no more are taken than needed."""
    load_noisy(0, plain)
    rolling = Rolling(engine)
    rolling.plan(0, 1)
    rolling.rolling.slice(0.0)
    early = rolling.early
    assert early.num_running == SLOTS
    own = of_step(0)[: SLOTS - 1]
    ids = engine.submit(own, {})
    assert engine._llm.llm_engine.get_num_unfinished_requests() == len(own)
    engine.step()
    engine.step()  # an engine that schedules asynchronously reports a step late
    assert early.num_running == 1 and early.figures.num_stopped == SLOTS - 1
    assert all(engine.progress(name)[0] for name in ids)
    done: dict[str, Rollout] = {}
    while engine._llm.llm_engine.has_unfinished_requests():
        done |= engine.step()
    assert_equal([done[name] for name in ids], plain.generate(own))
    rolling.end()


def test_kv_that_is_too_small_for_early_requests(
    start_engine: Callable[..., RolloutEngine], plain: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early requests would fill the KV cache. Own ones are never preempted for them, and get the same tokens."""
    small = start_engine(STEP_ADDER, BLOCK, MAX_TOKENS, max_num_seqs=SLOTS, kv_cache_memory_bytes=1 << 22)
    charge(small, FREE, monkeypatch)
    load_noisy(0, plain)
    rolling = Rolling(small)
    rolling.plan(0, 2)
    while rolling.rolling.slice(0.01) and rolling.early.figures.num_steps_alone < 30:
        pass
    assert 0 < rolling.early.num_running < SLOTS, "less than the slots, because KV is short"
    assert_equal(rolling.generate(0), plain.generate(of_step(0)))
    rolling.end()


def test_a_price_forbids_early_requests(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that costs as much as it spares is not decoded beside own ones, but in an engine without them."""
    charge(engine, DEAR, monkeypatch)
    rolling = Rolling(engine)
    rolling.plan(0, 2)
    rolling.generate(0)
    assert rolling.early.figures.num_steps_beside == 0 and rolling.early.figures.num_texts == 0
    rolling.rolling.slice(0.0)
    assert rolling.end().figures.num_texts > 0


def test_nothing_is_begun_beside_own_requests_before_step_times_are_known(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge(engine, None, monkeypatch)
    rolling = Rolling(engine)
    rolling.plan(0, 1)
    rolling.generate(0)
    assert rolling.end().figures.num_texts == 0


def test_what_vllm_refuses_and_errors_of_a_step_harm_no_own_request(
    engine: RolloutEngine, plain: RolloutEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_noisy(0, plain)
    rolling = Rolling(engine)
    too_long = replace(of_step(1)[0], prompt_token_ids=[5] * 600)
    rows = [rolling.row(request, 1) for request in (too_long, *of_step(1)[1:])]
    rolling.rolling.plan(rows, 1e-3, 0.9)
    generation = Generation(engine, of_step(0))
    while not rolling.early.num_running:
        generation.advance(0.0)
    assert "refuses a request of a coming step" in caplog.text
    with monkeypatch.context() as broken:
        broken.setitem(rolling.rolling._native, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generation.advance()
    assert not engine._llm.llm_engine.has_unfinished_requests(), "its own requests are gone"
    assert_equal(rolling.generate(0), plain.generate(of_step(0)))
    assert sum(len(start.row.prompt) == 600 for start in rolling.starts) == 1, "it would be refused again"
    assert rolling.end().texts


def test_vllms_own_generate_sees_its_own_requests_only(engine: RolloutEngine, plain: RolloutEngine) -> None:
    """Its outputs and its bar of progress are those of the prompts that it was given, also if early ones run before."""
    load_noisy(0, plain)
    rolling = Rolling(engine)
    rolling.plan(0, 1)
    rolling.rolling.slice(0.0)
    texts, params = zip(*(engine._text_and_params(request, {}) for request in of_step(0)), strict=True)
    totals: list[int] = []

    def bar(*arguments: Any, **options: Any) -> Any:
        totals.append(options.get("total") or len(list(arguments[0])))
        return tqdm(*arguments, **{**options, "file": StringIO()})

    outputs = engine._llm.generate([{"prompt_token_ids": text} for text in texts], list(params), use_tqdm=bar)
    assert set(totals) == {len(of_step(0))}
    assert_equal([Rollout.from_vllm(output) for output in outputs], plain.generate(of_step(0)))
    rolling.end()
    assert "step" not in vars(engine._llm.llm_engine), "the engine is as it was"


def test_texts_made_ahead_leave_no_sample_stats(engine: RolloutEngine) -> None:
    """A request has the stats of the policy that it is sampled from, also if its text was begun in an earlier step."""
    rolling = Rolling(engine)
    rolling.plan(0, 1)
    rolling.rolling.slice(0.2)
    rolling.end()
    version = engine.run_in_worker(lambda worker: worker.specrollout_policy_version)
    load_noisy(1, engine)
    rolling.generate(1)
    for request, stats in zip(of_step(1), engine.take_sample_stats(of_step(1)), strict=True):
        assert stats is not None
        assert SampleStats.from_wire(stats).policy_spans == ((version + 1, len(request.prompt_token_ids)),)


def test_cached_prefixes_that_stay_end_the_run(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(StaleCache):
        Rolling(engine).rolling.end(keeps_cache=False)
    assert Rolling(engine).rolling.end(keeps_cache=True).texts == {}  # before the same weights decode again


class Stream(StreamingEngine):
    """An asynchronous engine, with what `RollingStream` asks of one."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self._llm = engine._llm
        self.output_processor = self._engine.output_processor
        self.vllm_config = self._engine.vllm_config

    async def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return list(self._llm.collective_rpc(method, args=args))

    async def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())


class RollingAsync(Rolling):
    """The same for an asynchronous engine, whose requests are tasks."""

    def __init__(self, engine: RolloutEngine, **sampling: Any) -> None:
        super().__init__(engine, **sampling)
        self.stream = Stream(engine)
        self.rolling_stream = RollingStream(self.stream, self.stream.generate, self._request_of, 2)
        self._num_asked = 0

    async def plan_stream(self, step: int, num_steps: int) -> None:
        await self.rolling_stream.plan(self.rows(step, num_steps), 1e-3, 0.9)

    async def ask(self, request: RolloutRequest) -> Rollout:
        text, params = self.engine._text_and_params(self.with_text(request), self.sampling)
        self._num_asked += 1
        prompt = {"prompt_token_ids": text}
        native = self.stream.generate(prompt, params, request_id=f"own-{self._num_asked}")
        outputs = [output async for output in self.rolling_stream.own(native, params)]
        return Rollout.from_vllm(outputs[-1])

    async def end_stream(self) -> EarlyMade:
        made = await self.rolling_stream.end(keeps_cache=False)
        self.texts.update(made.texts)
        assert not self.engine._llm.llm_engine.has_unfinished_requests()
        return made


@pytest.mark.parametrize("num_steps", [1, 2])
def test_an_asynchronous_engine_in_several_phases(engine: RolloutEngine, plain: RolloutEngine, num_steps: int) -> None:
    """Requests of its own come all at once or one after another, and get what plain decoding gives them."""

    async def work() -> None:
        rolling = RollingAsync(engine)
        for step in range(3):
            load_noisy(step, engine, plain)
            await rolling.plan_stream(step, num_steps)
            asked = []
            for request in of_step(step):
                asked.append(asyncio.create_task(rolling.ask(request)))
                await asyncio.sleep(0.02 * (step == 1))
            assert_equal(list(await asyncio.gather(*asked)), plain.generate(of_step(step)))
            while step == 1 and await rolling.rolling_stream.wait(0.05):
                pass
            made = await rolling.end_stream()
            assert made.figures.num_tokens
        assert all(text.is_complete for text in rolling.texts_of(2)), "the wait of step 1 ended them"

    asyncio.run(work())


def test_tasks_give_way_when_slots_are_needed(engine: RolloutEngine, plain: RolloutEngine) -> None:
    load_noisy(0, plain)

    async def work() -> list[Rollout]:
        rolling = RollingAsync(engine)
        await rolling.plan_stream(0, 1)
        early = rolling.rolling_stream._early
        assert early is not None
        assert early.num_running == 0, "requests of its own are about to come"
        while early.num_running < SLOTS:
            assert await rolling.rolling_stream.wait(0.005)
        asked = [asyncio.create_task(rolling.ask(request)) for request in of_step(0)[:4]]
        await asyncio.sleep(0)
        assert early.num_running == SLOTS - 4
        found = list(await asyncio.gather(*asked))
        await rolling.end_stream()
        assert early.figures.num_stopped == 4
        return found

    assert_equal(asyncio.run(work()), plain.generate(of_step(0)[:4]))
