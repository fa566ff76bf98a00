# SPDX-License-Identifier: Apache-2.0
"""Report and audit of a run that several starts have made: chains of jobs, requeues, kills, and folders that are damaged."""

import json
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nemo_rl_records import metrics, write_run
from run_files import Page

from nemo_specrollout.audit.recorded_run import RecordedRun
from nemo_specrollout.audit.rows import EngineFacts, FinishedRow, RowParams, write_rows
from nemo_specrollout.cli.main import main
from nemo_specrollout.nemo_rl.run_record import RunRecord
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.reports.jobs import Launch
from nemo_specrollout.reports.records import Run
from nemo_specrollout.reports.run_folders import find_folders, read_run
from nemo_specrollout.reports.start_facts import start_facts
from nemo_specrollout.reports.starts import RunOfStarts, Start

pytestmark = pytest.mark.unit

BEGAN_S = 1_780_000_000
"""When the first job of a run began, in seconds since 1970."""
STEP_S = 100.0


def launched(run: Path, *jobs: str) -> Path:
    """A run directory as `launch` leaves it after it has submitted `jobs`."""
    for name in ("addon/nemo_specrollout", "slurm", "checkpoints"):
        (run / name).mkdir(parents=True)
    (run / "config.yaml").write_text("runtime: nemo_rl\n")
    (run / "job.sh").write_text("#!/bin/bash\n")
    for job in jobs:
        with (run / "submissions.jsonl").open("a") as file:
            file.write(json.dumps({"job_id": job, "time": "2026-05-28T20:20:24+0000", "command": ["sbatch"]}) + "\n")
    return run


def start(
    run: Path, number: int, steps: Sequence[int], job: str = "", requeues: int = 0, began_s: int = BEGAN_S
) -> Path:
    """Writes `exp_NNN` of a launched run, whose driver began its first step 60 s after its job; returns the records."""
    lines = [
        metrics(
            step, random.Random(step), step_s=STEP_S, ended_s=began_s + 60 + i * STEP_S, speedup_estimate=float(number)
        )
        for i, step in enumerate(steps, 1)
    ]
    folder = write_run(run / "logs" / f"exp_{number:03d}", lines)
    variables = {"SPECROLLOUT_START": f"{job}.{requeues}", "NRL_JOB_START_EPOCH": f"{began_s}.25"}
    about = json.loads((folder / "run.json").read_text())
    facts = start_facts(variables if job else {}, steps[0] - 1 if steps else 0)
    (folder / "run.json").write_text(json.dumps({**about, "start": facts}))
    return folder


def read(path: Path) -> RunOfStarts:
    run = read_run(find_folders(path))
    assert isinstance(run, RunOfStarts)
    return run


def of_starts(run: Run) -> list[tuple[int, str]]:
    return [(step["step"], step["start"]) for step in run.steps]


def report(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Page, str]:
    """Returns the page of a run, and what the command said."""
    assert main(["report", str(path)]) == 0
    said = capsys.readouterr().out
    return Page(Path(said.split()[1])), said


def sentence(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the sentence with which a report is refused."""
    assert main(["report", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in said
    return said


def test_the_steps_of_a_chain_are_one_run_and_the_later_of_two_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launched(tmp_path / "first", "12", "13", "14")
    start(run, 1, range(1, 8), "12")
    start(run, 2, range(5, 7), "12", 1, BEGAN_S + 5000)
    start(run, 3, range(6, 10), "13", 0, BEGAN_S + 9000)
    expected = [*((s, "exp_001") for s in range(1, 5)), (5, "exp_002"), *((s, "exp_003") for s in range(6, 10))]
    assert of_starts(read(run)) == expected
    assert [step["speedup_estimate"] for step in read(run).steps] == [1.0] * 4 + [2.0] + [3.0] * 4
    page, said = report(run, capsys)
    assert page.path == run / "report.html" and (run / "picture.png").is_file()
    assert "9 finished steps: steps 1 to 9; 3 starts, 4 steps made again" in page.text
    assert "Steps made again 4 6 min 40 s of work of earlier starts was not in a checkpoint" in page.text
    for cells in (
        "exp_001 12 1-7 5-7 1 min 00 s",
        "exp_002 12, requeue 1 5-6 6 1 min 00 s",
        "exp_003 13 6-9 1 min 00 s",
    ):
        assert cells in page.text
    assert "Job 14 was submitted at 2026-05-28T20:20:24+0000 and has not begun" in page.text
    assert "exp_001 (job 12): steps 1-7; steps 5-7 made again later; 1 min 00 s until its first step" in said
    assert "exp_002 (job 12, requeue 1): steps 5-6; step 6 made again later" in said
    for path in (run / "logs", run / "logs" / ".."):
        assert read(path).folder.resolve() == run
    alone = read_run(find_folders(run / "logs" / "exp_002"))
    assert [step["step"] for step in alone.steps] == [5, 6] and not isinstance(alone, RunOfStarts)


def test_versions_that_changed_between_starts_are_all_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = launched(tmp_path)
    start(run, 1, [1])
    about = start(run, 2, [2]) / "run.json"
    about.write_text(about.read_text().replace('"vllm": "0.32.0"', '"vllm": "0.33.0"'))
    page, _ = report(run, capsys)
    assert "torch 2.13.0 vllm 0.32.0, then 0.33.0" in page.text


def test_a_start_that_has_loaded_its_checkpoint_takes_the_steps_beyond_it_away(tmp_path: Path) -> None:
    run = launched(tmp_path, "12")
    start(run, 1, range(1, 8), "12")
    folder = start(run, 2, [5], "12", 1)
    (folder / "metrics.jsonl").unlink()
    assert of_starts(read(run)) == [(s, "exp_001") for s in range(1, 5)]
    assert [step["step"] for step in read(run).lost["exp_001"]] == [5, 6, 7]


def test_steps_of_a_driver_that_was_taken_over_never_count(tmp_path: Path) -> None:
    """A node that lost its network may go on beside the later start, with higher steps than that has made."""
    run = launched(tmp_path, "12")
    start(run, 1, range(1, 12), "12")
    start(run, 2, [4], "12", 1)
    assert of_starts(read(run)) == [(1, "exp_001"), (2, "exp_001"), (3, "exp_001"), (4, "exp_002")]


def test_starts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    run = launched(tmp_path)
    start(run, 999, [1, 2])
    start(run, 1000, [3])
    shutil.copytree(run / "logs" / "exp_999", run / "logs" / "exp_001_copy")
    assert of_starts(read(run)) == [(1, "exp_999"), (2, "exp_999"), (3, "exp_1000")]


def test_a_running_job_has_a_page_at_any_moment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = launched(tmp_path, "12", "13")
    start(run, 1, [1, 2], "12")
    with (run / "logs/exp_001/specrollout/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 0.')  # killed amid a line, so there is no summary.json either
    (run / "logs" / "exp_002").mkdir()
    page, said = report(run, capsys)
    assert "2 finished steps: steps 1 to 2; 2 starts" in page.text and "exp_002: no step yet" in said
    (start(run, 2, [3], "13") / "metrics.jsonl").unlink()
    page, said = report(run, capsys)
    assert "2 finished steps: steps 1 to 2; 2 starts" in page.text and "exp_002 (job 13): no step yet" in said
    for records in run.glob("logs/exp_*/specrollout/metrics.jsonl"):
        records.unlink()
    page, _ = report(run, capsys)
    assert "no finished step yet; 2 starts" in page.text and "exp_002 13" in page.text and "<svg" not in page.source


def test_before_any_record_a_sentence_says_how_far_the_jobs_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no job of it was submitted; give `launch` the same line without --dry-run" in sentence(
        launched(tmp_path / "dry"), capsys
    )
    unsure = launched(tmp_path / "unsure")
    (unsure / "submissions.jsonl").write_text('{"job_id": null, "time": "2026-05-28T20:20:24+0000", "command": []}\n')
    assert "the id of its job is not known; `squeue --me` says whether Slurm has it" in sentence(unsure, capsys)
    run = launched(tmp_path / "first", "12", "13")
    said = sentence(run, capsys)
    assert "has no records yet: job 12 was submitted at 2026-05-28T20:20:24+0000 and has not begun" in said
    (run / "slurm" / "12.out").write_text("pyxis: importing docker image\n")
    assert "job 12 has begun, and no driver of it has recorded anything; slurm/12.out says" in sentence(run, capsys)
    (run / "slurm" / "13.out").touch()
    (run / "slurm" / "12.out").unlink()
    first, second = Launch.read(run).jobs
    assert "never began, although a later job did, so it was cancelled or is held" in first.state and second.has_begun
    (run / "logs" / "exp_001").mkdir(parents=True)
    assert "logs/exp_001 has no specrollout/run.json yet: the driver is still loading" in sentence(run, capsys)
    assert main(["audit", str(run)]) == 2 and "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.rglob("report.html"))


def damaged_by(kind: str, folder: Path) -> None:
    match kind:
        case "no run.json":
            (folder / "run.json").unlink()
        case "another version":
            (folder / "run.json").write_text('{"records": 99}')
        case "junk":
            (folder / "metrics.jsonl").write_text("\x00\x01junk\n")
        case "wrong counts":
            (folder / "metrics.jsonl").write_text('{"step": 3, "acceptance": {"suffix": 7}}\n')


@pytest.mark.parametrize("kind", ["no run.json", "another version", "junk", "wrong counts"])
def test_a_damaged_start_does_not_hide_the_others(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launched(tmp_path, "12")
    start(run, 1, [1, 2], "12")
    damaged_by(kind, start(run, 2, [3], "12", 1))
    start(run, 3, [4, 5], "12", 2)
    (run / "logs/exp_003/specrollout/audit.json").write_text('{"audits": [7]}')
    page, said = report(run, capsys)
    assert "4 finished steps: steps 1 to 5; 3 starts" in page.text
    assert "exp_002: cannot be read: " in said and "exp_002 cannot be read: " in page.text
    assert '<td class="bad">not readable</td>' in page.source
    for number in (1, 3):
        damaged_by(kind, run / "logs" / f"exp_{number:03d}" / "specrollout")
    assert "logs/exp_001/specrollout" in sentence(run, capsys)


def test_why_slurm_has_ended_a_start_is_read_from_the_jobs_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    run = launched(tmp_path, "12", "13")
    for number, requeues in enumerate((0, 1, 2), 1):
        start(run, number, [number], "12", requeues, BEGAN_S + 4000 * requeues)
    (run / "slurm" / "12.out").write_text(
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-05-28T20:29:59 DUE TO TIME LIMIT ***\n"
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-05-28T20:30:00 DUE TO JOB REQUEUE ***\n"
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-05-28T22:50:00 ***\n"
    )
    (run / "slurm" / "13.out").write_text("nemo-specrollout: all steps are done\n")
    found = read(run)
    assert [found.end_of(each) for each in found.starts] == ["DUE TO JOB REQUEUE", "", "CANCELLED"]
    (job,) = found.jobs_without_start
    assert job.state == "had nothing to do, because all steps were made"


def test_a_log_folder_without_launch_is_one_run_if_every_start_went_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, 1, [1, 2, 3])
    assert not isinstance(read_run(find_folders(tmp_path / "logs")), RunOfStarts)
    start(tmp_path, 2, [3, 4])
    page, _ = report(tmp_path / "logs", capsys)
    assert page.path == tmp_path / "logs" / "report.html" and "steps 1 to 4; 2 starts, 1 step made again" in page.text
    (start(tmp_path, 3, [1]) / "metrics.jsonl").unlink()
    assert len(read(tmp_path / "logs").starts) == 2  # the third has failed before its first step, or makes that
    start(tmp_path, 3, [1])
    said = sentence(tmp_path / "logs", capsys)
    assert "holds 2 runs (exp_001, exp_002, exp_003); name one of them" in said


def test_starts_that_failed_before_their_first_step_are_no_runs(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (start(tmp_path, number, [1]) / "metrics.jsonl").unlink()
    assert read_run(find_folders(tmp_path / "logs")).folder.parent.name == "exp_003"
    start(tmp_path, 2, [1, 2])
    assert read_run(find_folders(tmp_path / "logs")).folder.parent.name == "exp_002"


def test_records_of_older_versions_have_no_facts_of_their_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launched(tmp_path)
    for number, steps in ((1, [1, 2, 3]), (2, [3, 4])):
        write_run(run / "logs" / f"exp_{number:03d}", [metrics(step, random.Random(step)) for step in steps])
    page, said = report(run, capsys)
    assert "goes on. start steps made again later exp_001 1-3 3 exp_002 3-4 Rollout time" in page.text
    assert "exp_001: steps 1-3; step 3 made again later\n" in said and "exp_002: steps 3-4\n" in said


@pytest.mark.parametrize(
    "facts", [7, {"first_step": "x", "job_id": [1], "num_requeues": "no", "began": 5}, {"began": "soon"}]
)
def test_damaged_facts_of_a_start_count_as_missing(facts: Any) -> None:
    found = Start(Path("exp_001"), {"start": facts}, [{"step": 3}])
    assert (found.first_step, found.job, found.num_requeues, found.began) == (3, "", 0, "")
    assert math.isnan(found.before_first_step_s)
    assert (
        Start(Path("exp_001"), {"start": {"first_step": -1}}, []).first_step is None
    )  # it would hide all steps before


def test_a_record_has_its_job_and_the_times_of_its_steps(tmp_path: Path) -> None:
    variables = {"SPECROLLOUT_START": "7.2", "NRL_JOB_START_EPOCH": "1780000000.79"}
    assert start_facts(variables | {"SPECROLLOUT_BEGAN": "1780000100"}, 4) | {"began": ""} == {
        "first_step": 5, "began": "", "job_id": "7", "num_requeues": 2,
    }  # fmt: skip
    record = RunRecord(tmp_path / "exp_001", {"start": start_facts(variables, 4)}, lambda: 1_780_000_190.0)
    record.add(5, {"loss": 0.1}, StepLog())
    record.finish_step({"total_step_time": 100.0})
    run = Run.read(record.folder)
    found = Start(record.folder.parent, run.about, run.steps)
    assert (found.first_step, found.job, found.num_requeues, found.before_first_step_s) == (5, "7", 2, 90.0)
    assert start_facts({"SPECROLLOUT_BEGAN": "x", "NRL_JOB_START_EPOCH": "1e99"}, 0) == {"first_step": 1}


def test_an_audit_takes_each_step_from_the_start_that_counts(tmp_path: Path) -> None:
    run = launched(tmp_path, "12")
    for number, steps in ((1, [1, 2, 3]), (2, [3, 4])):
        folder = start(run, number, steps, "12", number - 1)
        rows = [FinishedRow(step, [1], [number], [0.0], RowParams()) for step in steps]
        (folder / "rows").mkdir()
        write_rows(folder / "rows" / "0.npz", EngineFacts(0, "0.32.0", "float32"), rows)
        samples = [{"step": step, "samples": [{"seed": step, "policy_spans": [[step - 1, 0]]}]} for step in steps]
        (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
        about = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**about, "audit": {"model": "m", "checkpoints": str(tmp_path)}}))
    recorded = RecordedRun(read(run))
    tokens = {step: [list(recorded.read(row).token_ids) for row in rows] for step, rows in recorded.steps.items()}
    assert tokens == {1: [[1]], 2: [[1]], 3: [[2]], 4: [[2]]}
