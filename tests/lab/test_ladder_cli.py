# SPDX-License-Identifier: Apache-2.0
"""`specrollout-lab ladder`: measured methods, refused arguments, and a run that starts from the file."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import QUICKSTART, ROOT, STEP_ADDER
from rich.console import Console
from test_plan_cli import NEMO_RL, refused

from lab.cli.main import main
from lab.cli.measure import ladder_table
from lab.local.fleet import RolloutFleet
from lab.local.run_config import read_run_config
from lab.local.speed_table_bench import Stream, batches_up_to, methods_to_measure
from lab.local.step_rollout import StepPrompts
from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DraftModelDrafterConfig, Eagle3DrafterConfig, NgramDrafterConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK, MEMORY_S, DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedRow, SpeedTableFile, started_table, table_file
from nemo_specrollout.stragglers.turns import TurnResult

BLOCK = "policy.generation.specrollout"


def measured() -> SpeedTableFile:
    """Returns two methods: one is faster alone, the other in a batch of eight."""
    own = (
        SpeedRow("sums", "suffix", (1, 8), (300.0, 50.0), (2.0, 16.0), 0.4),
        SpeedRow("sums", "plain", (1, 8), (200.0, 60.0), (2.0, 16.0)),
    )
    return SpeedTableFile("a machine", "a policy", 1e-4, (*own, *(replace(rung, task=ANY_TASK) for rung in own)))


@pytest.mark.unit
def test_the_ladder_measures_single_and_combined_methods() -> None:
    block = SpecrolloutConfig()
    assert methods_to_measure(block) == [("suffix",), ("ngram",), ("suffix", "ngram"), ()]
    assert methods_to_measure(SpecrolloutConfig(drafters=(NgramDrafterConfig(),))) == [("ngram",), ()]
    heads = (Eagle3DrafterConfig(model="a"), DraftModelDrafterConfig(model="b"))
    racing = FastestOfNConfig(methods=(("eagle3", "ngram"), ("draft_model",), ("suffix",), ()))
    assert methods_to_measure(SpecrolloutConfig(drafters=(*block.drafters, *heads), fastest_of_n=racing)) == [
        ("suffix",), ("ngram",), ("eagle3",), ("draft_model",), ("suffix", "ngram", "eagle3"),
        ("suffix", "ngram", "draft_model"), ("ngram", "eagle3"), (),
    ]  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize(
    ("most", "batches"), [(1, [1]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12]), (50, [1, 2, 4, 8, 16, 32, 48])]
)
def test_batch_sizes_go_up_to_those_of_the_run(most: int, batches: list[int]) -> None:
    assert batches_up_to(most) == batches


@pytest.mark.unit
def test_a_stream_continues_its_requests_and_repeats_none() -> None:
    stream = Stream(2, ((i, RolloutRequest([1], i, 0)) for i in itertools.count()))
    assert [name for name, _ in stream.fill()] == [0, 1] and stream.fill() == []
    stream.take(TurnResult({0: ([7, 8], [0.0, 0.0]), 1: ([9], [0.0])}, {1: "stop"}))
    assert list(stream.under_way) == [0] and stream.under_way[0].prefix_token_ids == (7, 8)
    stream.take(TurnResult({0: ([6], [0.0])}))
    assert stream.under_way[0].prefix_token_ids == (7, 8, 6) and [name for name, _ in stream.fill()] == [2]


@pytest.mark.unit
def test_a_ladder_continues_from_a_file_and_writes_one() -> None:
    known = started_table(["plain", "suffix"], measured())
    file = table_file(known, "a machine", "a policy", [0.0, 0.4])
    assert file is not None and [(r.task, r.method) for r in file.rungs] == [
        (r.task, r.method) for r in measured().rungs
    ]
    for was, now in zip(measured().rungs, file.rungs, strict=True):
        assert now.acceptance == was.acceptance and now.batches == was.batches
        assert now.tokens_per_s == pytest.approx(was.tokens_per_s)
    known.observe("sums", 0, 8, 1200, 10.0)
    newer = table_file(known, "a machine", "a policy", [0.0, 0.4])
    assert newer is not None
    speeds = {(r.task, r.method): r.tokens_per_s for r in newer.rungs}
    for task in ("sums", ANY_TASK):
        assert speeds[task, "plain"][0] == pytest.approx(200) and 60 < speeds[task, "plain"][1] < 120
        assert speeds[task, "suffix"] == pytest.approx((300, 50))
    for _ in range(20):
        known.observe("sums", 0, 8, 1200, 10.0)
    newest = table_file(known, "a machine", "a policy", [0.0, 0.4])
    assert newest is not None
    remembered_s = [w / b for r in newest.rungs for w, b in zip(r.weights_s, r.batches, strict=True)]
    assert max(remembered_s) == pytest.approx(MEMORY_S)
    assert table_file(DecodeSpeedTable(["plain"]), "", "", [0.0]) is None


@pytest.mark.unit
def test_the_table_ranks_methods_alone_and_in_large_batches(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=120).print(ladder_table(measured(), boxed=False))
    _, suffix, plain = (line.split() for line in capsys.readouterr().out.splitlines())
    assert suffix == ["suffix", "300", "50", "0.40", "1", "2"] and plain == ["plain", "200", "60", "-", "2", "1"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "examples"], "--out: examples cannot be a file there"),
        (["--out", "no/such/folder/x.json"], "cannot be a file there"),
        (["--task", "step_additions"], "--task: 'step_additions' is no task of the config; did you mean 'step_addition'?"),
        (["--rounds", "0"], "--rounds: 0; measure at least one"),
        (["--seconds", "0"], "--seconds: 0.0; it must be above 0"),
        ([f"{BLOCK}.drafters=[]"], "drafters: none is in effect, so there is nothing to rank"),
        ([f"{BLOCK}.drafters=[{{type: draft_model, model: no/model}}]"], "folder no/model of the draft model does not exist"),
        ([f"{BLOCK}.drafters=[{{type: eagle3, model: no/head}}]"], "no/head"),
    ],
)  # fmt: skip
def test_invalid_ladder_arguments_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(ROOT)
    assert words in refused(capsys, "ladder", QUICKSTART, "--out", tmp_path / "ladder.json", *arguments)


@pytest.mark.unit
def test_a_config_of_nemo_rl_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    (tmp_path / "nemo_rl.yaml").write_text(yaml.safe_dump(NEMO_RL))
    said = refused(capsys, "ladder", tmp_path / "nemo_rl.yaml", "--out", tmp_path / "ladder.json")
    assert "works with configs for one machine only" in said


@pytest.mark.integration
@pytest.mark.slow
def test_a_run_starts_from_a_measured_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ladder.json"
    small = [
        f"policy.model_name={STEP_ADDER}", "policy.generation.vllm_kwargs.max_num_seqs=2",
        "policy.generation.max_new_tokens=64", f"{BLOCK}.drafters=[{{type: ngram}}]",
    ]  # fmt: skip
    assert main(["ladder", str(QUICKSTART), "--out", str(path), "--rounds", "1", "--seconds", "1", *small]) == 0
    assert "written to" in capsys.readouterr().out
    file = SpeedTableFile.read(path, "x")
    tasks, methods = ["step_addition", ANY_TASK], ["ngram", "plain"]
    assert {(r.task, r.method) for r in file.rungs} == set(itertools.product(tasks, methods))
    for rung in file.rungs:
        # A slow machine verifies few drafts in a second, so all of them may be right, or there may be none.
        assert rung.acceptance == 0.0 or rung.method == "ngram"
        assert rung.batches == (1, 2) and min(rung.weights_s) >= 1.0, "less was measured than was asked for"
        assert min(np.multiply(rung.tokens_per_s, rung.weights_s)) >= 2.0, "no tokens were counted"
    path.write_text(replace(file, rungs=tuple(map(marked, file.rungs))).to_json())
    racing = [f"{BLOCK}.fastest_of_n={{ladder: {path}, methods: [[ngram], []]}}", "cluster.rollout_workers=2"]
    config, _ = read_run_config(load_config(QUICKSTART, [*small, *racing]))
    asked = [RolloutRequest([1, 30, 31, 32], i, 0) for i in range(4)]
    fleet = RolloutFleet(config, lambda step: StepPrompts([None] * len(asked), asked))
    try:
        begun = fleet.ladder_file()
        fleet.roll_out(0, lambda done: None)
    finally:
        fleet.pool.close()
    ended = fleet.ladder_file()
    assert begun is not None and ended is not None
    measured_rows = {(row.task, row.method): marked(row) for row in file.rungs}  # the fastest first, whichever that is
    for was, now in zip(begun.rungs, ended.rungs, strict=True):
        known = measured_rows.pop((was.task, was.method))
        assert was.tokens_per_s == pytest.approx(known.tokens_per_s) and was.acceptance == known.acceptance
        assert now.tokens_per_s[-1] == pytest.approx(3.0), "a batch size without samples changed"
        assert now.tokens_per_s != was.tokens_per_s
    assert not measured_rows


@pytest.mark.integration
@pytest.mark.slow
def test_a_run_starts_from_the_speeds_that_the_one_before_it_kept(tmp_path: Path) -> None:
    small = [
        f"policy.model_name={STEP_ADDER}", "policy.generation.vllm_kwargs.max_num_seqs=2", "cluster.rollout_workers=2",
        "policy.generation.max_new_tokens=64", f"{BLOCK}.drafters=[{{type: ngram}}]",
        f"{BLOCK}.fastest_of_n={{methods: [[ngram], []]}}", f"{BLOCK}.learned.folder={tmp_path}",
    ]  # fmt: skip
    config, _ = read_run_config(load_config(QUICKSTART, small))
    asked = [RolloutRequest([1, 30, 31, 32], i, 0) for i in range(4)]
    kept, began = [], []
    for step in range(2):
        fleet = RolloutFleet(config, lambda step: StepPrompts([None] * len(asked), asked))
        try:
            began.append((fleet.ladder_file(), str(fleet.facts()["began"]), fleet.take_alarms()))
            fleet.roll_out(step, lambda done: None)
            fleet.keep_learned()
            kept.append(fleet.ladder_file())
        finally:
            fleet.close()
    (nothing, first_words, _), (read, words, alarms) = began
    assert nothing is None and "decode speeds" not in first_words
    assert read is not None and kept[0] is not None and {r.method for r in read.rungs} == {"ngram", "plain"}
    then = {(r.task, r.method): r.tokens_per_s for r in kept[0].rungs}
    assert all(r.tokens_per_s == pytest.approx(then[r.task, r.method]) for r in read.rungs)
    assert "and began with the decode speeds of 2" in words and alarms == []


def marked(rung: SpeedRow) -> SpeedRow:
    """Returns the rung with a batch size that no small run has."""
    figures = {"batches": 1024, "tokens_per_s": 3.0, "weights_s": 5.0}
    return replace(rung, **{name: (*getattr(rung, name), value) for name, value in figures.items()})
