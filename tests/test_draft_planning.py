# SPDX-License-Identifier: Apache-2.0
"""Whom a drafter with weights drafts for, what that costs, and the rows that it has not read: pure objects."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.generation.row_buffer import RowBuffer, StepRows
from nemo_specrollout.scheduling.acceptance import AcceptanceEstimator
from nemo_specrollout.scheduling.draft_plan import (
    ALONE,
    BENEFIT_OF_DOUBT,
    BESIDE_TEXT,
    TRIAL_DEPTH,
    TRIAL_REQUESTS,
    TRIAL_SHARE,
    AutoPlanner,
    DraftPlan,
    ModelTerms,
    PlanObservation,
    build_planner,
)
from nemo_specrollout.scheduling.draft_time import ENOUGH, REMEMBERED, WARM_UP, DraftCosts, DraftTimes
from nemo_specrollout.scheduling.following import GENERATIONS, WATCH_SHARE, Following
from nemo_specrollout.scheduling.going_rate import GoingRate
from nemo_specrollout.scheduling.step_time import StepCosts

pytestmark = pytest.mark.unit

LITERAL = ModelTerms(surcharge=0.0, charged_rows=5, max_rest=0, is_steady=False)
FLAT = StepCosts(np.full(400, 0.010))
LINEAR = StepCosts(0.001 * np.arange(400))


def observe(
    found: float,
    forecast: float,
    costs: StepCosts,
    draft: DraftCosts | None,
    requests: int = 4,
    now_s: float = 0.0,
    going: float = 1.0,
) -> PlanObservation:
    """`requests` alike: each next draft is right with those probabilities; K = 6; a second is worth `going` times what plain
    decoding makes of it."""
    powers_K = np.arange(1, 7)
    grid = [np.tile(p**powers_K, (requests, 1)) for p in (found, forecast)]
    caps_B, unread_B = np.full(requests, 8), np.full(requests, 2)
    rate = going * requests / float(costs.plain_s[requests])
    return PlanObservation(grid[0], grid[1], caps_B, unread_B, costs, draft, now_s, rate)


def test_free_drafting_on_a_flat_step_is_as_deep_as_can_be() -> None:
    plan = AutoPlanner(0.03, LITERAL).plan(observe(0.0, 0.9, FLAT, DraftCosts()))
    assert plan.depth == 6 and plan.asked_B.all()


def test_a_pass_that_takes_as_long_as_a_step_makes_drafts_shorter_or_none() -> None:
    deep = AutoPlanner(0.03, LITERAL).plan(observe(0.0, 0.9, FLAT, DraftCosts(fixed_s=0.001, pass_s=0.001))).depth
    short = AutoPlanner(0.03, LITERAL).plan(observe(0.0, 0.9, FLAT, DraftCosts(fixed_s=0.001, pass_s=0.006))).depth
    none = AutoPlanner(0.03, LITERAL).plan(observe(0.0, 0.9, FLAT, DraftCosts(fixed_s=0.060))).depth
    assert deep > short > none == 0


def test_where_rows_cost_as_much_as_requests_nothing_is_drafted() -> None:
    assert AutoPlanner(0.03, LITERAL).plan(observe(0.0, 0.9, LINEAR, DraftCosts(fixed_s=0.001))).depth == 0


def test_a_model_no_better_than_what_was_found_is_not_asked() -> None:
    assert AutoPlanner(0.03, LITERAL).plan(observe(0.8, 0.8, FLAT, DraftCosts())).depth == 0
    assert AutoPlanner(0.03, LITERAL).plan(observe(0.3, 0.8, FLAT, DraftCosts(fixed_s=0.001))).depth > 0


def test_a_dear_first_pass_makes_drafts_deep_not_none() -> None:
    assert AutoPlanner(0.03, LITERAL).plan(observe(0.0, 0.9, FLAT, DraftCosts(fixed_s=0.012, pass_s=0.001))).depth == 6


def test_plans_that_do_not_come_true_are_believed_less_until_doubt_fades() -> None:
    planner, observed = AutoPlanner(0.03, LITERAL), observe(0.6, 0.8, FLAT, DraftCosts(fixed_s=0.001))
    promised = planner.plan(observed)
    assert promised.depth > 0 and promised.tokens_per_s > 400.0
    without = replace(promised, depth=0)
    for _ in range(100):
        planner.came_true(promised, 4, 4 / (0.4 * promised.tokens_per_s))
        planner.came_true(without, 4, 4 / promised.tokens_per_s)
    assert planner.plan(observed).depth == 0 and planner.faith(4) < 0.6 and planner.faith(9) == 1.0
    for _ in range(2000):
        planner.came_true(without, 4, 4 / promised.tokens_per_s)
    assert planner.plan(observed).depth > 0


def test_a_machine_slower_than_promised_is_slow_with_a_model_and_without() -> None:
    planner, observed = AutoPlanner(0.03, LITERAL), observe(0.3, 0.8, FLAT, DraftCosts(fixed_s=0.001))
    promised = planner.plan(observed)
    for depth in (promised.depth, 0) * 100:
        planner.came_true(replace(promised, depth=depth), 4, 4 / (0.6 * promised.tokens_per_s))
    assert planner.faith(4) == pytest.approx(1.0, rel=0.05) and planner.plan(observed).depth == promised.depth


def test_a_long_backlog_is_no_reason_never_to_begin() -> None:
    observed = observe(0.0, 0.9, FLAT, DraftCosts(fixed_s=0.002, row_s=1e-4, pass_s=0.001))
    observed.unread_B[:] = 1000
    assert AutoPlanner(0.03, LITERAL).plan(observed).asked_B.all()


def test_where_a_second_is_worth_more_it_is_not_spent_on_a_model() -> None:
    """Text found next makes twice plain decoding's tokens: what the model adds to a poor step must come as fast."""
    draft = DraftCosts(fixed_s=0.008, pass_s=0.001)
    assert AutoPlanner(0.03, LITERAL).plan(observe(0.1, 0.6, FLAT, draft, going=1.0)).depth > 0
    assert AutoPlanner(0.03, LITERAL).plan(observe(0.1, 0.6, FLAT, draft, going=2.0)).depth == 0


@pytest.mark.parametrize("going", [1.0, 1.5, 4.0])
def test_where_steps_are_alike_none_is_asked_for_more_than_its_best(going: float) -> None:
    """Smaller batches gain more from a model: their rate must not keep a larger one from the little that it can gain."""
    draft = DraftCosts(fixed_s=0.008, pass_s=0.001)
    plan = AutoPlanner(0.03, ALONE).plan(observe(0.0, 0.6, FLAT, draft, going=going))
    assert plan.depth > 0 and plan.tokens_per_s > 4 / 0.010
    assert AutoPlanner(0.03, ALONE).plan(observe(0.0, 0.1, FLAT, draft, going=going)).depth == 0


def test_a_model_alone_has_the_benefit_of_the_doubt_until_it_was_tried() -> None:
    planner, observed = AutoPlanner(0.03, ALONE), observe(0.0, 0.6, FLAT, DraftCosts(fixed_s=0.016))
    plan = planner.plan(observed)
    assert plan.depth > 0 and planner.faith(4) == BENEFIT_OF_DOUBT
    for _ in range(200):
        planner.came_true(plan, 4, 4 / plan.tokens_per_s)
    assert planner.faith(4) == pytest.approx(1.0, rel=0.01) and planner.plan(observed).depth == 0


def test_beside_text_a_model_pays_for_all_that_it_has_missed() -> None:
    observed = observe(0.0, 0.8, FLAT, DraftCosts(fixed_s=0.002, row_s=3e-4, pass_s=0.001))
    observed.unread_B[:] = 20
    assert AutoPlanner(0.03, ALONE).plan(observed).depth > 0
    assert AutoPlanner(0.03, BESIDE_TEXT).plan(observed).depth == 0
    observed.unread_B[:] = 1
    assert AutoPlanner(0.03, BESIDE_TEXT).plan(observed).depth > 0


def test_a_backlog_is_no_broken_promise() -> None:
    observed = observe(0.0, 0.9, FLAT, DraftCosts(fixed_s=0.002, row_s=1e-4))
    observed.unread_B[:] = 500
    planner = AutoPlanner(0.03, LITERAL)
    plan = planner.plan(observed)
    reading_s = 4 * (500 - LITERAL.charged_rows) * 1e-4
    planner.came_true(plan, 12, 12 / plan.tokens_per_s + reading_s)
    assert planner.faith(4) == pytest.approx(1.0)


def test_after_refusals_the_planner_rests_until_the_batch_has_another_size() -> None:
    planner, refused = AutoPlanner(0.03, BESIDE_TEXT), observe(0.9, 0.1, FLAT, DraftCosts(fixed_s=0.001))
    steps = [planner.should_plan(4) and planner.plan(refused).depth == 0 for _ in range(400)]
    asked = np.flatnonzero(steps)
    assert np.diff(asked).max() == BESIDE_TEXT.max_rest + 1 and len(asked) < 60
    assert planner.should_plan(9)
    paid = AutoPlanner(0.03, LITERAL)
    assert all(paid.should_plan(4) and paid.plan(observe(0.0, 0.9, FLAT, DraftCosts())).depth for _ in range(50))


def test_the_going_rate_is_that_of_the_faster_steps() -> None:
    costs, rate = FLAT, GoingRate()
    assert rate.of(4, costs) == 4 / 0.010
    for _ in range(300):
        rate.observe(4, 8, 0.010, costs, asked_model=False)
        rate.observe(4, 8, 0.016, costs, asked_model=True)
        rate.observe(40, 20, 0.010, costs, asked_model=False)
    assert rate.of(4, costs) == rate.of(5, costs) / 1.25 == pytest.approx(8 / 0.010)
    assert rate.of(40, costs) == 40 / 0.010


def test_only_requests_that_gain_are_asked() -> None:
    observed = observe(0.0, 0.9, FLAT, DraftCosts(fixed_s=0.001, pass_s=0.001))
    observed.found_BK[0] = 0.97 ** np.arange(1, 7)
    observed.caps_B[1] = 0
    plan = AutoPlanner(0.03, LITERAL).plan(observed)
    assert plan.asked_B.tolist() == [False, False, True, True]


@given(
    st.lists(st.tuples(st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=9),
    st.floats(0, 0.02), st.floats(0, 0.02), st.floats(1, 3),
)  # fmt: skip
def test_a_plan_is_worth_more_than_what_there_was(
    requests: list[tuple[float, float, int, int]], fixed_s: float, pass_s: float, going: float
) -> None:
    powers_K = np.arange(1, 7)
    found, forecast = (np.array([r[i] ** powers_K for r in requests]) for i in (0, 1))
    caps_B, unread_B = (np.array([r[i] for r in requests]) for i in (2, 3))
    costs, draft = StepCosts(0.005 + 0.0005 * np.arange(200)), DraftCosts(fixed_s, 1e-5, pass_s, 1e-5)
    rate = going * len(requests) / float(costs.plain_s[len(requests)])
    plan = AutoPlanner(0.0, LITERAL).plan(PlanObservation(found, forecast, caps_B, unread_B, costs, draft, 0.0, rate))
    assert not (plan.asked_B & (caps_B == 0)).any()
    assert (plan.depth > 0) == plan.asked_B.any()
    if plan.depth:
        chosen = np.where(plan.asked_B[:, None] & (np.arange(6) < plan.depth), forecast, 0.0)
        chosen[~plan.asked_B] = found[~plan.asked_B]
        num_rows = int(np.minimum(unread_B, LITERAL.charged_rows)[plan.asked_B].sum())
        draft_s = draft.draft_s(num_rows, int(plan.asked_B.sum()), plan.depth)
        more = most_worth(chosen, caps_B, costs, rate) - rate * draft_s - most_worth(found, caps_B, costs, rate)
        assert 0.0 < plan.won_s <= more / rate + 1e-9


def most_worth(survival_BK: np.ndarray, caps_B: np.ndarray, costs: StepCosts, rate: float) -> float:
    """Tokens less what the step's seconds are worth, if the likeliest drafts are verified, as many as pay."""
    allowed = np.where(np.arange(survival_BK.shape[1]) < caps_B[:, None], survival_BK, 0.0)
    gains = np.sort(allowed[allowed > 0])[::-1]
    tokens = len(caps_B) + np.concatenate([[0.0], np.cumsum(gains)])
    return max(t - rate * costs.step_s(len(caps_B), n) for n, t in enumerate(tokens))


def test_nothing_is_known_of_costs_at_first_so_all_are_asked_at_each_depth_in_turn() -> None:
    planner = AutoPlanner(0.03, LITERAL)
    plans = [planner.plan(observe(0.9, 0.1, FLAT, None)) for _ in range(6)]
    assert {p.depth for p in plans} == set(range(1, 7)) and all(p.asked_B.all() for p in plans)


def test_trials_of_a_useless_model_take_a_small_share_of_the_time() -> None:
    planner, now_s, trials_s = AutoPlanner(0.03, LITERAL), 0.0, 0.0
    for _ in range(20_000):
        plan = planner.plan(observe(0.0, 0.01, FLAT, DraftCosts(fixed_s=0.05), requests=9, now_s=now_s))
        now_s += 0.01
        if plan.depth:
            assert plan.depth == TRIAL_DEPTH and plan.asked_B.sum() == TRIAL_REQUESTS
            now_s, trials_s = now_s + 0.05, trials_s + 0.05
    assert 0.8 * TRIAL_SHARE < trials_s / now_s <= 1.3 * TRIAL_SHARE


def test_a_trial_is_of_those_who_have_the_least_to_read() -> None:
    planner, observed = AutoPlanner(0.03, LITERAL), observe(0.0, 0.01, FLAT, DraftCosts(fixed_s=0.05), requests=8)
    observed.unread_B[:] = (9, 0, 3, 400, 2, 7, 5, 80)
    assert planner.plan(observed).depth == 0
    trial = planner.plan(replace(observed, now_s=1000.0))
    assert np.flatnonzero(trial.asked_B).tolist() == [2, 4, 5, 6] and trial.won_s == 0.0


@pytest.mark.parametrize("policy", ["fixed", "random", "auto"])
@pytest.mark.parametrize("draft", [DraftCosts(), None], ids=["costs known", "costs unknown"])
def test_nobody_without_room_is_asked_nor_who_is_not_followed(policy: str, draft: DraftCosts | None) -> None:
    planner = build_planner(BudgetConfig(policy, k=3), ALONE)
    num_asked = 0
    for _ in range(50):
        observed = observe(0.0, 0.9, FLAT, draft)
        observed.caps_B[:] = (0, 4, 0, 1)
        observed.unread_B[:] = (1, 1, 0, 0)
        plan = planner.plan(observed)
        assert isinstance(plan, DraftPlan) and not plan.asked_B[[0, 2, 3]].any()
        num_asked += int(plan.asked_B[1])
    assert num_asked > 10


def follow(following: Following, won_s: float, cost_s: float, steps: range) -> float:
    """Steps of 10 ms with 8 requests, of which one ends in each; the share of steps in which they are followed."""
    num_followed = 0
    for n in steps:
        if following.is_on:
            num_followed += 1
            following.ended(1)
        following.step(8, won_s, cost_s, 0.010 * n)
    return num_followed / len(steps)


def test_a_model_that_wins_less_than_following_costs_is_looked_at_now_and_then() -> None:
    following, cost_s = Following(), 2e-4
    first = GENERATIONS * 8 - 1
    assert follow(following, 1e-4, cost_s, range(first)) == 1.0 and following.is_on
    share = follow(following, 1e-4, cost_s, range(first, 50_000))
    assert 0.8 * WATCH_SHARE < share * cost_s / 0.010 < 1.1 * WATCH_SHARE
    assert follow(following, 3e-4, cost_s, range(50_000, 100_000)) > 0.95 and following.is_on


def test_a_model_with_new_weights_is_followed_at_once() -> None:
    planner, refused = AutoPlanner(0.03, LITERAL), DraftPlan(0, np.zeros(4, np.bool_))
    planner.ended(GENERATIONS * 4)
    planner.followed(refused, 4, 1e-4, 0.0)
    assert not planner.follows
    planner.model_changed()
    assert planner.follows


def test_costs_of_drafting_are_learned() -> None:
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


def test_a_third_of_the_first_draftings_may_meet_kernels_to_be_compiled() -> None:
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


def test_costs_are_never_negative_and_a_stall_counts_for_little() -> None:
    times = DraftTimes()
    for n in range(2 * REMEMBERED):
        times.observe(8, 8, 1 + n % 4, 0.001 * (1 + n % 4))
    for _ in range(REMEMBERED // 8):
        times.observe(8, 8, 2, 30.0)
    costs = times.costs()
    assert costs is not None and costs.draft_s(8, 8, 2) < 0.01
    assert min(costs.fixed_s, costs.row_s, costs.pass_s, costs.token_s) >= 0.0


def test_a_new_head_is_judged_anew() -> None:
    estimator = AcceptanceEstimator(2, max_tokens=2, level_priors=np.full((2, 16), 0.5))
    before = [estimator.forecast(np.array([0]), d) for d in (0, 1)]
    text, wrong = np.full((1, 20), 7, np.int32), np.full((2, 1, 2), 9, np.int32)
    for n in range(2, 18, 2):
        proposals = (wrong, np.zeros((2, 1, 2), np.int8), np.full((2, 1), 2))
        estimator.remember(np.array([0]), np.array([n]), proposals, np.array([0]), np.array([0]))
        estimator.score(np.array([0]), text, np.array([n + 2]))
    after = [estimator.forecast(np.array([0]), d) for d in (0, 1)]
    assert all((a < b).all() for a, b in zip(after, before, strict=True))
    estimator.forget_drafter(1)
    assert (estimator.forecast(np.array([0]), 1) == before[1]).all()
    assert (estimator.forecast(np.array([0]), 0) == after[0]).all()


def test_rows_of_rejected_drafts_are_left_out() -> None:
    """Three requests: 3 drafts of which 1 was right; a prompt of 4 tokens; no drafts."""
    token_ids = np.arange(60, dtype=np.int32).reshape(3, 20)
    step = StepRows.of(
        np.array([4, 4, 1]),
        np.array([3, 0, 0]),
        np.array([2, 0, 1]),
        np.array([10, 0, 7]),
        token_ids,
        np.array([5, 2, 0]),
    )
    assert step.lanes_R.tolist() == [5, 5, -1, -1, 2, 2, 2, 2, 0]
    kept = step.only(np.flatnonzero(step.lanes_R >= 0))
    assert kept.positions_R.tolist() == [10, 11, 0, 1, 2, 3, 7]
    assert kept.token_ids_R.tolist() == [10, 11, 20, 21, 22, 23, 47]
    assert step.of_lanes(np.array([True, False, False, False, False, True])).tolist() == [0, 1, 8]


@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "take", "forget"]), st.integers(0, 3), st.integers(1, 6)), max_size=60
    )
)
def test_a_row_buffer_is_a_list_for_each_lane(operations: list[tuple[str, int, int]]) -> None:
    buffer, model = RowBuffer(24, 4), {lane: [] for lane in range(4)}  # type: ignore[var-annotated]
    stamp = 0
    for operation, lane, count in operations:
        if operation == "append" and sum(map(len, model.values())) + count <= buffer.capacity:
            values = np.arange(stamp, stamp + count)
            stamp += count
            num_gaps = count // 3
            start = model[lane][-1][0] + 1 if model[lane] else 0
            positions = np.arange(start, start + count)
            parts = [torch.from_numpy(values[:, None].astype(np.float32)), torch.full((count, 2), float(lane))]
            lanes = np.full(count, lane)
            lanes[count - num_gaps :] = -1
            buffer.append(parts, StepRows(lanes, positions, values.astype(np.int32)))
            model[lane] += list(zip(positions.tolist(), values.tolist(), strict=True))[: count - num_gaps]
        elif operation == "take" and stamp:
            lanes = np.array([lane, (lane + 1) % 4])
            rows = buffer.take(lanes)
            wanted = [pair for each in lanes.tolist() for pair in model[each]]
            assert list(zip(rows.positions_N.tolist(), rows.token_ids_N.tolist(), strict=True)) == wanted
            assert rows.hidden_NF[:, 0].tolist() == [v for _, v in wanted]
            assert rows.counts_B.tolist() == [len(model[each]) for each in lanes.tolist()]
            model.update({each: [] for each in lanes.tolist()})
        elif operation == "forget":
            buffer.forget([lane])
            model[lane] = []
        assert buffer.counts(np.arange(4)).tolist() == [len(model[each]) for each in range(4)]
        assert buffer.room == buffer.capacity - sum(map(len, model.values()))
