# SPDX-License-Identifier: Apache-2.0
"""Simulated steps in which idle engines take over stragglers, make texts of coming steps, or do both."""

from dataclasses import replace

import numpy as np
import pytest

from lab.simulation.rolling_engine import EarlyTerms, RollingEngine, TextsInFlight, early_prices
from lab.simulation.run_ahead import RollingResult, rolling_steps
from lab.simulation.scenario import AheadConfig, Scenario
from lab.simulation.setting import PLAIN, Fleet, Setting, Variant
from lab.simulation.speculation import NoSpeculation
from lab.simulation.workload import Workload
from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.run_ahead.decisions.early_share import num_early
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

pytestmark = pytest.mark.unit
MOVING = FastestOfNConfig(max_racers=1)


def uneven(tail: FastestOfNConfig | None) -> Setting:
    """Four engines whose rows are dear, so that an engine with many long responses is late."""
    scenario = build(
        Scenario,
        {
            "title": "uneven", "model": "Qwen3-8B", "cluster": {"device": "none", "num_gpus": 4},
            "batch": {"num_prompts": 8, "num_samples": 4, "prompt_tokens": 16},
            "lengths": {"median": 300, "sigma": 1.0, "max_tokens": 2000, "group_share": 1.0},
            "drafting": {"methods": [{"name": "head", "acceptance": 0.7}]},
            "costs": {"kind": "linear", "linear": {"verify_fixed_s": 0.005, "verify_row_s": 0.002}},
        },
        "",
    )  # fmt: skip
    training = replace(scenario.training, run_ahead=AheadConfig(30_000))
    return Setting(Fleet(replace(scenario, training=training)), Variant("", PLAIN, tail))


def steps(num_ahead: int, tail: FastestOfNConfig | None) -> RollingResult:
    return rolling_steps(uneven(tail), num_ahead)


def test_idle_engines_take_over_stragglers_beside_texts_of_coming_steps() -> None:
    neither, moving = steps(0, None), steps(0, MOVING)
    ahead, both = steps(1, None), steps(1, MOVING)
    assert moving.moves > 0 and both.moves > 0 and neither.moves == ahead.moves == 0
    assert moving.rollout_s < 0.95 * neither.rollout_s and ahead.rollout_s < 0.95 * neither.rollout_s
    assert both.rollout_s < ahead.rollout_s
    assert moving.idle_share < neither.idle_share
    assert both.early.made > 0 and moving.early.made == 0
    for step in (neither, moving, ahead, both):
        assert step.rollout.num_tokens == pytest.approx(step.rollout.length_R.sum())
        assert np.isfinite(step.rollout.end_R).all() and step.rollout.seconds == pytest.approx(step.rollout.end_R.max())


def engine(num_own: int, num_coming: int, first: int = 0) -> RollingEngine:
    """An engine with requests of 100 tokens, numbered from `first` on."""
    num = num_own + num_coming
    setting = uneven(None)
    speculation = NoSpeculation(setting.fleet.costs(0))
    prices = early_prices(speculation, 8, 16, np.full(4, 100), 1)
    work = Workload(np.arange(num), np.full(num, 100), np.full((num, 1), 0.7), 16)
    ahead_I = np.repeat([0, 1], [num_own, num_coming])
    texts = TextsInFlight.at_start(first + np.arange(num), work, ahead_I, np.zeros(num), np.zeros(num, bool))
    return RollingEngine(0, speculation, 8, texts, EarlyTerms(prices, 0.95, 0.0))


def test_early_work_is_worth_what_it_spares_for_a_second_of_the_engine() -> None:
    one = engine(3, 4)
    terms = one._terms
    assert terms is not None
    worth = one.early_worth()
    candidates = one._early_candidates(terms, 0)[1]
    for num_own, rate in enumerate(worth.rates[:4]):
        num = num_early(terms.prices, num_own, candidates)
        spared_s = float(terms.prices.gain_E(candidates[:num]).sum()) if num else 0.0
        delay_s = terms.prices.delay_s(num_own, num) if num_own else 0.0
        assert rate == pytest.approx(max(spared_s - delay_s, 0.0) / terms.prices.step_s(num_own + num))
    assert worth.rates[0] > 0.0 and min(worth.rates) >= 0.0
    assert worth.left_s == pytest.approx(100 * float(terms.prices.gain_E(candidates).sum()))
    assert engine(3, 0).early_worth() == EarlyWorth()


def test_a_request_goes_on_where_it_was_when_it_moves() -> None:
    source, target = engine(3, 0), engine(0, 2, first=3)
    source.run(0.05)
    before = source.tokens_at(0.05)[source.requests_B == 1]
    target.run(0.05)
    target.take(source.give(1))
    assert source.requests_B.tolist() == [0, 2] and source.load == 2
    assert target.requests_B.tolist() == [1] and target.tokens_at(0.05) == pytest.approx(before)
    assert target.seconds > 0.05, "the target computes the text first"
    for one in (source, target):
        one.run()
    assert source.is_done and target.is_done and np.isfinite(target.texts.end_I[target.texts.numbers_I == 1]).all()
