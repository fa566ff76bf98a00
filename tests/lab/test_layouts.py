# SPDX-License-Identifier: Apache-2.0
"""The study of layouts, and the simulator's error on what benches have measured."""

import itertools
from typing import Any

import numpy as np
import pytest

from lab.bench.layouts import picture, tables_of, winners
from lab.bench.simulation_error import layout_s, pair_rows, placement_rows, speculation_of, tail_rows
from lab.placement.cost_tables import CostCurve, CostTables
from lab.simulation.layouts import LAYOUTS, REMOTE, Case, layout_rows, region_rows
from lab.simulation.measured_gpus import errors, fitted_calibration
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedRow, SpeedTableFile

pytestmark = pytest.mark.unit
STEP_S, ROW_S, DRAFT_S = 0.01, 0.0001, 0.002
COUNTS = (1, 1000)


def curve(size: int, fixed_s: float, row_s: float) -> CostCurve:
    return CostCurve(size, COUNTS, tuple(fixed_s + row_s * n for n in COUNTS))


TABLES = CostTables(
    "here", "policy", "draft", (curve(1, STEP_S, ROW_S), curve(2, STEP_S / 2, ROW_S)), "thread", (curve(1, DRAFT_S, 0.0),),
    (curve(1, DRAFT_S, 0.0), curve(2, DRAFT_S, 0.0)),
)  # fmt: skip


def test_the_roofline_is_fitted_to_the_measured_steps() -> None:
    fitted = fitted_calibration()
    assert 0.6 < fitted.memory_share < 1.0 and 0.3 < fitted.compute_share < 0.8
    assert fitted.draft_host_s == pytest.approx(0.00043, rel=0.01)
    for low, middle, high in errors().values():
        assert abs(middle) < 0.05 and low > -0.25 and high < 0.15


def test_every_layout_has_its_best_size_and_the_planner_its_own() -> None:
    rows = list(layout_rows([Case("Qwen3-8B", "H100", 8, 2, p) for p in (0.6, 0.9)]))
    assert [row["layout"] for row in rows] == [layout.name for layout in LAYOUTS] * 2
    for row in rows:
        assert row["seconds"] == min(row["sizes"].values()) > 0.0
        assert row["layout"] != REMOTE or row["planned"] >= row["seconds"]
    best = list(winners(rows))
    assert len(best) == 2 and all(b["over_second"] >= 1.0 and b["over_plain"] >= 1.0 for b in best)
    assert best[1]["seconds"] < best[0]["seconds"], "more drafts are right"


def test_remote_drafters_are_never_better_than_with_gpus_for_nothing() -> None:
    rows = list(itertools.islice(region_rows("H100"), 6))
    for row in rows:
        assert 0.0 < row["over_coupled"] <= row["free"] * 1.02
    report = {"layouts": list(layout_rows([Case("Qwen3-8B", "H100", 8, 2, 0.8)])), "region": rows}
    assert len(list(tables_of(report))) == 2
    assert picture({"region": [dict(row, p=p) for row in rows for p in (0.6, 0.7, 0.8, 0.9)]})[:4] == b"\x89PNG"


def measured_placement() -> dict[str, Any]:
    """What a bench would write whose machine is as the tables say."""
    rows: list[dict[str, Any]] = []
    for way, threads in (("plain", 2), ("coupled k=2", 2), ("decoupled k=4", 1)):
        kind = speculation_of(way, threads, TABLES)
        assert kind is not None
        row = {"batch": 4, "way": way, "mode": way.split()[0], "threads": threads, "acceptance": 0.8, "steps": 100}
        rows.append(row | {"seconds": layout_s(kind, [100] * 4, 0.8)})
    return {"rows": [row | {"over_plain": rows[0]["seconds"] / row["seconds"]} for row in rows]}


def test_a_machine_that_is_as_its_profile_leaves_no_error() -> None:
    facts = measured_placement()
    found = list(placement_rows(facts, TABLES))
    assert [row.way for row in found] == ["plain, 2", "coupled k=2, 2", "decoupled k=4, 1"]
    assert [row.error for row in found] == pytest.approx([0.0] * 3)
    rows = [dict(row, load="4", threads=str(row["threads"]), predicted=None) for row in facts["rows"]]
    rows += [dict(row, load="draining") for row in rows]
    verdicts = [{"load": load, "acceptance": 0.8} for load in ("4", "draining")]
    found = list(pair_rows({"verdicts": verdicts, "rows": rows}, TABLES))
    assert [row.error for row in found] == pytest.approx([0.0] * 3), "lengths of the draining load are not known"
    assert speculation_of("both auto", 1, TABLES) is None


def test_moves_of_an_uneven_rollout_are_predicted_from_measured_speeds() -> None:
    """Two engines whose speed halves with twice the requests: one has all the long responses."""
    rung = SpeedRow("any", "plain", (1, 2, 4), (100.0, 50.0, 25.0), (9.0, 9.0, 9.0))
    facts = {
        "engines": 2, "split": "", "prompts": 2, "samples": 4, "all_lengths": [[800] * 4 + [10] * 4],
        "rows": [{"way": way, "all_seconds": [30.0]} for way in ("neither", "moving")],
    }  # fmt: skip
    neither, moving = tail_rows(facts, SpeedTableFile("here", "policy", 1e-6, (rung,)))
    assert neither.predicted == 1.0 and neither.predicted_s == pytest.approx(32.0, rel=0.01)
    assert moving.predicted == pytest.approx(2.0, rel=0.1)
    drawn = {**facts, "all_lengths": [], "lengths": {"responses": 8, "median": 50.0, "longest": 800}}
    assert all(np.isfinite(row.predicted) for row in tail_rows(drawn, SpeedTableFile("here", "policy", 1e-6, (rung,))))
