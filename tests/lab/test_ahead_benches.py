# SPDX-License-Identifier: Apache-2.0
"""The benches of texts made ahead: rollouts that bring texts, and GRPO runs that take turns."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, TINY_ROLLOUTS

from lab.bench import ahead_speed, step_turns
from lab.bench.step_turns import Taken, rows_of

OVERRIDES = [f"{key}={value}" for key, value in TINY_ROLLOUTS.items()]


def record(step_s: float, tokens: int = 90, **more: Any) -> dict[str, Any]:
    return {"step_s": step_s, "generation_s": step_s / 2, "reward": 0.5, "num_tokens": tokens, "loss": 0.1, **more}


@pytest.mark.unit
def test_ratios_of_steps_leave_the_warm_up_out_and_unequal_samples_are_told() -> None:
    steps = [
        Taken(0, {"plain": record(9.0), "d1": record(1.0)}),
        Taken(1, {"plain": record(6.0), "d1": record(4.0, ahead_kept=0.9)}),
        Taken(2, {"plain": record(6.0), "d1": record(3.0)}),
        Taken(3, {"plain": record(6.0), "d1": record(2.0)}),
    ]
    plain, ours = rows_of(steps)
    assert plain["step_ratio"] == 1.0 and plain["equal"]
    assert ours["step_ratios"] == [9.0, 1.5, 2.0, 3.0] and ours["step_ratio"] == 2.0
    assert ours["ahead_kept"] == [None, 0.9, None, None]
    steps.append(Taken(4, {"plain": record(6.0), "d1": record(2.0, tokens=91)}))
    assert not rows_of(steps)[1]["equal"]


@pytest.mark.integration
def test_rollouts_bring_texts_and_early_requests_run_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ["--ways", "plain", "no_texts", "beside", "run_ahead", "--batches", "0", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["ahead_speed", str(QUICKSTART), "--out", str(tmp_path), *ways, *OVERRIDES])
    assert ahead_speed.main() == 0
    (row,) = json.loads((tmp_path / "ahead_speed.json").read_text())["rows"]
    assert row["equal"] and row["text"] is None and row["delay"] > 0 and len(row["early_tokens"]) == 1
    assert row["engine_steps"]["run_ahead"] < row["engine_steps"]["plain"]


@pytest.mark.integration
@pytest.mark.slow
def test_runs_take_turns_with_equal_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ["--ways", "plain", "d2", "today", "--tree", str(Path(__file__).parents[2]), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["step_turns", str(QUICKSTART), "--out", str(tmp_path), *ways, *OVERRIDES])
    assert step_turns.main() == 0
    rows = json.loads((tmp_path / "step_turns.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["plain", "d2", "today"] and all(row["equal"] for row in rows)


@pytest.mark.integration
@pytest.mark.slow
def test_older_weights_make_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ["--updated", "--ways", "plain", "run_ahead", "--batches", "0", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["ahead_speed", str(QUICKSTART), "--out", str(tmp_path), *ways, *OVERRIDES])
    assert ahead_speed.main() == 0
    (row,) = json.loads((tmp_path / "ahead_speed.json").read_text())["rows"]
    assert row["equal"] and row["ahead"] > 0
