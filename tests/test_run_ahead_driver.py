# SPDX-License-Identifier: Apache-2.0
"""What the driver tells engines in Ray actors: changes of weights, also such that fail, and plans of coming steps."""

from collections.abc import AsyncGenerator, Iterator
from copy import copy
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from own_ray import ray_for_actors_of

from lab.local.own_ray import ray
from nemo_specrollout.config.block import RunAheadConfig
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, as_bytes
from nemo_specrollout.nemo_rl import gym_prompts
from nemo_specrollout.nemo_rl.gym_prompts import GymPrompts
from nemo_specrollout.nemo_rl.ray_calls import EngineClient
from nemo_specrollout.nemo_rl.row_seeds import Row
from nemo_specrollout.run_ahead.driver import RunAhead
from nemo_specrollout.run_ahead.early_requests import EarlyFigures, EarlyMade
from nemo_specrollout.run_ahead.early_texts import EarlyRow
from nemo_specrollout.run_ahead.one_policy import OnePolicyStream
from nemo_specrollout.run_ahead.text_store import TextStore
from nemo_specrollout.run_ahead.texts import KeptCounts, TextAhead, TextsAhead

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_for_actors_of(__name__):
        yield


class Params:
    """vLLM's sampling parameters of a request that brings no text."""

    extra_args: ClassVar[dict[str, Any]] = {EXTRA_ARGS_KEY: {}}

    def clone(self) -> "Params":
        return copy(self)


class Engine:
    """An asynchronous engine's actor. Its texts name the weights that they are from."""

    def __init__(self) -> None:
        self._one_policy = OnePolicyStream(self._decode)
        self._weights = 1
        self._num_begun = 0

    async def _decode(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        self._num_begun += 1
        yield SimpleNamespace(weights=self._weights, outputs=[SimpleNamespace(token_ids=[5])])

    async def generate(self) -> list[int]:
        return [output.weights async for output in self._one_policy.generate(None, Params(), "r")]

    async def specrollout_weights_change_begins(self) -> None:
        await self._one_policy.change_begins()

    async def specrollout_weights_change_ends(self) -> None:
        self._one_policy.change_ends()

    async def load(self, weights: int) -> None:
        self._weights = weights

    async def num_begun(self) -> int:
        return self._num_begun


TOKENS_A_SLICE = 3


class Planner:
    """A synchronous engine's actor. Token i of the text of seed s is s + i, so that a text shows how far it was made."""

    def __init__(self) -> None:
        self._rows: list[EarlyRow] | None = None
        self._made: dict[int, int] = {}
        self._num_generated = 0
        self._texts = TextsAhead()
        self._calls: list[tuple[str, Any]] = []

    def generated(self) -> None:
        self._num_generated += 1

    def calls(self) -> list[tuple[str, Any]]:
        calls = self._calls
        self._calls = []
        return calls

    def respond(self, seed: int, num_tokens: int) -> None:
        self._texts.bring(seed)
        self._texts.compare(seed, [seed + i for i in range(num_tokens)])

    def specrollout_texts_ahead(self, texts: dict[int, TextAhead]) -> None:
        self._texts.replace(texts)
        self._calls.append(("texts", {seed: text.num_tokens for seed, text in texts.items()}))

    def specrollout_plan_ahead(self, rows: list[EarlyRow], scale: float, kept: float) -> None:
        assert self._rows is None and scale > 0 and 0 <= kept <= 1
        self._rows = rows
        known = {row.row.seed: 0 if row.known is None else row.known.num_tokens for row in rows}
        self._made = dict(known)
        self._calls.append(("plan", [(row.row.seed, row.steps_ahead, known[row.row.seed]) for row in rows]))

    def specrollout_run_ahead(self, seconds: float, after: int) -> bool | None:
        if self._num_generated < after:
            return None
        for row in self._rows or ():
            if self._made[row.row.seed] < 2 * TOKENS_A_SLICE * row.steps_ahead:
                self._made[row.row.seed] += TOKENS_A_SLICE
                return True
        return False

    def specrollout_end_ahead(self, keeps_cache: bool) -> EarlyMade:
        made = {seed: as_bytes([seed + i for i in range(n)]) for seed, n in self._made.items() if n}
        self._calls.append(("end", keeps_cache))
        self._rows = None
        self._made = {}
        texts = {seed: TextAhead(text) for seed, text in made.items()}
        return EarlyMade(texts, EarlyFigures(num_texts=len(texts), alone_s=2.0))

    def specrollout_take_kept(self) -> KeptCounts:
        return self._texts.take_kept()


class Engines:
    """NeMo-RL's group of the engine actors, of one GPU each."""

    def __init__(self, num_engines: int, kind: type = Engine) -> None:
        self.dp_size = num_engines
        self.actors = [ray.remote(kind).options(num_cpus=0).remote() for _ in range(num_engines)]

    def get_dp_leader_worker_idx(self, engine: int) -> int:
        return engine

    def run_single_worker_single_data(self, method: str, worker: int, **arguments: Any) -> Any:
        return getattr(self.actors[worker], method).remote(**arguments)


def killed_at_end(engines: Engines) -> Iterator[Engines]:
    yield engines
    for actor in engines.actors:
        ray.kill(actor)


@pytest.fixture
def engines(cluster: None) -> Iterator[Engines]:
    yield from killed_at_end(Engines(3))


def test_requests_of_all_engines_wait_for_the_end_of_a_change(engines: Engines) -> None:
    with EngineClient(engines).weights_change():
        asked = [actor.generate.remote() for actor in engines.actors]
        ray.get([actor.load.remote(2) for actor in engines.actors])
        assert ray.get([actor.num_begun.remote() for actor in engines.actors]) == [0, 0, 0]
    assert ray.get(asked, timeout=60) == [[2]] * 3


def test_a_refit_that_fails_leaves_no_request_waiting(engines: Engines) -> None:
    with pytest.raises(ZeroDivisionError), EngineClient(engines).weights_change():
        raise ZeroDivisionError
    assert ray.get([actor.generate.remote() for actor in engines.actors], timeout=60) == [[1]] * 3


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_an_engine_that_dies_leaves_no_request_of_others_waiting(engines: Engines, dead: int) -> None:
    ray.kill(engines.actors[dead])
    has_refitted = False
    with pytest.raises(ray.exceptions.RayActorError), EngineClient(engines).weights_change():
        has_refitted = True
    assert not has_refitted
    others = [actor for engine, actor in enumerate(engines.actors) if engine != dead]
    assert ray.get([actor.generate.remote() for actor in others], timeout=60) == [[1]] * 2


@pytest.fixture
def planners(cluster: None) -> Iterator[Engines]:
    yield from killed_at_end(Engines(2, Planner))


def rows_of(version: int) -> list[EarlyRow]:
    """Two rows, one for each engine. The seeds say which step they are of."""
    return [EarlyRow([1, 2], Row(1000 * version + 100 * i, 2)) for i in range(2)]


def calls_of(engines: Engines, engine: int) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = ray.get(engines.actors[engine].calls.remote())
    return calls


def wait_until_done(ahead: RunAhead) -> None:
    assert ahead._thread is not None
    ahead._thread.join(timeout=60)
    assert not ahead._thread.is_alive()


def test_texts_of_several_steps_pass_from_engines_to_their_steps(planners: Engines) -> None:
    """A plan brings back what the one before has made. Every engine gets all texts of the step whose weights it has."""
    ahead = RunAhead(EngineClient(planners), RunAheadConfig(steps=2))
    assert ahead.steps == 2
    ahead.plan(7, [rows_of(8), rows_of(9)])
    assert calls_of(planners, 1) == [("texts", {}), ("plan", [(8100, 1, 0), (9100, 2, 0)])]
    ahead.work(after=1)
    assert ahead._thread is not None and ahead._thread.is_alive()
    ray.get([actor.generated.remote() for actor in planners.actors])
    wait_until_done(ahead)
    ahead.end()
    assert calls_of(planners, 1) == [("end", False)]
    ahead.end()
    assert not calls_of(planners, 1), "there is nothing to end"

    ahead.plan(8, [rows_of(9), rows_of(10)])
    texts = {8000: 6, 8100: 6}
    assert calls_of(planners, 1) == [("texts", texts), ("plan", [(9100, 1, 12), (10100, 2, 0)])]
    ray.get([planners.actors[i].respond.remote(8000 + 100 * i, 8) for i in range(2)])
    figures, alarms = ahead.figures()
    found = {name.rpartition("/")[2]: value for name, value in figures.items()}
    assert not alarms and found["ahead_tokens"] == 12 and found["ahead_tokens_2"] == 24
    assert found["ahead_kept"] == found["ahead_right"] == 12 / 16 and found["ahead_texts"] == 2
    assert (ahead.num_texts, ahead.num_brought) == (2, 2)
    assert (found["ahead_begun"], found["ahead_s"], found["ahead_steps"]) == (4, 2.0, 2)
    ahead.end(keeps_cache=True)  # a validation comes, and the weights stay
    assert calls_of(planners, 0)[-1] == ("end", True)
    ahead.plan(8, [rows_of(9)])
    assert calls_of(planners, 0) == [("texts", texts), ("plan", [(9000, 1, 12)])]


def test_engines_whose_requests_begin_again_get_plans_without_rows(planners: Engines) -> None:
    """A plan tells them how far the next update will move scores. They are never idle, so no thread asks for slices."""
    ahead = RunAhead(EngineClient(planners), RunAheadConfig(), begins_again=True)
    ahead.plan(7, [])
    assert calls_of(planners, 1) == [("texts", {}), ("plan", [])]
    ahead.work(after=0)
    assert ahead._thread is None
    ahead.end(keeps_cache=True)
    assert calls_of(planners, 1) == [("end", True)]
    figures, alarms = ahead.figures()
    found = {name.rpartition("/")[2]: value for name, value in figures.items()}
    assert not alarms and (found["ahead_tokens"], found["ahead_s"], found["ahead_steps"]) == (0.0, 2.0, 0.0)


@pytest.mark.parametrize("dead", [0, 1])
def test_an_engine_that_dies_takes_only_its_drafts_along(planners: Engines, dead: int) -> None:
    """What the driver knows of its rows stays, and so do the other engine's texts. NeMo-RL's own calls notice the death."""
    ahead = RunAhead(EngineClient(planners), RunAheadConfig(steps=1))
    ahead.plan(0, [rows_of(1)])
    ahead.work(after=0)
    ray.kill(planners.actors[dead])
    wait_until_done(ahead)
    ahead.end()
    ahead.plan(1, [rows_of(2)])
    ahead.work(after=0)
    wait_until_done(ahead)
    other = 1 - dead
    calls = calls_of(planners, other)
    assert ("texts", {1000 + 100 * other: 6}) in calls and ("plan", [(2000 + 100 * other, 1, 0)]) in calls
    ahead.figures()
    ahead.end()


def test_too_little_memory_for_texts_is_an_alarm(planners: Engines) -> None:
    ahead = RunAhead(EngineClient(planners), RunAheadConfig(steps=2))
    ahead._coming._store = TextStore(40)  # ten tokens
    ahead.plan(0, [rows_of(1), rows_of(2)])
    ahead.work(after=0)
    wait_until_done(ahead)
    ahead.end()
    ahead.plan(1, [])
    assert calls_of(planners, 0)[-1] == ("texts", {1000: 6}), "the farther step made room first"
    _, alarms = ahead.figures()
    assert alarms[0].startswith("1 texts of the next step did not fit into run_ahead.text_mib")


class Renderer:
    """An engine's actor whose server renders each word as its length, and refuses what has none."""

    async def specrollout_chat_prompts(self, requests: list[dict[str, Any]]) -> list[list[int] | None]:
        return [list(map(len, request["messages"].split())) or None for request in requests]


class GymWithoutServers:
    """NeMo-Gym's actor of a version whose servers cannot be asked as this package does."""

    async def health_check(self) -> None: ...


@pytest.fixture
def renderers(cluster: None) -> Iterator[Engines]:
    yield from killed_at_end(Engines(2, Renderer))


def test_all_engines_render_prompts_of_nemo_gym_and_a_dead_one_leaves_its_own_unknown(renderers: Engines) -> None:
    prompts = GymPrompts(EngineClient(renderers))
    requests: dict[str, dict[str, Any] | None] = {"a": {"messages": "one two"}, "b": None, "c": {"messages": "three"}}
    requests["d"] = {"messages": ""}
    assert prompts._rendered(requests) == {"a": [3, 3], "b": None, "c": [5], "d": None}
    ray.kill(renderers.actors[1])
    assert prompts._rendered(requests) == {"a": [3, 3], "b": None, "d": None}


def test_a_nemo_gym_that_cannot_be_asked_is_an_alarm_and_no_error(
    renderers: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once. Rows before it is known, and rows after the failure, have no prompt."""
    prompts = GymPrompts(EngineClient(renderers))
    row = {"agent_ref": {"name": "agent"}, "responses_create_params": {"input": "a"}}
    monkeypatch.setattr(GymPrompts, "gym", None)
    assert prompts.prompts([row]) == [None] and not prompts.take_alarms()
    gym = ray.remote(GymWithoutServers).options(num_cpus=0).remote()
    monkeypatch.setattr(GymPrompts, "gym", gym)
    assert prompts.prompts([row, row]) == [None, None]
    (alarm,) = prompts.take_alarms()
    assert alarm.startswith("the prompts of NeMo-Gym's rows cannot be known early: ModuleNotFoundError: ")
    assert prompts.prompts([row]) == [None] and not prompts.take_alarms()
    ray.kill(gym)


def test_rows_whose_prompts_are_not_known_are_an_alarm(renderers: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = GymPrompts(EngineClient(renderers))
    gym = ray.remote(GymWithoutServers).options(num_cpus=0).remote()
    monkeypatch.setattr(GymPrompts, "gym", gym)
    monkeypatch.setattr(gym_prompts, "_request_maker", lambda: lambda gym, rows: [None] * len(rows))
    rows = [{"agent_ref": {"name": "agent"}, "responses_create_params": {"input": text}} for text in "ab"]
    for is_new in (True, False):
        assert prompts.prompts(rows) == [None, None]
        assert [alarm.startswith("of a step's rows of NeMo-Gym") for alarm in prompts.take_alarms()] == [True] * is_new
    ray.kill(gym)


@pytest.mark.parametrize(("num_brought", "num_texts", "is_told"), [(8, 16, False), (7, 16, True), (0, 15, False)])
def test_texts_for_prompts_that_agents_do_not_send_are_an_alarm(
    renderers: Engines, monkeypatch: pytest.MonkeyPatch, num_brought: int, num_texts: int, is_told: bool
) -> None:
    monkeypatch.setattr(GymPrompts, "gym", None)
    prompts = GymPrompts(EngineClient(renderers))
    prompts.observe_brought(num_brought, num_texts)
    assert not prompts.take_alarms(), "the run has no rows of NeMo-Gym"
    prompts.prompts([{"responses_create_params": {"input": "a"}}])
    for told in (is_told, False):
        prompts.observe_brought(num_brought, num_texts)
        assert ["only 7 of 16 texts" in alarm for alarm in prompts.take_alarms()] == [True] * told
