# SPDX-License-Identifier: Apache-2.0
"""The simulator against closed forms and conservation laws."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from lab.bench.rolling_table import LEAST_PROBABILITY, MEAN_TOKENS, update
from lab.local.statistics import plain_estimate_s
from lab.placement.pipeline import coupled_tokens
from lab.simulation.compare import compare, simulate_step
from lab.simulation.costs import Calibration, Costs, LinearCosts, RooflineCosts, RoundCosts
from lab.simulation.data_sheets import DEVICES, MODELS, eagle3_head, model_named
from lab.simulation.dealing import in_shards
from lab.simulation.event_loop import Rollout, RolloutResult
from lab.simulation.run_ahead import AUTO as AUTO_STEPS
from lab.simulation.run_ahead import NUM_STEPS, rolling_steps
from lab.simulation.scenario import AheadConfig, Scenario, read_scenario, shipped
from lab.simulation.setting import AUTO, FIXED, PLAIN, Fleet, Setting, Variant
from lab.simulation.simulated_engine import SimulatedEngine
from lab.simulation.speculation import (
    CoupledSpeculation,
    DecoupledSpeculation,
    NoSpeculation,
    Speculation,
)
from lab.simulation.workload import (
    LengthConfig,
    Workload,
    acceptance_for,
    fitted,
    workload,
)
from nemo_specrollout.config.block import BudgetConfig, FastestOfNConfig
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.run_ahead.decisions.flips import FlipModel
from nemo_specrollout.run_ahead.decisions.steps_ahead import Flight, StepsAhead

pytestmark = pytest.mark.unit

STEP_S = 0.01
FLAT = LinearCosts(STEP_S, 0.0)
SLOPED = LinearCosts(STEP_S, 1e-4)
SMALL = {
    "title": "small", "model": "Qwen3-8B", "cluster": {"device": "H100", "num_gpus": 8},
    "batch": {"num_prompts": 16, "num_samples": 8}, "lengths": {"median": 400, "sigma": 1.0, "max_tokens": 3000},
    "drafting": {
        "methods": [
            {"name": "head", "acceptance": 0.75, "spread": 0.8},
            {"name": "text", "draft": "text", "acceptance": 0.6, "spread": 0.8},
        ]
    },
}  # fmt: skip


def work(lengths: list[int], p: float = 0.8) -> Workload:
    return Workload(np.arange(len(lengths)), np.array(lengths), np.full((len(lengths), 1), p), 10)


def rolled(requests: Workload, speculation: Speculation, num_engines: int = 1, num_slots: int = 512) -> RolloutResult:
    rollout = Rollout(requests, [SimulatedEngine(i, speculation, 0, num_slots) for i in range(num_engines)])
    rollout.start(np.arange(len(requests.length_R)), in_shards(len(requests.length_R), num_engines))
    rollout.run()
    return rollout.result()


def small(**changes: object) -> Scenario:
    return build(Scenario, {**SMALL, **changes}, "")


# Closed forms


def test_one_engine_takes_as_long_as_its_slots_require() -> None:
    lengths = [100, 700, 300]
    assert rolled(work(lengths), NoSpeculation(FLAT)).seconds == pytest.approx(STEP_S + 700 * STEP_S)
    one_by_one = rolled(work(lengths), NoSpeculation(FLAT), num_slots=1)
    assert one_by_one.seconds == pytest.approx(3 * STEP_S + sum(lengths) * STEP_S)
    assert one_by_one.end_R.tolist() == sorted(one_by_one.end_R)


def test_a_plain_engine_agrees_with_the_counterfactual() -> None:
    lengths = LengthConfig(500, 0.9, 4000).draw(12, 8, np.random.default_rng(3)).ravel().tolist()
    table = [0.0, *(float(SLOPED.step_s(b, float(b), 0.0)) for b in range(1, len(lengths) + 1))]
    exact_s = plain_estimate_s(lengths, len(lengths), table, 0.0)
    fluid = rolled(work(lengths), NoSpeculation(SLOPED))
    prefill_s = SLOPED.prefill_s(10 * len(lengths))
    assert fluid.seconds - prefill_s == pytest.approx(exact_s, rel=0.002)


@pytest.mark.parametrize(("prompt_tokens", "computed"), [(16, 6 * 16), (17, 2 * 16 + 6 * 1), (40, 2 * 32 + 6 * 8)])
def test_samples_share_the_full_blocks_of_their_prompt(prompt_tokens: int, computed: int) -> None:
    requests = workload(np.full((2, 3), 10), prompt_tokens, np.array([0.7]), np.zeros(1), 0.0, np.random.default_rng(0))
    assert requests.tokens_to_prefill(np.arange(6)) == computed


def test_engines_with_equal_requests_are_never_idle() -> None:
    result = rolled(work([500] * 64), NoSpeculation(SLOPED), num_engines=8)
    assert result.idle_share == pytest.approx(0.0, abs=1e-9)
    assert result.seconds == pytest.approx(500 * (STEP_S + 8e-4) + SLOPED.prefill_s(80))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_fixed_drafts_speed_up_by_acceptance_over_round_cost(k: int) -> None:
    costs = RoundCosts(STEP_S, (3, 5), (1.9, 3.0))
    spoken = rolled(work([800] * 4), CoupledSpeculation(costs, BudgetConfig("fixed", k=k), k, has_weights=False))
    cost = {1: 1.3, 3: 1.9, 7: 4.1}[k]
    assert 800 * STEP_S / spoken.seconds == pytest.approx(coupled_tokens(0.8, k) / cost)


def test_perfect_instant_drafters_fill_every_step() -> None:
    instant = LinearCosts(1e-12, 0.0)
    result = rolled(work([900] * 4, p=1 - 1e-9), DecoupledSpeculation(FLAT, instant, 8))
    assert 901 * STEP_S / result.seconds == pytest.approx(9.0, rel=0.02)


def test_the_auto_budget_matches_plain_and_the_best_fixed_budget() -> None:
    costs = LinearCosts(STEP_S, 2e-4, 3e-4, 1e-6)
    for batch, p in itertools.product((1, 4, 32, 200), (0.3, 0.6, 0.9)):
        p_B = np.full(batch, p)
        fixed = [
            CoupledSpeculation(costs, BudgetConfig("fixed", k=k), 8, True).tokens_per_s(p_B, 100.0) for k in range(1, 9)
        ]
        auto = CoupledSpeculation(costs, BudgetConfig("auto"), 8, True).tokens_per_s(p_B, 100.0)
        plain = NoSpeculation(costs).tokens_per_s(p_B, 100.0)
        # The auto budget requires a margin of 3 % before it drafts.
        assert auto >= 0.999 * plain and auto >= 0.96 * max(fixed)


@pytest.mark.parametrize("train_s", [1.0, 6.0, 40.0])
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_asynchronous_steps_take_the_longer_of_both_sides(lag: int, train_s: float) -> None:
    """With lag + 1 batches of latency L at a time, each step takes max(train, (L + train) / (lag + 1))."""
    scenario = small(
        cluster={"device": "none", "num_gpus": 4, "train_gpus": 2},
        lengths={"median": 1000, "sigma": 0.0, "max_tokens": 1000}, batch={"num_prompts": 8, "num_samples": 2},
        costs={"kind": "rounds", "rounds": {"plain_step_s": 0.01, "num_drafts": [3], "plain_steps": [1.5]}},
        training={"mode": "async", "lag": lag, "train_s": train_s, "num_steps": 40},
    )  # fmt: skip
    step = simulate_step(Setting(Fleet(scenario), Variant(PLAIN)))
    assert step.rollout_s == pytest.approx(10.0)
    assert step.step_s == pytest.approx(max(train_s, (10.0 + train_s) / (lag + 1)), rel=0.01)
    assert step.parts_s["generate"] == pytest.approx(step.step_s - train_s)


@pytest.mark.parametrize("lag", [1, 2, 3, 8])
def test_the_minimum_number_of_steps_yields_a_valid_result(lag: int) -> None:
    scenario = small(
        cluster={"device": "none", "num_gpus": 4, "train_gpus": 2}, batch={"num_prompts": 8, "num_samples": 2},
        costs={"kind": "rounds", "rounds": {"plain_step_s": 0.01, "num_drafts": [3], "plain_steps": [1.5]}},
        training={"mode": "async", "lag": lag, "train_s": 6.0, "num_steps": 2 * lag + 2},
    )  # fmt: skip
    step = simulate_step(Setting(Fleet(scenario), Variant(PLAIN)))
    assert 0.0 <= step.idle_share <= 1.0 and 6.0 <= step.step_s <= 6.0 + step.rollout_s


# Conservation


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tail", [None, FastestOfNConfig(max_racers=1), FastestOfNConfig(min_gain=0.0)])
def test_tokens_and_gpu_seconds_are_conserved(tail: FastestOfNConfig | None, seed: int) -> None:
    scenario = small(seed=seed)
    for kind in (PLAIN, FIXED, AUTO):
        result = simulate_step(Setting(Fleet(scenario), Variant(kind, kind, tail))).rollout
        assert np.isfinite(result.end_R).all()
        assert result.num_tokens == pytest.approx(result.length_R.sum(), rel=1e-9)
        assert result.num_wasted_tokens == 0.0 or (result.num_races > 0 and tail is not None and tail.max_racers > 1)
        assert result.busy_s + result.idle_share * 8 * result.seconds == pytest.approx(8 * result.seconds)
        for _, spans in itertools.groupby(
            sorted(result.spans, key=lambda s: (s.engine, s.begin_s)), lambda s: s.engine
        ):
            for one, other in itertools.pairwise(spans):
                assert one.end_s <= other.begin_s + 1e-9


def test_the_comparison_moves_and_races_stragglers() -> None:
    linear = {"verify_fixed_s": 0.002, "verify_row_s": 0.0001, "draft_fixed_s": 0.0005}
    steps = compare(small(costs={"kind": "linear", "linear": linear})).steps
    moving, racing = steps[-2:]
    assert moving.variant == "moving" and moving.rollout.num_moves > 0 and moving.rollout.num_races == 0
    assert racing.variant == "racing" and racing.rollout.num_races > 0 and racing.rollout.num_wasted_tokens > 0


def test_no_request_runs_twice_unless_it_is_raced() -> None:
    lengths = LengthConfig(400, 1.0, 3000).draw(16, 8, np.random.default_rng(0))
    requests = workload(lengths, 10, np.array([0.7]), np.array([0.5]), 0.5, np.random.default_rng(1))
    rollout = Rollout(requests, [SimulatedEngine(i, NoSpeculation(SLOPED), 0, 8) for i in range(4)])
    rollout.start(np.arange(128), in_shards(128, 4))
    while np.isnan(rollout.end_R).any():
        rollout.run(rollout.now_s + STEP_S)
        running = np.concatenate([e.requests_B for e in rollout.engines])
        assert len(np.unique(running)) == len(running) and np.isnan(rollout.end_R[running]).all()


def test_the_running_share_integrates_to_all_busy_seconds() -> None:
    result = rolled(work([100, 900, 300, 500]), NoSpeculation(FLAT), num_engines=2)
    at_s, share = result.running_share(50)
    width_s = at_s[1] - at_s[0]
    assert share.sum() * width_s * 2 == pytest.approx(result.busy_s)
    assert share.max() == pytest.approx(1.0) and share[-1] == pytest.approx(0.5)


# Parts


def test_shapes_have_the_published_numbers_of_parameters() -> None:
    billions = {
        name: (shape.params / 1e9, (shape.active_params + shape.hidden_size * shape.vocab_size) / 1e9)
        for name, shape in MODELS.items()
    }
    assert billions["Qwen3-8B"][0] == pytest.approx(8.2, abs=0.05)
    assert billions["Qwen3-32B"][0] == pytest.approx(32.8, abs=0.1)
    assert billions["Qwen3-30B-A3B"] == pytest.approx((30.5, 3.3), abs=0.1)
    assert billions["Qwen3-235B-A22B"] == pytest.approx((235.0, 22.0), abs=0.3)
    assert eagle3_head(MODELS["Qwen3-8B"]).params < 0.6e9


def test_a_shape_is_read_from_a_folder(tmp_path: Path) -> None:
    folder = ROOT / "examples" / "models" / "step_adder"
    assert model_named(str(folder), "model").num_hidden_layers == 4


def test_the_roofline_has_the_expected_limits() -> None:
    ideal = Calibration(1.0, 1.0, 0.0, 0.0)
    h100 = DEVICES["H100"]
    dense = RooflineCosts(MODELS["Qwen3-8B"], h100, "bf16", "bf16", ideal)
    weights_s = 2 * MODELS["Qwen3-8B"].shared_params / h100.hbm_bytes_per_s
    assert dense.step_s(1, 1.0, 0.0) == pytest.approx(weights_s)
    assert dense.step_s(4096, 4096.0, 0.0) == pytest.approx(dense.ideal_s(4096))
    assert dense.step_s(1, 1.0, 1e6) - weights_s == pytest.approx(1e6 * 147_456 / h100.hbm_bytes_per_s)
    experts = replace(dense, shape=MODELS["Qwen3-30B-A3B"])
    few, many = float(experts.step_s(1, 1.0, 0.0)), float(experts.step_s(128, 128.0, 0.0))
    assert few < 0.15 * many and many == pytest.approx(2 * (30.5e9 - 0.3e9) / h100.hbm_bytes_per_s, rel=0.02)
    rows = np.array([1.0, 8.0, 600.0])
    assert dense.step_s(1, rows, 50.0).tolist() == [dense.step_s(1, float(n), 50.0) for n in rows]  # type: ignore[union-attr]


def test_a_fit_recovers_the_distribution() -> None:
    drawn = LengthConfig(900, 0.7, 2500).draw(400, 10, np.random.default_rng(0)).ravel()
    found = fitted(drawn, 2500)
    assert found.median == pytest.approx(900, rel=0.05) and found.sigma == pytest.approx(0.7, rel=0.05)
    assert fitted([7] * 50, 100).sigma == 0.0


def test_siblings_have_the_configured_correlation() -> None:
    logs = np.log(LengthConfig(900, 0.7, 10**9, 0.6).draw(3000, 2, np.random.default_rng(0)))
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_a_given_acceptance_length_is_reproduced(spread: float) -> None:
    centre = acceptance_for(2.8, 3, spread)
    requests = workload(
        np.full((3000, 1), 500), 10, np.array([centre]), np.array([spread]), 0.5, np.random.default_rng(0)
    )
    result = rolled(requests, CoupledSpeculation(FLAT, BudgetConfig("fixed", k=3), 3, False), num_slots=5000)
    assert result.num_tokens / result.num_request_steps == pytest.approx(2.8, rel=0.01)


# Shipped scenarios


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_scenario_is_documented_and_gains(name: str) -> None:
    scenario = read_scenario(name, ["training.num_steps=6"])
    assert scenario.source and scenario.calibrated_from
    fleet = Fleet(scenario)
    plain, auto = (simulate_step(Setting(fleet, Variant(kind, kind))) for kind in (PLAIN, AUTO))
    assert plain.step_s >= auto.step_s and plain.rollout_s > auto.rollout_s
    assert 0.0 <= auto.idle_share < 1.0


@pytest.mark.parametrize("tail", [None, FastestOfNConfig(max_racers=1)])
def test_4096_long_requests_on_2048_gpus_end(tail: FastestOfNConfig | None) -> None:
    overrides = ["cluster.num_gpus=2048", "cluster.train_gpus=0"]
    fleet = Fleet(read_scenario("nvidia-235b-512", overrides))
    step = simulate_step(Setting(fleet, Variant(AUTO, AUTO, tail)))
    assert len(step.rollout.length_R) == 4096 and step.rollout.length_R.max() == 20_000


def test_all_cost_models_have_the_same_interface() -> None:
    kinds: list[Costs] = [FLAT, RoundCosts(STEP_S, (3,), (1.5,))]
    for costs in kinds:
        many = costs.step_s(4, np.array([4.0, 16.0]), 100.0)
        assert isinstance(many, np.ndarray) or many == STEP_S
        assert costs.prefill_s(10) >= 0.0 and costs.draft_s(4, 100.0) >= 0.0


def in_flight(ahead: AheadConfig, is_apart: bool = False) -> Setting:
    """A policy of 8B whose responses are long enough to make a step of a few seconds."""
    shared = {"mode": "async", "lag": 1} if is_apart else {"mode": "sync"}
    scenario = small(
        cluster={"device": "H200", "num_gpus": 1 + is_apart, "train_gpus": int(is_apart)},
        batch={"num_prompts": 4, "num_samples": 8},
        training=shared,
    )
    training = replace(scenario.training, run_ahead=ahead)
    return Setting(Fleet(replace(scenario, training=training)), Variant("", PLAIN))


@pytest.mark.parametrize("is_apart", [False, True])
def test_texts_in_flight_gain_more_the_later_they_part(is_apart: bool) -> None:
    """Texts that part at once are worth nothing, and their price is small. The tokens are those of all responses."""
    plain = rolling_steps(in_flight(AheadConfig(1.0), is_apart), 0)
    steps = [rolling_steps(in_flight(AheadConfig(flip), is_apart), 1) for flip in (0.1, 1_000, 10_000, 1e9)]
    for step in (plain, *steps):
        assert step.rollout.num_tokens == pytest.approx(step.rollout.length_R.sum())
        assert step.rollout.seconds <= step.rollout.end_R.max() + 1e-9
    seconds = [step.rollout_s for step in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] <= 1.1 * plain.rollout_s and seconds[-1] < (0.5 if is_apart else 0.75) * plain.rollout_s
    kept = [step.early.kept for step in steps]
    assert kept == sorted(kept) and kept[0] < 0.01 and kept[-1] == 1.0


def test_two_steps_ahead_gain_more_than_one_where_updates_are_small() -> None:
    one, two = (rolling_steps(in_flight(AheadConfig(1e9)), steps) for steps in (1, 2))
    assert two.rollout_s < 0.9 * one.rollout_s
    assert two.early.ready > one.early.ready


def test_the_policy_chooses_one_step_where_updates_change_all() -> None:
    """And more where texts last."""
    assert rolling_steps(in_flight(AheadConfig(0.1)), AUTO_STEPS).early.steps == 1
    assert rolling_steps(in_flight(AheadConfig(1e9)), AUTO_STEPS).early.steps > 1.5


def test_each_further_step_must_spare_more_than_its_verification() -> None:
    """The price of a verified row is that of an 8B policy on an H200 with 32, 128 and 256 requests."""
    chosen = []
    for price in (0.025, 0.08, 0.12):
        policy = StepsAhead()
        for _ in range(20):
            policy.observe_kept(1000, 985)
            policy.observe_price(price, 1.0)
            policy.observe_flights([Flight(8, 8)] * 4)
        chosen.append(policy.steps)
    assert chosen == [4, 2, 2]


def test_branches_of_the_table_are_those_that_the_model_of_flips_chooses() -> None:
    """Where gaps of all widths are equally frequent."""
    flip_P = FlipModel(1.0).probability(np.linspace(0.0, 20.0, 200_001))
    chosen_P = flip_P >= LEAST_PROBABILITY
    found = update(1_000.0, has_branches=True)
    assert found.foreseen == pytest.approx(flip_P[chosen_P].sum() / flip_P.sum(), rel=1e-3)
    assert found.branches == pytest.approx(MEAN_TOKENS / 1_000.0 * chosen_P.sum() / flip_P.sum(), rel=1e-3)


def test_branches_that_foresee_partings_gain_where_their_rows_cost_little() -> None:
    """Engines that would be idle while other GPUs train decode them for nothing."""
    without, with_branches = (
        rolling_steps(in_flight(AheadConfig(1_000, branches=branches, foreseen=foreseen), is_apart=True), 1)
        for branches, foreseen in ((0, 0.0), (1, 0.95))
    )
    assert with_branches.early.kept > without.early.kept
    assert with_branches.rollout_s < 0.8 * without.rollout_s


def test_a_step_without_texts_in_flight_is_a_plain_synchronous_step() -> None:
    setting = in_flight(AheadConfig(1e9))
    rolling = rolling_steps(setting, 0)
    lengths = setting.requests(NUM_STEPS).length_R.reshape(NUM_STEPS, -1)[NUM_STEPS // 2 :]
    exact = [rolled(work(step.tolist()), NoSpeculation(setting.fleet.costs(0))) for step in lengths]
    assert rolling.rollout_s == pytest.approx(np.mean([result.seconds for result in exact]), rel=0.05)
    assert rolling.early.made == 0.0 and rolling.early.delay == 0.0


def test_asynchronous_steps_on_one_pool_have_nothing_to_verify() -> None:
    exact, off_policy = (rolling_steps(in_flight(AheadConfig(1e9)), 1, is_exact=on) for on in (True, False))
    assert off_policy.rollout_s < exact.rollout_s < 1.2 * off_policy.rollout_s


def test_foreseen_partings_need_branches() -> None:
    with pytest.raises(ConfigError, match=r"run_ahead.foreseen: 0.95 with 0 branches"):
        read_scenario("run-ahead-8b", ["training.run_ahead.branches=0"])


def test_engines_whose_requests_end_early_have_time_for_coming_steps() -> None:
    """A single engine that decodes one request at a time has neither a slot nor a moment for others."""
    for max_requests, gains in ((1, False), (32, True)):
        setting = in_flight(AheadConfig(1e9))
        scenario = setting.fleet.scenario
        batch = replace(scenario.batch, max_requests=max_requests, num_prompts=1)
        narrow = Setting(Fleet(replace(scenario, batch=batch)), Variant("", PLAIN))
        without, ours = (rolling_steps(narrow, steps).rollout_s for steps in (0, 1))
        assert (ours < 0.95 * without) is gains
        assert gains or ours == without
