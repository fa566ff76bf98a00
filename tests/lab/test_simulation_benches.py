# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the benches of the simulator and of asynchronous runs. No engine is started."""

import numpy as np
import pytest
from conftest import ROOT

from lab.bench.loop_bench import WARM_UP, WAYS, idle_share, row_of, step_s
from lab.bench.simulation_bench import (
    FEW,
    MANY,
    MOVING,
    Calibration,
    Case,
    K,
    _curve,
    _head_quality,
    cases_of,
    predicted_s,
    rows_of,
)
from lab.local.run_config import read_run_config
from lab.placement.cost_tables import CostCurve
from lab.simulation.setting import AUTO, FIXED, PLAIN
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import Rollout

pytestmark = pytest.mark.unit
CONFIG = read_run_config(load_config(ROOT / "examples" / "configs" / "quickstart_head_cpu.yaml", []))[0]


def calibration(acceptance: float = 0.5, draft_s: float = 0.0005, row_s: float = 0.0001) -> Calibration:
    """Returns steps of 10 ms plus a time for each row."""
    counts = (1, 1000)
    curve = CostCurve(1, counts, tuple(0.01 + row_s * n for n in counts))
    drafting = CostCurve(1, counts, (draft_s, draft_s))
    return Calibration(dict.fromkeys((PLAIN, FIXED, AUTO), curve), drafting, acceptance, 0.0, 12)


def prefill_s(num_requests: int) -> float:
    """By that calibration."""
    return 0.01 + 0.0001 * 12 * num_requests


def test_a_plain_rollout_takes_a_step_for_each_longest_token() -> None:
    lengths = np.full(FEW, 100)
    rows = 16
    expected_s = 100 * (0.01 + 0.0001 * rows) + prefill_s(16)
    assert predicted_s(Case(PLAIN, 1, FEW), lengths, calibration(), CONFIG) == pytest.approx(expected_s, rel=0.01)
    two_s = predicted_s(Case(PLAIN, 2, FEW), lengths, calibration(), CONFIG)
    assert two_s == pytest.approx(100 * (0.01 + 0.0001 * 8) + prefill_s(8), rel=0.01)


def test_drafts_shorten_it_by_what_they_emit() -> None:
    lengths = np.full(FEW, 100)
    emitted = sum(0.5**i for i in range(K + 1))
    step = 0.01 + 0.0001 * 16 * (1 + K) + K * 0.0005
    fixed_s = predicted_s(Case(FIXED, 1, FEW), lengths, calibration(), CONFIG)
    assert fixed_s == pytest.approx(100 / emitted * step + prefill_s(16), rel=0.01)
    dear = calibration(draft_s=0.1)
    assert predicted_s(Case(AUTO, 1, FEW), lengths, dear, CONFIG) == pytest.approx(
        predicted_s(Case(PLAIN, 1, FEW), lengths, dear, CONFIG)
    ), "drafts that do not pay are not made"


def test_moving_shortens_an_uneven_rollout() -> None:
    lengths = np.concatenate([np.full((4, 8), 600), np.full((4, 8), 20)])
    dear_rows = calibration(row_s=0.001)
    still, moving = (predicted_s(Case(PLAIN, 2, MANY, tail), lengths, dear_rows, CONFIG) for tail in (None, MOVING))
    assert moving < still


def test_the_head_is_judged_by_tokens_a_step_and_their_spread() -> None:
    rng = np.random.default_rng(0)
    rollouts, sample_stats = [], []
    for p in (0.4, 0.8) * 40:
        accepted = sum(int(np.argmin([*(rng.random(K) < p), False])) for _ in range(200))
        rollouts.append(Rollout([0] * (200 + accepted), [0.0] * (200 + accepted), "stop"))
        sample_stats.append({"num_accepted": accepted})
    length, spread = _head_quality(rollouts, [sample_stats, [None] * len(sample_stats)])
    assert length == pytest.approx(np.mean([sum(p**i for i in range(K + 1)) for p in (0.4, 0.8)]), rel=0.03)
    assert spread == pytest.approx((np.log(4) - np.log(2 / 3)) / 2, rel=0.1)


def test_a_curve_is_of_means() -> None:
    curve = _curve(np.array([4.0, 4, 4, 32, 32]), np.array([0.01, 0.01, 0.04, 0.1, 0.1]))
    assert curve.counts == (4, 32) and curve.seconds == pytest.approx((0.02, 0.1))


def test_an_error_is_of_the_sum_over_rounds() -> None:
    (row,) = rows_of([{"a": (1.0, 1.1)}, {"a": (3.0, 2.7)}, {"a": (2.0, 2.0)}])
    assert row["error"] == pytest.approx(-0.2 / 6) and row["errors"] == pytest.approx([-0.1, 0.0, 0.1])


def test_idle_cores_of_both_kinds_of_run() -> None:
    parts = {"logprob_s": 1.0, "train_s": 3.0, "refit_s": 0.0, "rollout_s": 4.0, "generation_s": 4.0}
    synchronous = {**parts, "tail": {"idle_share": 0.25}}
    assert step_s(synchronous) == 8.0 and idle_share(synchronous) == pytest.approx(0.25 * 4 / 8)
    asynchronous = {**parts, "generation_s": 1.0, "collector_idle_s": 2.0}
    assert step_s(asynchronous) == 5.0 and idle_share(asynchronous) == pytest.approx((1 + 2) / 10)
    with_head = {**synchronous, "draft_refresh": {"decision": "it pays", "refresh_s": 2.0}}
    assert step_s(with_head) == 10.0 and step_s({**synchronous, "draft_refresh": {"decision": "no"}}) == 8.0
    known = {"acceptance_length": 2.0, "reward": 0.5, "logprob_gap": 1e-3, "policy_lag_mean": 1.0}
    row = row_of(WAYS[-1], [{**asynchronous, **known}] * (WARM_UP + 3))
    assert (row["step_s"], row["generation_s"], row["train_s"], row["age"]) == (5.0, 1.0, 4.0, 1.0)


def test_one_worker_is_simulated_with_the_requests_of_a_step() -> None:
    cases = cases_of(CONFIG, one_worker=True)
    assert [(c.kind, c.num_workers, c.size, c.tail) for c in cases] == [
        (k, 1, (8, 8), None) for k in (PLAIN, FIXED, AUTO)
    ]
    assert len(cases_of(CONFIG, one_worker=False)) == 15 and Case(AUTO, 2, MANY, MOVING) in cases_of(CONFIG, False)
