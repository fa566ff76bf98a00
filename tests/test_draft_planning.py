# SPDX-License-Identifier: Apache-2.0
"""Draft plans of a model: its depth, the requests that it follows, and the measured cost of drafting.

Shapes: B requests, K draft positions.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.local.random_budgets import RandomPlanner
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.speculation.best_depth import SurvivalSpread, bin_of
from nemo_specrollout.scheduling.speculation.draft_plan import (
    FIRST_WATCH_SHARE,
    GENERATIONS,
    HOPELESS_STEPS,
    PLANNED_STEPS,
    WATCH_SHARE,
    AutoPlanner,
    Dormancy,
    DraftPlan,
    DraftPlanner,
    FixedPlanner,
    PlanObservation,
    build_planner,
)
from nemo_specrollout.scheduling.speculation.draft_time import ENOUGH, REMEMBERED, WARM_UP, DraftCosts, DraftTimes
from nemo_specrollout.scheduling.speculation.step_time import StepCosts

pytestmark = pytest.mark.unit

K = 6
MAX_ROWS = 400
FLAT = StepCosts(np.full(MAX_ROWS, 0.010))
LINEAR = StepCosts(0.001 * np.arange(MAX_ROWS))
# Survival is binned by 1/128, and a bin is verified as a whole. A plan may miss this share of the best rate.
BINNING = K / 128


def survival(rates: list[float]) -> np.ndarray:
    """Returns the survival of requests whose draft tokens are right with these probabilities, [B, K]."""
    return np.array(rates)[:, None] ** np.arange(1, K + 1)


def observe(
    found: float, forecast: float, costs: StepCosts | None, draft: DraftCosts | None, requests: int = 4
) -> PlanObservation:
    """Returns `requests` equal requests."""
    return PlanObservation(survival([found] * requests), survival([forecast] * requests), costs, draft)


@st.composite
def costs_of_all(draw: st.DrawFn) -> tuple[StepCosts, DraftCosts]:
    """Draws cheap or expensive rows and passes."""
    row_s, rest = draw(st.floats(0.0, 0.002)), draw(st.floats(0.0, 1.0))
    costs = StepCosts(0.005 + row_s * np.arange(MAX_ROWS), draw(st.floats(0.0, 0.003)), row_s * rest)
    return costs, DraftCosts(*(draw(st.floats(0.0, high)) for high in (0.02, 1e-3, 0.01, 2e-4)))


@st.composite
def observations(draw: st.DrawFn) -> PlanObservation:
    """Draws requests, some of them without text drafts, some not followed."""
    rates = st.one_of(st.just(0.0), st.floats(0.0, 0.99))
    pairs = draw(st.lists(st.tuples(rates, rates), min_size=1, max_size=12))
    found_BK, forecast_BK = (survival([pair[i] for pair in pairs]) for i in (0, 1))
    return PlanObservation(found_BK, forecast_BK, *draw(costs_of_all()))


def slow_rate(observed: PlanObservation, depth: int, *, reads: bool = True) -> float:
    """Returns the exact tokens a second if the model drafts `depth` tokens and the likeliest drafts that pay are verified.

    Returns 0 if the model would draft for no request. `reads`: whether a model that drafts nothing reads sampled tokens.
    """
    costs, draft, num_requests = observed.costs, observed.draft_costs, len(observed.found_BK)
    assert costs is not None and draft is not None
    drafts, is_asked = [], False
    for found_K, forecast_K in zip(observed.found_BK, observed.forecast_BK, strict=True):
        if forecast_K[:depth].sum() > found_K.sum():
            is_asked = True
            drafts += list(forecast_K[:depth])
        else:
            drafts += list(found_K)
    if depth and not is_asked:
        return 0.0
    gains = sorted((gain for gain in drafts if gain > 0.0), reverse=True)
    rates = []
    for n in range(len(gains) + 1):
        read_s = draft.read_s(num_requests) if reads else 0.0
        draft_s = draft.draft_s(num_requests + n, num_requests, depth) if depth else read_s
        rates.append((num_requests + sum(gains[:n])) / (costs.step_s(num_requests, n) + draft_s))
    return max(rates)


# The depth


@settings(max_examples=200)
@given(observations())
def test_no_other_depth_makes_more_tokens_a_second(observed: PlanObservation) -> None:
    depth = AutoPlanner(0.0).plan(observed).depth
    rates = [slow_rate(observed, k) for k in range(K + 1)]
    assert rates[depth] >= max(rates) * (1 - BINNING)


def test_a_model_does_not_draft_beyond_the_largest_cuda_graph() -> None:
    """Eight requests fill the graph of eight rows. A larger graph has room for a draft of each request."""
    plans = [
        AutoPlanner(0.0).plan(observe(0.0, 0.9, FLAT._replace(graph_rows=rows), DraftCosts(1e-5, 0.0, 0.0, 0.0), 8))
        for rows in (8, 16, 0)
    ]
    assert [plan.depth for plan in plans] == [0, 1, K]


@settings(max_examples=200)
@given(observations(), st.floats(0.0, 0.5))
def test_a_model_drafts_only_if_it_wins_by_the_margin(observed: PlanObservation, margin: float) -> None:
    plan = AutoPlanner(margin).plan(observed)
    without, best = slow_rate(observed, 0), max(slow_rate(observed, k) for k in range(1, K + 1))
    assert observed.costs is not None and observed.draft_costs is not None
    if plan.depth:
        assert slow_rate(observed, plan.depth) > (1 + margin) * without * (1 - BINNING)
        rate, without_model = slow_rate(observed, plan.depth), slow_rate(observed, 0, reads=False)
        tokens = rate * observed.costs.plain_s[len(observed.found_BK)]
        won_s = tokens / without_model - tokens / rate
        assert plan.won_s == pytest.approx(won_s, abs=3 * BINNING * tokens / without_model)
    else:
        assert best <= (1 + margin) * without * (1 + BINNING)
        assert plan.won_s == -observed.draft_costs.draft_s(len(observed.found_BK), 0, 1)


@settings(max_examples=200)
@given(st.sampled_from([0.0, 0.5, 0.7]), st.floats(0.5, 0.95), costs_of_all(), st.integers(1, 30))
def test_a_plan_for_equal_requests_is_exactly_the_best(
    found: float, forecast: float, costs: tuple[StepCosts, DraftCosts], num_requests: int
) -> None:
    """Each draft position has its own bin."""
    observed = observe(found, forecast, *costs, requests=num_requests)
    rates = [slow_rate(observed, k) for k in range(K + 1)]
    plan = AutoPlanner(0.0).plan(observed)
    assert rates[plan.depth] == pytest.approx(max(rates))
    if plan.depth:
        tokens = rates[plan.depth] * costs[0].plain_s[num_requests]
        without_model = slow_rate(observed, 0, reads=False)
        assert plan.won_s == pytest.approx(tokens / without_model - tokens / rates[plan.depth])


def test_the_gain_of_a_plan_equals_a_hand_calculation() -> None:
    """Four requests make 4 tokens in 10 ms. With six drafts each, right half of the time, they make 4 * (1 + 63/64) in 12."""
    plan = AutoPlanner(0.03).plan(observe(0.0, 0.5, FLAT, DraftCosts(fixed_s=0.002)))
    rate = 4 * (1 + 63 / 64) / 0.012
    assert plan.depth == 6 and plan.won_s == pytest.approx(rate * 0.010 * (1 / 400 - 1 / rate))


def test_free_drafting_on_a_flat_step_is_as_deep_as_possible() -> None:
    assert AutoPlanner(0.03).plan(observe(0.0, 0.9, FLAT, DraftCosts())).depth == K


def test_slower_passes_make_drafts_shorter_or_stop_them() -> None:
    prices = (DraftCosts(0.001, pass_s=0.001), DraftCosts(0.001, pass_s=0.006), DraftCosts(0.060, read_share=0.01))
    deep, short, none = (AutoPlanner(0.03).plan(observe(0.0, 0.9, FLAT, draft)).depth for draft in prices)
    assert deep > short > none == 0


def test_nothing_is_drafted_if_rows_cost_as_much_as_requests() -> None:
    assert AutoPlanner(0.03).plan(observe(0.0, 0.9, LINEAR, DraftCosts(0.001, read_share=0.0))).depth == 0


def test_reading_costs_time_even_if_the_model_drafts() -> None:
    """Rows cost as much as requests. Without the model nothing would be drafted, so the plan loses time."""
    plan = AutoPlanner(0.03).plan(observe(0.0, 0.9, LINEAR, DraftCosts(0.001)))
    assert plan.depth > 0 > plan.won_s


def test_a_model_no_better_than_text_drafts_does_not_draft() -> None:
    assert AutoPlanner(0.03).plan(observe(0.8, 0.8, FLAT, DraftCosts())).depth == 0
    assert AutoPlanner(0.03).plan(observe(0.3, 0.8, FLAT, DraftCosts(0.001))).depth > 0


def test_each_request_keeps_its_better_drafts() -> None:
    """One request has text drafts, the model follows the other. Each makes 1.98 tokens with its own drafts, else 1."""
    observed = PlanObservation(survival([0.5, 0.0]), survival([0.0, 0.5]), FLAT, DraftCosts(0.002))
    plan, rate, without = AutoPlanner(0.03).plan(observed), 2 * (1 + 63 / 64) / 0.012, (2 + 63 / 64) / 0.010
    assert plan.depth == K and plan.won_s == pytest.approx(rate * 0.010 * (1 / without - 1 / rate))


@pytest.mark.parametrize(("row_price", "is_asked"), [(0.0, False), (0.4, True)])
def test_a_model_replaces_long_drafts_not_worth_their_rows(row_price: float, is_asked: bool) -> None:
    """Six found tokens promise more than two of the model, but each is hardly worth its row."""
    found_BK = np.full((4, K), 0.42)
    forecast_BK = np.tile([0.95, 0.9] + [0.0] * (K - 2), (4, 1))
    costs = StepCosts(0.010 + 0.0008 * np.arange(MAX_ROWS))
    observed = PlanObservation(found_BK, forecast_BK, costs, DraftCosts(0.0005), row_price=row_price)
    assert (AutoPlanner(0.0).plan(observed).depth > 0) == is_asked


def test_a_model_that_follows_no_request_only_costs_reading() -> None:
    plan = AutoPlanner(0.03).plan(observe(0.0, 0.0, FLAT, DraftCosts(0.001, 1e-4, 0.5, 0.5)))
    assert plan == DraftPlan(0, pytest.approx(-0.0014), is_hopeless=True)


def test_each_depth_is_tried_until_drafting_times_are_known() -> None:
    planner, depths = AutoPlanner(0.03), []
    for _ in range(2 * K):
        assert planner.count_step(4)
        depths.append(planner.plan(observe(0.9, 0.1, FLAT, None)).depth)
    assert set(depths[:K]) == set(depths[K:]) == set(range(1, K + 1))


def test_nothing_is_drafted_until_step_times_are_known() -> None:
    for draft in (None, DraftCosts()):
        assert AutoPlanner(0.03).plan(observe(0.0, 0.9, None, draft)) == DraftPlan(0)


def test_a_plan_lasts_some_steps_while_the_batch_keeps_its_size() -> None:
    planner = AutoPlanner(0.03)
    planned = [planner.count_step(40 - step) for step in range(16)]  # 32 to 63 have the same bit length.
    assert np.flatnonzero(planned).tolist() == [0, *range(PLANNED_STEPS, 9, PLANNED_STEPS), 9, 13]
    assert planner.count_step(90) and not planner.count_step(70)


# Fixed and random planners


def test_a_fixed_planner_drafts_equally_deep_and_follows_all() -> None:
    planner = build_planner(BudgetConfig("fixed", k=3))
    assert isinstance(planner, FixedPlanner)
    for draft in (None, DraftCosts(fixed_s=9.0)):
        assert planner.count_step(4) and planner.follows
        assert planner.plan(observe(0.9, 0.0, FLAT, draft)) == DraftPlan(3)


def test_a_random_planner_tries_all_depths_and_stops_following() -> None:
    planner = RandomPlanner()
    assert planner.follows
    seen = []
    for _ in range(500):
        plan = planner.plan(observe(0.0, 0.5, None, None))
        planner.observe_step(plan, 4, 0.0)
        seen.append((plan.depth, planner.follows, planner.gives_up))
    assert {depth for depth, _, _ in seen} == set(range(K + 1))
    assert 0.75 < np.mean([follows for _, follows, _ in seen]) < 0.98
    assert 1 <= sum(gives_up for _, _, gives_up in seen) <= 15


def test_a_random_planner_follows_again_without_a_plan() -> None:
    planner = RandomPlanner()
    follows = []
    for _ in range(500):
        planner.observe_step(DraftPlan(0), 4, 0.0)
        follows.append(planner.follows)
    assert np.flatnonzero(np.diff(np.array(follows, int)) == 1).size > 3


def test_the_budget_policy_selects_the_planner() -> None:
    planner = build_planner(BudgetConfig("auto", margin=0.2))
    assert isinstance(planner, AutoPlanner) and planner.margin == 0.2


# The spread of survival


def test_shares_describe_the_latest_proposals_and_fade() -> None:
    spread = SurvivalSpread(K)
    latest_PNK = np.zeros((2, 3, K))
    latest_PNK[1, :, 0] = 0.9, 0.9, 0.1
    spread.observe(latest_PNK)
    share_Q = spread.share_PKQ[1, 0]
    assert share_Q[bin_of(0.9)] == pytest.approx(2 / 3) and share_Q[bin_of(0.1)] == pytest.approx(1 / 3)
    assert not spread.share_PKQ[0].any() and not spread.share_PKQ[1, 1:].any(), "there were no proposals"
    for _ in range(400):
        latest_PNK[1, :, 0] = 0.5
        spread.observe(latest_PNK)
    assert spread.share_PKQ[1, 0, bin_of(0.5)] > 0.99
    spread.forget(1)
    assert not spread.share_PKQ.any()


def test_sure_drafts_pay_even_if_the_mean_draft_does_not() -> None:
    """A draft that is right in 70 % of cases is not worth its row, but seven of ten are sure and three hopeless."""
    costs = StepCosts(0.010 + 0.0022 * np.arange(MAX_ROWS))
    observed = observe(0.0, 0.0, costs, DraftCosts(0.0005), requests=32)
    observed.forecast_BK[:, 0] = 0.7
    spread = SurvivalSpread(K)
    latest_PNK = np.zeros((2, 10, K))
    latest_PNK[1, :, 0] = [0.99] * 7 + [0.02] * 3
    spread.observe(latest_PNK)
    price = 0.0022 * 32 / costs.plain_s[32]
    knows = replace(observed, row_price=price, share_PKQ=spread.share_PKQ)
    assert AutoPlanner(0.03).plan(replace(observed, row_price=price)).depth == 0
    assert AutoPlanner(0.03).plan(knows).depth == 1


@given(st.floats(0.01, 0.99), st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8))
def test_the_spread_of_survival_keeps_a_request_s_mean(mean: float, latest: list[float]) -> None:
    """On a flat step all drafts are verified, so only the mean counts."""
    spread = SurvivalSpread(K)
    latest_PNK = np.zeros((2, len(latest), K))
    latest_PNK[1, :, 0] = latest
    spread.observe(latest_PNK)
    observed = observe(0.0, 0.0, FLAT, DraftCosts(1e-4))
    observed.forecast_BK[:, 0] = mean
    plans = [AutoPlanner(0.0).plan(replace(observed, share_PKQ=share)) for share in (None, spread.share_PKQ)]
    won = [plan.won_s for plan in plans if plan.depth]
    assert len(won) != 1 or mean < 0.03, "only one of the two plans drafts"
    if len(won) == 2:
        assert won[0] == pytest.approx(won[1], abs=0.02 * 0.010)


# Following requests


def follow(dormancy: Dormancy, won_s: float, cost_s: float, steps: range) -> float:
    """Runs steps of 10 ms with 8 requests, one of which ends in each. Returns the share of steps that follow requests."""
    num_followed = 0
    for n in steps:
        if dormancy.is_awake:
            num_followed += 1
            dormancy.ended(1)
        dormancy.step(8, won_s, cost_s, 0.010 * n)
    return num_followed / len(steps)


def test_a_model_that_does_not_pay_is_tried_now_and_then() -> None:
    dormancy, cost_s = Dormancy(), 2e-4
    first = GENERATIONS * 8 - 1
    assert follow(dormancy, 1e-4, cost_s, range(first)) == 1.0 and dormancy.is_awake
    share = follow(dormancy, 1e-4, cost_s, range(first, 50_000))
    assert 0.8 * WATCH_SHARE < share * cost_s / 0.010 < 1.1 * WATCH_SHARE
    assert follow(dormancy, 3e-4, cost_s, range(50_000, 100_000)) > 0.95 and dormancy.is_awake


def until_dormant(dormancy: Dormancy, won_s: float, now_s: float) -> float:
    """Runs steps of 10 ms, each of which ends a request. Returns the time when following stops."""
    while dormancy.is_awake:
        dormancy.ended(1)
        dormancy.step(1, won_s, 0.010, now_s)
        now_s += 0.010
    return now_s


def wait_s(dormancy: Dormancy, now_s: float) -> float:
    """Returns the seconds from `now_s` until requests are followed again."""
    started_s = now_s
    while not dormancy.is_awake:
        dormancy.step(1, 0.0, 0.0, now_s)
        now_s += 0.010
    return now_s - started_s


def test_trials_become_rarer_each_time_that_a_model_fails() -> None:
    """A model that has paid is tried again soon: other tasks may have come for a while."""
    dormancy, waits_s, now_s, look_s = Dormancy(), [], 0.0, GENERATIONS * 0.010
    for _ in range(6):
        now_s = until_dormant(dormancy, 0.0, now_s)
        waits_s.append(wait_s(dormancy, now_s))
        now_s += waits_s[-1]
    shares = [max(WATCH_SHARE, FIRST_WATCH_SHARE / 2**n) for n in range(6)]
    assert waits_s == pytest.approx([look_s / share for share in shares], abs=0.03)
    for _ in range(GENERATIONS):
        dormancy.ended(1)
        dormancy.step(1, 0.020, 0.010, now_s)
        now_s += 0.010
    now_s = until_dormant(dormancy, 0.0, now_s)
    assert wait_s(dormancy, now_s) == pytest.approx(look_s / FIRST_WATCH_SHARE, abs=0.03)


def work(planner: DraftPlanner, observed: PlanObservation, num_steps: int, now_s: float = 0.0) -> list[bool]:
    """Runs steps of 10 ms that each end one followed request. Returns whether new requests are followed after each step."""
    follows = []
    for n in range(num_steps):
        plan = planner.plan(observed)
        follows.append(planner.follows)
        if planner.follows:
            planner.observe_ended(1)
        planner.observe_step(plan, len(observed.found_BK), now_s + 0.010 * n)
    return follows


def test_a_model_that_only_reads_soon_becomes_dormant() -> None:
    planner, useless = AutoPlanner(0.03), observe(0.5, 0.1, FLAT, DraftCosts(0.001))
    follows = np.array(work(planner, useless, 20_000))
    assert follows[: GENERATIONS * 4].all() and not follows[GENERATIONS * 4 + 1]
    assert np.flatnonzero(np.diff(follows.astype(int)) == 1).size >= 3, "the model was not tried again"
    assert follows.mean() * 0.001 / 0.010 < 1.2 * WATCH_SHARE


def test_a_hopeless_model_is_given_up_before_requests_end() -> None:
    planner, useless = AutoPlanner(0.03), observe(0.0, 0.1, FLAT, DraftCosts(0.002), requests=32)
    gives_up, follows = [], []
    for n in range(HOPELESS_STEPS + 2):
        plan = planner.plan(useless)
        assert plan.won_s < 0.0 and plan.is_hopeless
        planner.observe_step(plan, 32, 0.010 * n)
        gives_up.append(planner.gives_up)
        follows.append(planner.follows)
    assert np.flatnonzero(gives_up).tolist() == [HOPELESS_STEPS - 1], "giving up happens once"
    assert follows == [n < HOPELESS_STEPS - 1 for n in range(HOPELESS_STEPS + 2)]
    looks_again_s = 0.010 * HOPELESS_STEPS + HOPELESS_STEPS * -plan.won_s / FIRST_WATCH_SHARE
    planner.observe_step(DraftPlan(0), 32, 0.9 * looks_again_s)
    assert not planner.follows
    planner.observe_step(DraftPlan(0), 32, 1.1 * looks_again_s)
    assert planner.follows


def test_a_model_that_wins_in_the_tail_is_not_given_up() -> None:
    """Rows are expensive for many requests and free for up to eight. Half of the requests are promising."""
    costs = StepCosts(0.010 + 0.004 * np.maximum(np.arange(MAX_ROWS) - 8, 0))
    observed = observe(0.0, 0.05, costs, DraftCosts(0.0005), requests=32)
    observed.forecast_BK[::2] = survival([0.9])
    plan = AutoPlanner(0.03).plan(replace(observed, row_price=costs.row_s(32, 0) * 32 / costs.plain_s[32]))
    assert plan.depth == 0 and not plan.is_hopeless


@pytest.mark.parametrize(
    ("num_requests", "read_ms", "is_hopeless"),
    [(32, 1.4, False), (32, 1.5, True), (8, 2.0, False), (8, 2.2, True), (1, 5.0, False)],
)
def test_there_is_hope_while_the_tail_wins_more_than_reading(
    num_requests: int, read_ms: float, is_hopeless: bool
) -> None:
    """Drafts pay only for a single request, by 199 / (10 + read_ms) - 10 ms. Until then the model reads in one step with all
    requests, in one with half of them, and so on."""
    costs = StepCosts(0.010 * np.maximum(np.arange(MAX_ROWS) / 2, 1.0) ** 2)
    forecast_BK = np.zeros((num_requests, K))
    forecast_BK[:, 0] = 0.99
    row_price = costs.row_s(num_requests, 0) * num_requests / costs.plain_s[num_requests]
    draft = DraftCosts(read_ms / 1000)
    observed = PlanObservation(np.zeros_like(forecast_BK), forecast_BK, costs, draft, row_price=row_price)
    plan = AutoPlanner(0.0).plan(observed)
    assert (plan.depth > 0) == (num_requests == 1) and plan.is_hopeless == is_hopeless


@given(st.floats(0.05, 0.95), st.integers(1, 31), costs_of_all())
def test_requests_that_are_not_followed_do_not_reduce_hope(
    forecast: float, num_followed: int, costs: tuple[StepCosts, DraftCosts]
) -> None:
    all_followed = observe(0.0, forecast, *costs, requests=32)
    some_followed = observe(0.0, forecast, *costs, requests=32)
    some_followed.forecast_BK[num_followed:] = 0.0
    of_all, of_some = (AutoPlanner(0.0).plan(observed) for observed in (all_followed, some_followed))
    assert of_some.is_hopeless == of_all.is_hopeless or of_some.won_s > 0.0 or of_all.won_s > 0.0


@given(st.lists(st.booleans(), max_size=400))
def test_requests_are_given_up_exactly_after_the_hopeless_steps(hopeless: list[bool]) -> None:
    dormancy, num_hopeless = Dormancy(), 0
    for n, is_hopeless in enumerate(hopeless):
        dormancy.step(4, 1.0, 0.1, 0.010 * n, is_hopeless)
        num_hopeless = num_hopeless % HOPELESS_STEPS + 1 if is_hopeless else 0
        assert dormancy.gives_up == (num_hopeless == HOPELESS_STEPS)
        assert dormancy.is_awake, "the model won more than it cost"


def test_the_best_of_many_forecasts_gives_no_hope_for_a_tail() -> None:
    """The model would win only if the one promising request ran last, but any request may run last."""
    observed = observe(0.0, 0.05, FLAT, DraftCosts(0.002), requests=32)
    observed.forecast_BK[17] = survival([0.5])
    assert AutoPlanner(0.03).plan(observed).is_hopeless
    last = replace(observed, found_BK=observed.found_BK[17:18], forecast_BK=observed.forecast_BK[17:18])
    assert AutoPlanner(0.03).plan(last).depth > 0


def test_a_model_on_trial_drafts_despite_a_bad_forecast() -> None:
    planner, useless = AutoPlanner(0.03), observe(0.5, 0.1, FLAT, DraftCosts(0.001, pass_s=0.001))
    work(planner, useless, GENERATIONS * 4 + 1)
    assert not planner.follows
    planner.model_changed()
    plans = []
    for n in range(2 * HOPELESS_STEPS):
        if planner.count_step(4):
            plans.append(planner.plan(useless))
        planner.observe_step(plans[-1], 4, 0.010 * n)
        if not planner.follows:
            break
    depths = [plan.depth for plan in plans]
    assert set(depths) == {0, 1} and depths.count(0) == pytest.approx(len(depths) / 2, abs=1)
    assert all(plan.won_s == -0.001 for plan in plans), "a plan costs as much as reading"
    assert n == HOPELESS_STEPS - 1, "the model was not given up after the trial"


def test_a_model_that_pays_always_follows() -> None:
    useful = observe(0.0, 0.8, FLAT, DraftCosts(0.001))
    assert all(work(AutoPlanner(0.03), useful, 1000))


def test_a_model_with_new_weights_follows_at_once() -> None:
    planner, useless = AutoPlanner(0.03), observe(0.5, 0.1, FLAT, DraftCosts(0.001))
    work(planner, useless, GENERATIONS * 4 + 1)
    assert not planner.follows
    planner.model_changed()
    assert planner.follows and all(work(planner, useless, GENERATIONS * 4))


# The cost of drafting


def test_drafting_times_are_learned() -> None:
    true, times, rng = DraftCosts(0.004, 2e-5, 0.003, 5e-5), DraftTimes(), np.random.default_rng(0)
    assert times.costs() is None
    for n in range(600):
        rows, requests, depth = int(rng.integers(1, 400)), int(rng.integers(1, 64)), int(rng.integers(1, 7))
        warm_up = 5.0 if n < WARM_UP else 1.0
        times.observe(rows, requests, depth, warm_up * true.draft_s(rows, requests, depth) * rng.uniform(0.8, 1.2))
    learned = times.costs()
    assert learned is not None
    for case in ((1, 1, 1), (64, 64, 3), (300, 8, 6)):
        assert learned.draft_s(*case) == pytest.approx(true.draft_s(*case), rel=0.15)


def test_a_pass_that_only_reads_is_measured_separately() -> None:
    """A stall cannot make it more expensive than a pass that drafts."""
    true, times = DraftCosts(0.004, 2e-5, 0.003), DraftTimes()
    times.observe_reading(8, 0.001)
    for n in range(200):
        times.observe(8, 8, 1 + n % 6, true.draft_s(8, 8, 1 + n % 6))
        times.observe_reading(8, 5.0 if n == 150 else 0.25 * true.draft_s(8, 0, 1))
    learned = times.costs()
    assert learned is not None and learned.read_s(8) == pytest.approx(0.25 * learned.draft_s(8, 0, 1), rel=0.02)
    assert AutoPlanner(0.03).plan(observe(0.0, 0.0, FLAT, learned)).won_s == -learned.read_s(4)


def test_a_third_of_the_first_draftings_may_compile_kernels() -> None:
    true, times, rng = DraftCosts(0.004, 2e-5, 0.003, 5e-5), DraftTimes(), np.random.default_rng(1)
    for n in range(WARM_UP + ENOUGH + 6):
        compile_s = 0.04 if n % 3 == 0 else 0.0
        requests = 64 - n
        seconds = true.draft_s(2 * requests, requests, 1 + n % 8) * rng.uniform(0.95, 1.05)
        times.observe(2 * requests, requests, 1 + n % 8, seconds + compile_s)
    learned = times.costs()
    assert learned is not None
    for case in ((60, 40, 1), (120, 60, 3), (80, 50, 6)):
        assert learned.draft_s(*case) == pytest.approx(true.draft_s(*case), rel=0.25)


def test_drafting_times_are_not_negative_and_ignore_a_stall() -> None:
    times = DraftTimes()
    for n in range(2 * REMEMBERED):
        times.observe(8, 8, 1 + n % 4, 0.001 * (1 + n % 4))
    for _ in range(REMEMBERED // 8):
        times.observe(8, 8, 2, 30.0)
    costs = times.costs()
    assert costs is not None and costs.draft_s(8, 8, 2) < 0.01
    assert min(costs.fixed_s, costs.row_s, costs.pass_s, costs.token_s) >= 0.0
