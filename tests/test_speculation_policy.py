# SPDX-License-Identifier: Apache-2.0
"""The speculation policy: depth, number of drafts, dormancy and rest, on a machine with known seconds.

Shapes: F depths of drafting, Q bins of survival.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.speculation.forecast import BatchSizes
from nemo_specrollout.speculation.policy import (
    ENOUGH,
    LOOK_SHARE,
    PATIENCE,
    PLANNED_STEPS,
    REST_SHARE,
    AutoPolicy,
    FixedPolicy,
    LookClock,
    build_policy,
)
from nemo_specrollout.speculation.request_lives import RequestLives
from nemo_specrollout.speculation.spread import Spread
from nemo_specrollout.speculation.step_model import DraftCosts, StepCosts, StepModel

pytestmark = pytest.mark.unit
K, NUM_BINS = 8, 128
COSTS = StepCosts(
    np.interp(np.arange(1025), [1, 8, 1024], [0.010, 0.011, 0.2]), np.zeros(0), verify_s=2e-4, text_s=3e-4,
    drafting=DraftCosts(0.0015, 1e-5, 0.0015, 2e-5, 2e-4),
)  # fmt: skip


@dataclass
class World:
    """Requests whose drafts survive as told, and an engine that does what the policy says."""

    policy: AutoPolicy = field(default_factory=lambda: AutoPolicy(0.03, K, K))
    text: float = 0.0
    """Probability that a text draft is right."""
    model: float = 0.0
    """Probability that a draft of the model is right."""
    num_requests: int = 0
    num_followed: int = 0
    seconds: float = 0.0
    depths: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    rests: list[bool] = field(default_factory=list)
    wakes: int = 0

    def __post_init__(self) -> None:
        self.policy.costs = COSTS

    def arrive(self, num_new: int, num_read: int = 0) -> None:
        was_dormant = self.policy.is_dormant
        self.num_requests += num_new
        self.policy.requests_arrived(num_new, num_read)
        self.num_followed += 0 if self.policy.is_dormant else num_new
        self.wakes += was_dormant and not self.policy.is_dormant

    def leave(self, num_ended: int) -> None:
        self.num_requests -= num_ended
        self.num_followed = min(self.num_followed, self.num_requests)

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            rests = bool(self.rests) and self.rests[-1]
            drafts = 0 if rests else self.policy.num_drafts(self.num_requests, K * self.num_requests)
            depth = self.policy.plan(self.num_requests, self.num_followed)
            if self.policy.is_dormant:
                self.num_followed = depth = 0
            self.rests.append(self.policy.ends_step(self.num_requests, self.num_followed))
            if not rests or self.num_followed:
                self.policy.observe(Spread.of_table(self._spread(depth)))
            self.seconds += float(COSTS.seconds(self.num_requests, np.array([drafts]))[0])
            self.depths.append(depth)
            self.drafts.append(drafts)

    def _spread(self, depth: int) -> np.ndarray:
        """Returns the board's table of survival. The model's drafts are taken where they are as likely as text drafts."""
        spread_FQ = np.zeros((K + 2, NUM_BINS + 1), np.int32)
        text = self.text ** np.arange(1, K + 1) if self.text else np.zeros(0)
        others = self.num_requests - self.num_followed
        _add(spread_FQ[0], text, self.num_requests)
        for d in range(1, depth + 1):
            model = self.model ** np.arange(1, d + 1)
            _add(spread_FQ[d], model if model.sum() > text.sum() else text, self.num_followed)
        for d in range(depth + 1, min(2 * depth + 1, K) + 1 if depth else 0):  # foreseen
            _add(spread_FQ[d], self.model ** np.arange(1, d + 1), self.num_followed)
            spread_FQ[d, -1] = 0
        best = spread_FQ[depth] if depth and self.num_followed else spread_FQ[0]
        spread_FQ[-1] = best
        if depth and others:
            _add(spread_FQ[-1], text, others)
        return spread_FQ


def _add(spread_Q: np.ndarray, survival: Sequence[float] | np.ndarray, num_requests: int) -> None:
    bins = np.minimum((np.asarray(survival) * NUM_BINS).astype(int), NUM_BINS - 1)
    np.add.at(spread_Q, bins, num_requests)
    spread_Q[-1] += num_requests


def test_a_good_model_drafts_deep_and_a_batch_drains() -> None:
    world = World(model=0.9)
    world.arrive(32)
    while world.num_requests:
        world.step(20)
        world.leave(max(world.num_requests // 2, 1))
    assert not world.policy.is_dormant
    assert np.mean(world.depths[40:60]) < np.mean(world.depths[-20:]), "fewer requests have room for more drafts"
    assert np.mean(world.depths[-20:]) > 5


def test_a_useless_model_lies_dormant_after_its_first_look() -> None:
    world = World(text=0.6)
    world.arrive(32)
    world.step(100)
    assert world.policy.is_dormant and sum(d > 0 for d in world.depths) <= ENOUGH // 32 + 16
    assert not any(world.depths[40:]) and world.num_followed == 0
    assert world.drafts[-1] > 0, "text drafters go on"


def test_a_dormant_model_is_looked_at_when_requests_arrive() -> None:
    """The model wakes where its drafts pay, and the looks at a useless one take no more than their share."""
    world = World(text=0.3)
    for _ in range(40):
        world.arrive(32)
        world.step(200)
        world.leave(32)
    costs = COSTS.drafting
    assert costs is not None
    looked_s = sum(costs.seconds(32, depth) for depth in world.depths if depth)
    assert world.wakes >= 1 and looked_s < 2.0 * LOOK_SHARE * world.seconds + 16 * costs.seconds(32, K)
    world.model = 0.9
    before = len(world.depths)
    for _ in range(20):
        world.arrive(32)
        world.step(200)
        world.leave(32)
    assert not world.policy.is_dormant and np.mean(world.depths[before + 10 * 200 :]) > 1


def test_requests_that_arrive_one_by_one_wake_a_model_soon() -> None:
    """One request is little evidence for each step of a look, so such a look is short."""
    world = World(text=0.3)
    for _ in range(40):
        _replace_one(world, num_steps=100)
    assert world.policy.is_dormant
    world.model, before = 0.9, world.seconds
    while world.policy.is_dormant and world.seconds < before + 30.0:
        _replace_one(world, num_steps=100)
    assert world.seconds < before + 6.0
    _replace_one(world, num_steps=100)
    assert not world.policy.is_dormant and np.mean(world.depths[-50:]) > 5


def test_looks_at_single_requests_leave_one_for_a_batch() -> None:
    world = World(text=0.3)
    world.arrive(8)
    for _ in range(200):
        world.step(25)
        world.leave(1)
        world.arrive(1)
    assert world.policy.is_dormant and world.wakes > 1
    world.leave(8)
    world.arrive(8)
    assert not world.policy.is_dormant and world.num_followed == 8


def _replace_one(world: World, num_steps: int) -> None:
    world.leave(world.num_requests)
    world.arrive(1)
    world.step(num_steps)


def test_a_model_that_improves_drafts_deeper() -> None:
    """Depths that it never drafted are foreseen."""
    world = World(text=0.3, model=0.6)
    world.arrive(2)
    world.step(300)
    shallow = np.mean(world.depths[-100:])
    world.model = 0.97
    world.step(300)
    assert 0 < shallow < K / 2 < np.mean(world.depths[-100:])


def test_a_model_with_new_weights_gets_another_look() -> None:
    world = World(text=0.5)
    world.arrive(8)
    world.step(60)
    assert world.policy.is_dormant
    world.policy.model_changed()
    world.arrive(8)
    assert not world.policy.is_dormant and world.num_followed == 8


def test_useless_text_drafters_rest_and_are_looked_at() -> None:
    world = World()
    world.num_requests = 8
    world.step(1000)
    assert np.mean(world.rests[PATIENCE + 1 :]) > 0.85
    looks = sum(not rests for rests in world.rests[-500:])
    assert looks >= 2 and looks * (COSTS.text_s + COSTS.verify_s) < 2 * REST_SHARE * 500 * 0.011


def test_text_drafters_whose_drafts_win_less_than_their_time_rest() -> None:
    """A draft that is right in a quarter of all cases is worth its row, but not the time in which it was proposed."""
    costs = COSTS._replace(verify_s=0.0, text_s=0.002)
    for right, rests in ((0.25, True), (0.8, False)):
        world = World(text=right)
        world.policy.costs = costs
        world.num_requests = 8
        world.step(20)
        assert any(drafts > 0 for drafts in world.drafts)
        assert all(world.rests[-5:]) == rests


def play_batches(world: World, num_batches: int, num_steps: int, batch: int, prompt: int) -> tuple[float, float]:
    """Rolls out batches whose requests all take as many steps. Returns the share of steps with text drafters, and of batches
    that the model followed."""
    asked, followed = 0, 0
    for _ in range(num_batches):
        world.arrive(batch, batch * prompt)
        followed += not world.policy.is_dormant
        world.step(num_steps)
        asked += num_steps - sum(world.rests[-num_steps:])
        world.leave(batch)
    return asked / num_batches / num_steps, followed / num_batches


def test_looks_at_useless_drafters_are_rare_where_requests_are_short() -> None:
    """A new batch of long requests is a reason to ask text drafters again, but one of short requests begins too often."""
    world = World()
    play_batches(world, 4, 24, 64, 50)
    asked, followed = play_batches(world, 200, 24, 64, 50)
    assert COSTS.drafting is not None
    plain_s = COSTS.plain_s(64)
    assert 0.0 < asked * (COSTS.text_s + COSTS.verify_s) < 1.5 * REST_SHARE * plain_s
    read_s = 50 * 64 * COSTS.drafting.row_s
    assert 0.0 < followed * read_s < LOOK_SHARE * 24 * plain_s
    world = World()
    play_batches(world, 2, 1000, 64, 50)
    world.arrive(64)
    world.step(2)
    assert not world.rests[-1]


def test_a_model_does_not_follow_requests_that_end_before_it_has_won_back_their_prompts() -> None:
    for num_steps, is_followed in ((12, False), (400, True)):
        world = World(model=0.75)
        play_batches(world, 3, num_steps, 8, 0)
        _, followed = play_batches(world, 4, num_steps, 8, 2000)
        assert (followed > 0.5) == is_followed


def test_the_life_of_requests_follows_from_sums_over_steps() -> None:
    lives = RequestLives()
    assert lives.life_steps == np.inf
    for _ in range(3):
        lives.arrived(8, 80)
        for _ in range(10):
            lives.stepped(8)
        for _ in range(10):
            lives.stepped(4)
        lives.stepped(0)
    assert lives.life_steps == pytest.approx(15.0, rel=0.05)


def test_drafters_that_rest_propose_again_when_they_pay() -> None:
    world = World()
    world.num_requests = 8
    world.step(50)
    assert world.rests[-1]
    world.leave(5)
    world.step()
    assert not world.rests[-1], "another size"
    world.step(50)
    world.text = 0.9
    world.step(400)
    assert not world.rests[-1] and world.drafts[-1] > 0


@pytest.mark.parametrize(("drafting_s", "right"), [(0.0098, 0.36), (0.0098, 0.6), (0.0062, 0.36), (0.0044, 0.0)])
def test_drafting_is_no_slower_than_plain_decoding_whatever_its_steps_take(drafting_s: float, right: float) -> None:
    """Seconds of an H200's run in bfloat16: 4.4 ms plain, 9.8 ms with text drafts of which 36 % were right, then 6.2 ms."""
    policy = AutoPolicy(0.03, K, K)
    model = StepModel(1024)
    num_requests = 64
    plain_s = 0.0044
    tokens, seconds, rests = 0.0, 0.0, False
    for _ in range(400):
        drafts = 0 if rests else policy.num_drafts(num_requests, K * num_requests)
        policy.plan(num_requests, 0)
        step_s = drafting_s if drafts else plain_s
        model.observe(num_requests, num_requests + drafts, step_s, not rests)
        policy.costs = model.costs()
        if not rests:
            spread_FQ = np.zeros((K + 2, NUM_BINS + 1), np.int32)
            for row in (spread_FQ[0], spread_FQ[-1]):
                _add(row, right ** np.arange(1, K + 1), num_requests)
            policy.observe(Spread.of_table(spread_FQ))
        rests = policy.ends_step(num_requests, 0)
        depth = drafts / num_requests
        tokens += num_requests * (1.0 + np.interp(depth, np.arange(K + 1), np.cumsum(right ** np.arange(K + 1)) - 1.0))
        seconds += step_s
    assert tokens / seconds > 0.99 * num_requests / plain_s


def test_nothing_is_verified_before_costs_are_known() -> None:
    policy = AutoPolicy(0.03, K, K)
    policy.requests_arrived(4)
    assert not policy.is_dormant and policy.num_drafts(4, 32) == 0 and policy.plan(4, 4) == 0
    assert not policy.ends_step(4, 4)
    policy.costs = COSTS._replace(drafting=None)
    assert policy.plan(4, 4) == K, "drafting must be timed"


def test_two_policies_that_see_the_same_decide_alike() -> None:
    """Ranks of an engine do not ask each other."""
    worlds = [World(text=0.5, model=0.8), World(text=0.5, model=0.8)]
    for world in worlds:
        for n in (32, 3, 9):
            world.arrive(n)
            world.step(50)
            world.leave(n // 2)
    assert worlds[0].depths == worlds[1].depths and worlds[0].drafts == worlds[1].drafts


def test_the_price_of_a_row_is_what_the_engine_makes_in_its_time() -> None:
    world = World(text=0.9)
    world.num_requests = 8
    world.step(4)
    drafts = np.array([0, world.drafts[-1]])
    plain_s, step_s = COSTS.seconds(8, drafts)
    tokens = 8 * (1 + sum((np.floor(0.9**k * NUM_BINS) + 0.5) / NUM_BINS for k in range(1, 9)))
    assert drafts[1] == 64
    assert world.policy.row_price == pytest.approx(tokens / step_s * (step_s - plain_s) / 64)


def test_drafts_and_the_price_of_a_row_follow_the_contexts() -> None:
    """Reading a context of 20,000 tokens for a draft row takes a tenth of a plain step, so few drafts are worth it."""
    policy = build_policy(BudgetConfig("auto"), K)
    costs = COSTS._replace(drafting=None, context_s=1e-7, draft_context_s=5e-8)
    spread_FQ = np.zeros((K + 2, NUM_BINS + 1), np.int32)
    _add(spread_FQ[-1], [0.9**k for k in range(1, 9)], 8)
    policy.observe(Spread.of_table(spread_FQ))
    drafts, prices = [], []
    for context in (0.0, 20_000.0):
        policy.costs = costs.at(context)
        drafts.append(policy.num_drafts(8, 64))
        prices.append((policy.row_price, policy.context_price))
    assert drafts[0] > drafts[1] > 0
    assert prices[0][1] == 0.0 < prices[1][1] and all(row >= 0.0 for row, _ in prices)
    rate = (prices[1][0] + 20_000 * prices[1][1]) / prices[1][1]
    assert rate > 20_000, "a row costs something besides its context"


def test_a_fixed_policy_asks_for_k_drafts() -> None:
    policy = build_policy(BudgetConfig("fixed", k=3), K)
    assert isinstance(policy, FixedPolicy) and policy.most_drafts == 3
    spread_FQ = np.zeros((K + 2, NUM_BINS + 1), np.int32)
    _add(spread_FQ[-1], [0.9, 0.5, 0.1], 4)
    policy.observe(Spread.of_table(spread_FQ))
    assert policy.plan(4, 4) == 3 and policy.num_drafts(4, 32) == 12 and policy.num_drafts(4, 7) == 7
    assert policy.row_price == 0.0 and not policy.is_dormant and not policy.ends_step(4, 0)


def test_the_margin_of_the_block_reaches_the_decision() -> None:
    drafts = []
    for margin in (0.0, 0.5):
        policy = build_policy(BudgetConfig("auto", margin=margin), K)
        policy.costs = COSTS
        spread_FQ = np.zeros((K + 2, NUM_BINS + 1), np.int32)
        _add(spread_FQ[-1], [0.3], 4)
        policy.observe(Spread.of_table(spread_FQ))
        drafts.append(policy.num_drafts(4, 32))
    assert drafts == [4, 0]


def test_a_look_is_paid_by_a_share_of_the_time() -> None:
    clock = LookClock(0.01)
    assert not clock.pays(1.0)
    clock.earn(90.0)
    assert not clock.pays(1.0)
    clock.earn(20.0)
    assert clock.pays(1.0) and not clock.pays(1.0)
    clock.earn(10_000.0)
    assert [clock.pays(1.0) for _ in range(3)] == [True, True, False], "no more than two looks are saved"


def test_batch_sizes_are_those_of_the_last_rollouts() -> None:
    sizes = BatchSizes()
    assert [share for _, share in sizes.until_the_end(9)] == [0.25] * 4, "lengths are assumed to be exponential"
    for num_requests in (32, 32, 32, 1) * 100:
        sizes.count(num_requests)
    shares = dict(sizes.until_the_end(32))
    assert shares[32] > 0.7 and shares[1] > 0.2
    assert sizes.until_the_end(1) == [(1, 1.0)]


ROOMS = (-(10**9), -1, 0, 1, 7, 1023, 2**31, 2**40)
"""Drafts that a step has room for, as little and as much as anyone may say."""
SIZES = (0, 1, 7, 1024, 2**20, 2**40)
"""Requests of a step."""


@pytest.mark.parametrize("deepest", [0, 1, K, 1000])
@pytest.mark.parametrize(("name", "k"), [("fixed", 0), ("fixed", 3), ("fixed", 64), ("auto", 3)])
@pytest.mark.parametrize("costs", [None, COSTS, COSTS._replace(graph_sizes=np.array([1.0, 8.0, 512.0]), drafting=None)])
def test_no_bound_from_outside_leads_out_of_bounds(name: str, k: int, deepest: int, costs: StepCosts | None) -> None:
    """A number of drafts is at least 0 and at most the room, and a depth is one that the board has, whatever is asked."""
    policy = build_policy(BudgetConfig(name, k=k), K, deepest)
    policy.costs = costs
    for num_submitted in (0, 1, 10**6):
        for num_requests in SIZES:
            policy.requests_arrived(num_requests)
            for room in ROOMS:
                assert 0 <= policy.num_drafts(num_requests, room) <= max(room, 0)
                assert 0 <= policy.plan(num_requests, min(num_requests, 9)) <= min(K, deepest)
                tokens = np.full((K + 1, NUM_BINS), num_submitted)
                policy.observe(Spread(tokens, np.full(K + 1, num_requests), tokens[0], num_requests))
                policy.ends_step(num_requests, min(num_requests, 9))


# Steps beyond the CUDA graphs

GRAPHS = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))


@dataclass
class Launching:
    """An engine whose 32 requests have 32 drafts each, and whose host takes `launch_s` for a step without a CUDA graph."""

    launch_s: float
    survival: float = 1.0
    policy: AutoPolicy = field(default_factory=lambda: AutoPolicy(0.03, 32, 32))
    model: StepModel = field(default_factory=lambda: StepModel(1056, GRAPHS))
    rows: list[int] = field(default_factory=list)

    def seconds(self, rows: int) -> float:
        return 0.005 + 2.5e-5 * rows if rows <= GRAPHS[-1] else max(0.005 + 2.5e-5 * rows, self.launch_s)

    def step(self, num_steps: int = 1, stall_s: float = 0.0) -> None:
        submitted_Q = np.zeros(NUM_BINS)
        submitted_Q[min(int(self.survival * NUM_BINS), NUM_BINS - 1)] = 32 * 32
        nothing_FQ = np.zeros((33, NUM_BINS))
        for _ in range(num_steps):
            drafts = self.policy.num_drafts(32, 32 * 32)
            self.policy.plan(32, 0)
            self.policy.observe(Spread(nothing_FQ, np.zeros(33), submitted_Q, 32))
            self.rows.append(32 + drafts)
            self.model.observe(32, 32 + drafts, self.seconds(32 + drafts) + stall_s * (32 + drafts > GRAPHS[-1]))
            if self.policy.costs is None or len(self.rows) % 16 == 0:
                self.policy.costs = self.model.costs()

    def share_beyond(self, last: int) -> float:
        return float(np.mean(np.array(self.rows[-last:]) > GRAPHS[-1]))


@pytest.mark.parametrize(
    ("launch_s", "survival", "pays"), [(0.05, 1.0, False), (0.0359, 1.0, True), (0.0359, 0.4, False)]
)
def test_the_graphs_are_left_if_that_makes_more_tokens_a_second(launch_s: float, survival: float, pays: bool) -> None:
    """The largest graph takes 17.8 ms. All 1,056 rows may take 36.7 ms if all drafts are right, and 35.1 if 4 of 10 are."""
    engine = Launching(launch_s, survival)
    engine.step(400)
    assert (engine.share_beyond(100) > 0.5) == pays
    assert max(engine.rows) > GRAPHS[-1], "a look at what lies beyond"


def test_looks_beyond_the_graphs_take_a_share_of_the_time() -> None:
    engine = Launching(0.042)
    engine.step(40)
    assert 0 < engine.share_beyond(40) * 40 <= PLANNED_STEPS, (
        "the first look, which decides by a guess, is not paid for"
    )
    engine.step(3_000)
    lost_s = sum(
        engine.seconds(rows) - engine.seconds(512) * rows / 512 for rows in engine.rows[40:] if rows > GRAPHS[-1]
    )
    assert 0.0 < lost_s <= REST_SHARE * sum(map(engine.seconds, engine.rows))


def test_a_stall_in_the_first_look_deters_for_a_while() -> None:
    engine = Launching(0.03)
    engine.step(40, stall_s=0.01)
    assert engine.share_beyond(8) == 0.0
    engine.step(3_000)
    assert engine.share_beyond(100) == 1.0
