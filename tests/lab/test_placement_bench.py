# SPDX-License-Identifier: Apache-2.0
"""The benchmark of plain, coupled and decoupled rollouts: its evaluation of timings, and one small run of all of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import STEP_ADDER
from test_equality import requests

from lab.bench.placement_bench import LONG_PROBLEM, PROMPT, main, random_prompts, rows_of, task_prompts
from lab.bench.placement_ways import COUPLED_KS, Timed, Way, acceptance_of, decode_in
from lab.local.engine import RolloutEngine
from nemo_specrollout.config.block import SpecrolloutConfig


def timed(seconds: float, tokens: list[int], proposed: int = 0, accepted: int = 0) -> Timed:
    before = {"proposed": 0, "accepted": 0, "supply": None}
    return Timed(seconds, 10, [tokens], before, {"proposed": proposed, "accepted": accepted, "supply": None})


@pytest.mark.unit
def test_speedups_are_over_the_best_plain_engine() -> None:
    plain, coupled = Way("plain"), Way("coupled", 4)
    found = {
        (1, plain): [timed(4.0, [1]), timed(4.2, [1]), timed(9.0, [1])],
        (2, plain): [timed(3.0, [1])],
        (1, coupled): [timed(1.5, [2], 40, 30)],
    }
    slow, best, drafted = rows_of(1, found)
    assert [r["over_plain"] for r in (slow, best, drafted)] == pytest.approx([3 / 4.2, 1.0, 2.0])
    assert slow["equal"] and best["equal"] and not drafted["equal"]
    assert drafted["accepted"] == 30 and drafted["way"] == "coupled k=4"


@pytest.mark.unit
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_acceptance_is_per_draft_after_right_drafts(p: float) -> None:
    k = COUPLED_KS[0]
    mean = sum(p**i for i in range(1, k + 1)) / k
    row = {"mode": "coupled", "accepted": mean * 10_000, "proposed": 10_000}
    assert acceptance_of([{"mode": "plain"}, row]) == pytest.approx(p, abs=1e-6)


@pytest.mark.unit
def test_trained_pairs_get_long_problems_random_pairs_ids() -> None:
    prompts = task_prompts(STEP_ADDER, 5)
    short, long = (len(p) for p in (min(prompts, key=len), max(prompts, key=len)))
    assert len(set(prompts)) == 5 and 2 * LONG_PROBLEM < short <= long < 120
    assert random_prompts(3) == random_prompts(4)[:3] and len(random_prompts(1)[0]) == PROMPT


@pytest.mark.integration
@pytest.mark.slow
def test_a_small_benchmark_runs_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden": 64, "layers": 3, "vocabulary": 512, "tokens": 24, "rounds": 1, "batches": 2}
    options = [f"--{name}={size}" for name, size in sizes.items()]
    monkeypatch.setattr(sys, "argv", ["placement_bench", "--out", str(tmp_path), *options])
    assert main() == 0
    rows = json.loads((tmp_path / "placement.json").read_text())["rows"]
    measured = [r for r in rows if "planned" not in r]
    assert len(measured) >= 8 and all(r["equal"] for r in measured)
    assert {r["mode"] for r in rows if "planned" in r} >= {"plain", "coupled"}
    assert "decoupled auto" in capsys.readouterr().out


@pytest.mark.integration
def test_timed_decoding_gives_the_tokens_of_a_rollout(start_engine: Callable[..., RolloutEngine]) -> None:
    engine = start_engine(STEP_ADDER, SpecrolloutConfig(drafters=()))
    expected = [rollout.token_ids for rollout in engine.generate(requests(4, 2))]
    timed = decode_in(engine, requests(4, 2))
    assert timed.token_ids == expected and timed.seconds > 0.0
    assert 0 < timed.num_steps < max(map(len, expected)), "the step that reads the prompts is not counted"
