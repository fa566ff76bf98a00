# SPDX-License-Identifier: Apache-2.0
"""An engine or the exchange is killed while a request is raced, or just after it was told to take one over: no token changes.

Each kill waits for an order or for a race that has begun, so it happens at the same place on every machine.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import STEP_ADDER
from rollout_world import EnginesInTurn, drive_clock
from shard_world import LoopLink, OneAtATime, Shard, ThreadLink, rolled_out, sharded
from test_equality import assert_equal
from test_racing import MAX_TOKENS, SAMPLINGS, engine_pair, plain_rollouts, six_prompts
from test_stream_exchange import Fleet, assert_same, run

from lab.local.coordinator import DealingCoordinator
from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest, ShardRequest
from nemo_specrollout.stragglers import coordinator as coordinator_module
from nemo_specrollout.stragglers.attempts import AttemptOutcome
from nemo_specrollout.stragglers.coordinator import Coordinator
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.straggler_policy import TailDecision
from nemo_specrollout.stragglers.decisions.tail_forecast import TailObservation
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.turns import ExchangeFailed, Request, TurnOrders

pytestmark = pytest.mark.integration

MOVE, RACE = "move", "race"
NUM_KNOWN = 4
"""Tokens of a response that are known before it moves or is raced."""
ENGINE_SLOTS = 6
"""Requests that an engine of `engine_pair` decodes at a time."""
NUM_FIRST = 20
"""Requests of engine 0. The few of engine 1 leave it free for another."""


class OneChange:
    """Moves or races one request of engine 0 to engine 1, once. A request without an engine begins on one that is alive.

    The request is one that engine 0 begins at once, and the longest of those.
    """

    def __init__(self, change: str, expected: Sequence[Rollout]) -> None:
        self._change = change
        lengths = [len(r.token_ids) for r in expected[:ENGINE_SLOTS]]
        self._text = lengths.index(max(lengths))
        self._known: Coordinator | None = None
        self.has_changed = False
        self.is_raced = False
        """Whether the second racer has reported a token while the first one is at work."""

    def of(self, asked: Coordinator) -> "OneChange":
        """Becomes the policy of a coordinator."""
        self._known = asked
        asked.policy = self
        return self

    @property
    def has_begun(self) -> bool:
        return self.is_raced if self._change == RACE else self.has_changed

    def decide(self, seen: TailObservation) -> TailDecision:
        assert self._known is not None
        responses = [self._known.responses[key] for key in self._known._active]
        alive = np.flatnonzero(seen.capacity_E > 0).tolist()
        starts = [(i, alive[0]) for i, r in enumerate(responses) if not r.attempts and alive]
        chosen = next((i for i, r in enumerate(responses) if place_of(r.request) == self._text), None)
        if chosen is None or len(alive) < 2:
            return TailDecision(tuple(starts))
        attempts = responses[chosen].attempts
        self.is_raced |= len(attempts) == 2 and attempts[1].position > attempts[1].first_token
        if self.has_changed or list(attempts) != [0] or len(responses[chosen].tokens) < NUM_KNOWN:
            return TailDecision(tuple(starts))
        self.has_changed = True
        return TailDecision((*starts, (chosen, 1)), ((chosen, 0),) if self._change == MOVE else ())


def place_of(request: Request) -> int:
    """Returns the place of a request among those of engine 0, by which `six_prompts` are numbered; -1 for engine 1."""
    if isinstance(request, RolloutRequest):
        return request.prompt_index * 4 + request.sample_index
    return request.home[1] if request.home[0] == 0 else -1


@pytest.fixture(scope="module")
def engines(start_engine: Callable[..., RolloutEngine]) -> list[RolloutEngine]:
    return engine_pair(start_engine)


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., RolloutEngine]) -> dict[str, list[Rollout]]:
    return plain_rollouts(start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()), MAX_TOKENS))


def assert_idle(engines: list[RolloutEngine]) -> None:
    assert not any(engine._llm.llm_engine.has_unfinished_requests() for engine in engines)


# A coordinator that calls its engines, as in a local run


class KillsAfterOrder(EnginesInTurn):
    """Kills an engine in a turn after the one in which engine 1 is told to begin the request of the policy's change."""

    def __init__(
        self, engines: list[RolloutEngine], policy: OneChange, victim: int, after: int, **sampling: Any
    ) -> None:
        """`after` are the turns of the victim between that order and its death; 0: the turn of the order never happens."""
        super().__init__(engines, 1, **sampling)
        self._policy = policy
        self._victim = victim
        self._after = after
        self.is_armed = True

    def send(self, worker: int, orders: TurnOrders) -> None:
        super().send(worker, orders)
        if self.is_armed and self._policy.has_changed and worker == 1 and orders.starts:  # the order to begin it
            self.is_armed = False
            self._left[self._victim] = max(len(self._turns[self._victim]), 1) + self._after


class InTwoShards(DealingCoordinator):
    """A coordinator that deals out requests as a test of `NUM_FIRST` wants them."""

    def _deal_out(self, keys: Sequence[int]) -> None:
        for place, key in enumerate(keys):
            self._start(key, int(place >= NUM_FIRST))


KILLS = {
    "the target of a move, at once": (MOVE, 1, 0),
    "the target of a move, later": (MOVE, 1, 2),
    "the source of a move, at once": (MOVE, 0, 0),
    "a racer that has not begun": (RACE, 1, 0),
    "a racer amid the race": (RACE, 1, 2),
    "the first racer amid the race": (RACE, 0, 2),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_beside_a_change_costs_no_token(
    monkeypatch: pytest.MonkeyPatch,
    engines: list[RolloutEngine],
    expected: dict[str, list[Rollout]],
    kill: str,
    name: str,
) -> None:
    drive_clock(monkeypatch, engines, (0.012, 0.01))
    change, victim, after = KILLS[kill]
    policy = OneChange(change, expected[name])
    workers = KillsAfterOrder(engines, policy, victim, after, **SAMPLINGS[name])
    table, lengths = DecodeSpeedTable(["drafting", "plain"]), LengthEstimator(MAX_TOKENS)
    rollout = InTwoShards(workers, policy, table, lengths)
    policy.of(rollout)
    made, timeline = rollout.roll_out(six_prompts())
    workers.finish_turns()
    assert_equal(made, expected[name])
    assert not workers.is_armed and workers.num_deaths == 1 and not workers.has_requests()
    died = {(s.request, s.engine) for s in timeline.spans if s.outcome == AttemptOutcome.DIED}
    assert died and {engine for _, engine in died} == {victim}


# Engines that fetch their orders, as in NeMo-RL


DEATH = "the process has died"


class Killed(BaseException):
    """The process has died."""


class MortalLink(ThreadLink):
    """A link that brings nothing from a process that has died."""

    is_dead = False

    def __call__(self, method: Callable[..., object], *arguments: Any) -> Callable[[], Any]:
        if self.is_dead:
            raise ExchangeFailed(DEATH)
        return super().__call__(method, *arguments)


class Mortal(OneAtATime):
    """An engine that dies in a step after it was told to begin a request of another engine."""

    def __init__(self, llm: Any, link: MortalLink, steps_left: int) -> None:
        super().__init__(llm)
        self._link = link
        self._steps_left = steps_left
        self._is_armed = False

    def submit(self, requests: Any, sampling: Any) -> list[str]:
        self._is_armed = self._is_armed or any(r.home[0] != self._link.worker for r in requests)
        return super().submit(requests, sampling)

    def step(self) -> dict[str, Rollout]:
        if self._is_armed:
            self._steps_left -= 1
            if self._steps_left < 0:
                self._link.is_dead = True
                raise Killed
        return super().step()


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes turns short. Only steps move the clock."""
    monkeypatch.setattr(coordinator_module, "SHORTEST_TURN_S", 0.005)
    drive_clock(monkeypatch, [OneAtATime], [0.01])


def exchange_of(change: str, expected: Sequence[Rollout]) -> tuple[StragglerExchange, OneChange]:
    """Returns an exchange whose policy makes one change."""
    exchange = StragglerExchange(["drafting", "plain"], FastestOfNConfig(), MAX_TOKENS)
    return exchange, OneChange(change, expected).of(exchange._coordinator)


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(("change", "steps_left"), [(MOVE, 0), (RACE, 0), (RACE, 4)])
def test_a_synchronous_engine_that_is_killed_costs_the_others_no_token(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], change: str, steps_left: int, name: str
) -> None:
    """NeMo-RL then ends the run. Until it does, no response is wrong, and no engine waits for the dead one."""
    deaths: list[BaseException] = []
    while not deaths:
        exchange, _ = exchange_of(change, expected[name])
        link = MortalLink(exchange, 1)
        victim = Shard(Mortal(engines[1]._llm, link, steps_left), link)
        shards = sharded(engines[0], six_prompts(), [NUM_FIRST], **SAMPLINGS[name])
        exchange.begin()
        thread = threading.Thread(target=dies, args=(victim, shards[1], exchange, deaths))
        thread.start()
        made = Shard(OneAtATime(engines[0]._llm), ThreadLink(exchange, 0)).run(shards[0])
        thread.join()
        exchange.end()
        assert_equal(made, expected[name][:NUM_FIRST])
        assert_idle(engines)


def dies(victim: Shard, requests: list[ShardRequest], exchange: StragglerExchange, deaths: list[BaseException]) -> None:
    """Takes an engine's part until it dies, which the driver tells the exchange."""
    try:
        victim.run(requests)
    except Killed as death:
        deaths.append(death)
        exchange.leave(1)


class LosingLink(ThreadLink):
    """A link whose exchange is killed as soon as the change of its policy has begun."""

    policy: OneChange

    def __call__(self, method: Callable[..., object], *arguments: Any) -> Callable[[], Any]:
        if self.policy.has_begun:
            raise ExchangeFailed("it died")
        return super().__call__(method, *arguments)


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("change", [MOVE, RACE])
def test_the_exchange_of_synchronous_engines_killed_amid_a_change(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], change: str, name: str
) -> None:
    has_died = False
    while not has_died:
        exchange, policy = exchange_of(change, expected[name])
        links = [LosingLink(exchange, w) for w in range(2)]
        for link in links:
            link.policy = policy
        exchange.begin()
        rollouts = [Shard(OneAtATime(e._llm), link) for e, link in zip(engines, links, strict=True)]
        shards = sharded(engines[0], six_prompts(), [NUM_FIRST], **SAMPLINGS[name])
        assert_equal(rolled_out(rollouts, shards, [None, None]), expected[name])
        assert_idle(engines)
        has_died = [r.failure for r in rollouts] == ["it died"] * 2


# Asynchronous engines


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "SHORTEST_TURN_S", 0.01)


async def asked(fleet: Fleet, name: str) -> list["asyncio.Task[Any]"]:
    """Begins all requests. Even names are those of engine 0."""
    await fleet.begin()
    names = [2 * i if i < NUM_FIRST else 2 * i + 1 for i in range(len(six_prompts()))]
    return [asyncio.create_task(fleet.ask(n, r, **SAMPLINGS[name])) for n, r in zip(names, six_prompts(), strict=True)]


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("change", [MOVE, RACE])
def test_the_exchange_of_asynchronous_engines_killed_amid_a_change(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], change: str, name: str
) -> None:
    async def work() -> bool:
        fleet = Fleet(engines, 0)
        policy = OneChange(change, expected[name]).of(fleet.exchange._coordinator)

        class Link(LoopLink):
            async def __call__(self, method: Callable[..., object], *arguments: Any) -> Any:
                if policy.has_begun:
                    raise ExchangeFailed("it died")
                return await super().__call__(method, *arguments)

        for worker, shard in enumerate(fleet.shards):
            shard._ask = Link(fleet.exchange, worker)
        assert_same(await asyncio.gather(*await asked(fleet, name)), expected[name])
        fleet.exchange.end()
        await fleet.end(*(shard.failure for shard in fleet.shards))
        return policy.has_begun and all(shard.failure == "it died" for shard in fleet.shards)

    while not run(work()):
        pass


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("change", [MOVE, RACE])
def test_an_asynchronous_engine_that_is_killed_costs_the_others_no_token(
    engines: list[RolloutEngine], expected: dict[str, list[Rollout]], change: str, name: str
) -> None:
    """The calls of its own requests die with it, and Ray tells the driver, which removes it from the exchange."""

    async def work() -> bool:
        fleet = Fleet(engines, 0)
        policy = OneChange(change, expected[name]).of(fleet.exchange._coordinator)
        tasks = await asked(fleet, name)
        own = tasks[:NUM_FIRST]
        while not policy.has_begun and not all(task.done() for task in own):
            await asyncio.sleep(0.002)
        is_amid = policy.has_begun and not all(task.done() for task in own)
        await killed(fleet, 1, tasks[NUM_FIRST:])
        assert_same(await asyncio.gather(*own), expected[name][:NUM_FIRST])
        await fleet.end(None, DEATH)
        return is_amid

    while not run(work()):
        pass


async def killed(fleet: Fleet, worker: int, tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Ends all that a process of an engine does, without a word to the exchange, which then hears that it is gone."""
    shard = fleet.shards[worker]

    async def nothing(method: Callable[..., object], *_: Any) -> Any:
        raise ExchangeFailed(DEATH)

    shard._ask = nothing
    shard.failure = DEATH
    assert shard._loop is not None
    for task in (shard._loop, *tasks):
        task.cancel()
    await asyncio.gather(shard._loop, *tasks, return_exceptions=True)
    await shard._engine.stop_all()
    await asyncio.to_thread(fleet.exchange.leave, worker)
