# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a real pair: its loads, the planner's predictions for them, and its evaluation of timings."""

import pytest

from lab.bench.pair_bench import DRAINING, ONE, TWO, WAYS, Found, Load, Plan, loads, rows_of, verdict_of
from lab.bench.pair_engines import COUPLED, DECOUPLED, PLAIN, block_of
from lab.bench.placement_ways import Timed, Way
from lab.placement.cost_tables import CostCurve, CostTables
from lab.placement.planner import place

pytestmark = pytest.mark.unit

COUNTS = (1, 4, 16, 32)
TABLES = CostTables(
    "test",
    "policy",
    "draft",
    (CostCurve(1, COUNTS, (0.04, 0.05, 0.10, 0.18)), CostCurve(2, COUNTS, (0.03, 0.035, 0.06, 0.10))),
    "thread",
    (CostCurve(1, COUNTS, (0.012, 0.013, 0.016, 0.020)),),
    (CostCurve(1, COUNTS, (0.013, 0.014, 0.017, 0.021)), CostCurve(2, COUNTS, (0.009, 0.010, 0.012, 0.014))),
)


def timed(seconds: float, tokens: int = 1) -> Timed:
    before = {"proposed": 0, "accepted": 0, "supply": None}
    return Timed(seconds, 10, [[tokens]], before, {"proposed": 200, "accepted": 120, "supply": None})


def test_a_draining_rollout_has_lengths_from_the_shortest_to_the_longest() -> None:
    batch, draining = loads([4], 1.0)
    assert batch == Load("4", (64,) * 4)
    assert draining.name == DRAINING and draining.lengths[0] == 16 and draining.lengths[-1] == 256
    assert list(draining.lengths) == sorted(draining.lengths)


def test_the_plan_of_equal_lengths_is_the_planner_s() -> None:
    plan = Plan(TABLES, Load("4", (64,) * 4), 0.7)
    options = place(TABLES, 4, 2, 0.7, 8, max_groups=1).options
    coupled = next(o for o in options if (o.mode, o.verifier_size, o.k) == (COUPLED, 2, 4))
    assert plan.speed(TWO, Way(COUPLED, 4)) == pytest.approx(coupled.speedup)
    assert plan.speed(TWO, Way(PLAIN)) == 1.0 and plan.speed(ONE, Way(DECOUPLED)) is None
    ways = [(TWO, Way(PLAIN)), (TWO, Way(COUPLED, 4))]
    assert plan.choice(ways) == ways[0] and Plan(TABLES, Load("1", (64,)), 0.7).choice(ways) == ways[1]


def test_the_plan_of_a_draining_rollout_adds_up_its_stages() -> None:
    way = (TWO, Way(COUPLED, 2))
    stages = [Plan(TABLES, Load("", (10,) * n), 0.6).speed(*way) for n in (1, 2)]
    both = Plan(TABLES, Load("", (10, 20)), 0.6).speed(*way)
    assert None not in (*stages, both)
    assert min(stages) <= both <= max(stages)  # type: ignore[type-var, operator]


def test_the_verdict_says_whether_the_planner_chose_the_fastest_way() -> None:
    load = Load("4", (64,) * 4)
    found = Found({("4", *key): [timed(2.0), timed(2.2)] for key in WAYS})
    found.timed["4", TWO, Way(COUPLED, 2)] = [timed(1.0), timed(1.1)]
    found.timed["4", ONE, Way(DECOUPLED)] = [timed(1.6), timed(2.2)]
    found.timed["4", TWO, Way(COUPLED, 4)] = [timed(4.0, tokens=2), timed(4.4)]
    plan = Plan(TABLES, load, found.acceptance("4"))
    assert found.acceptance("4") == pytest.approx(0.7041, abs=1e-3)
    rows = {(row["way"], row["threads"]): row for row in rows_of(load, found, plan)}
    assert rows["coupled k=2", "2"]["over_plain"] == pytest.approx(2.0) and rows["coupled k=2", "2"]["equal"]
    assert not rows["coupled k=4", "2"]["equal"]
    auto = rows["decoupled auto", "1+1"]
    assert (auto["lowest"], auto["highest"], auto["predicted"]) == (1.0, 1.25, None)
    verdict = verdict_of(load, found, plan)
    assert verdict["best"] == "coupled k=2 on 2"
    assert verdict["is_best"] == (verdict["chosen"] == verdict["best"])
    assert verdict["autos_over_best_fixed"]["decoupled auto"] == pytest.approx(1.125 / 2.0)


def test_a_layout_with_both_drafters_may_share_a_remote_one() -> None:
    assert block_of("both", "DRAFT", ["tcp://127.0.0.1:5570"]).remote.addresses == ("tcp://127.0.0.1:5570",)  # type: ignore[union-attr]
    assert block_of("both", "DRAFT").remote.workers == 1  # type: ignore[union-attr]
    assert not block_of(PLAIN, "DRAFT").drafters
