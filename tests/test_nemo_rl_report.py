# SPDX-License-Identifier: Apache-2.0
"""The report of a run in NeMo-RL, from records as its logger writes them, and when it is written."""

import asyncio
import json
import math
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from matplotlib.figure import Figure
from matplotlib.image import imread
from nemo_rl_records import metrics, watching_logger, with_everything, write_run
from run_files import Page, clashing_titles

from nemo_specrollout.cli.main import main
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.nemo_rl.live_report import PICTURE_NAME, LiveReport, next_write_s
from nemo_specrollout.nemo_rl.run_record import RunRecord
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.reports import report as report_module
from nemo_specrollout.reports.charts import CHARTS, figure_of
from nemo_specrollout.reports.records import Run, policy_lag
from nemo_specrollout.reports.report import MAX_ROWS, write_pages
from nemo_specrollout.reports.run_folders import find_folders, read_run

pytestmark = pytest.mark.unit

OF_EVERY_RUN = (
    "Rollout time", "Where a step's time goes", "Tokens and drafts", "Acceptance by position", "Acceptance, step by step",
    "Reward", "Engine against trainer",
)  # fmt: skip


def page_of(folder: Path) -> Page:
    return Page(write_pages(folder)[0])


def written(log_dir: Path, num_steps: int = 3, first: int = 1) -> Path:
    """A synchronous run of text drafters."""
    rng = random.Random(0)
    return write_run(log_dir, [metrics(i, rng) for i in range(first, first + num_steps)])


def test_a_plain_run_has_its_charts_and_no_others(tmp_path: Path) -> None:
    page = page_of(written(tmp_path / "exp_001"))
    assert page.charts == list(OF_EVERY_RUN)
    assert "Run exp_001" in page.text and "3 finished steps: steps 1 to 3" in page.text
    assert "none raised" in page.text and "Remote drafters" not in page.text and "Seeds derived" not in page.text
    assert imread(tmp_path / "exp_001/specrollout/picture.png").shape[:2] == (840, 1200)


def test_a_run_with_everything_has_every_chart_and_card(tmp_path: Path) -> None:
    rng, steps = random.Random(0), range(1, 13)
    lines = with_everything([metrics(i, rng) for i in steps])
    page = page_of(write_run(tmp_path, lines))
    assert sorted(page.charts) == sorted(CHARTS)
    for text in ("Draft heads 1 of 2", "Remote drafters 1 of 2", "bottleneck: the drafters", "Seeds derived 36",
                 "Saved in the tail +", "races: 60", "step 12: refreshed: 12; gate: better & so"):  # fmt: skip
        assert text in page.text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_no_title_of_a_panel_runs_into_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    clashes = clashing_titles(monkeypatch)
    page_of(written(tmp_path / "plain"))
    page_of(write_run(tmp_path / "everything", with_everything([metrics(i, rng) for i in range(1, 13)])))
    assert not clashes


def test_alarms_are_listed_and_escaped(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, with_everything([metrics(9, random.Random(0))])))
    assert "script" not in page.tags and "b" not in page.tags
    assert "step 9: drafts of the <script>head</script> & more" in page.text
    assert "step 9: engine and trainer differ by 0.0500 nats a token" in page.text
    assert page.source.count('class="card bad"') == 3  # the gap, the alarms, a drafter that does not answer
    assert page.source.count('<td class="bad">') == 1


def test_what_engines_began_with_is_listed(tmp_path: Path) -> None:
    lines = [metrics(i, random.Random(0)) for i in (1, 2, 3)]
    lines[0]["began"] = ["2 engines began with the rates and step times of <yesterday> after 40 steps"]
    page = page_of(write_run(tmp_path, lines))
    assert "What engines began with" in page.text
    assert "step 1: 2 engines began with the rates and step times of <yesterday> after 40 steps" in page.text
    assert "What engines began with" not in page_of(write_run(tmp_path / "other", lines[1:])).text


TIMERS = {
    "data_processing": 0.4, "prepare_for_generation/total": 5.1, "prepare_for_generation/transfer_and_update_weights": 4.2,
    "generation": 70.0, "reward_calculation": 0.1, "logprob_inference_prep": 1.1, "policy_and_reference_logprobs": 14.2,
    "training_prep": 2.1, "policy_training": 40.0, "total_step_time": 134.5, "valid_tokens_per_sec_per_gpu": 311.0,
}  # fmt: skip


def recorded(log_dir: Path, timers: dict[str, Any]) -> Any:
    """Returns a step that was recorded with NeMo-RL's `timers`, as the report reads it."""
    record = RunRecord(log_dir, {})
    record.add(1, {"loss": 0.1, "reward": 0.5}, StepLog())
    record.finish_step(timers)
    (step,) = Run.read(record.folder).steps
    return step


def test_timers_become_phases_that_add_up_to_the_step(tmp_path: Path) -> None:
    step = recorded(tmp_path, TIMERS)
    phases = ("generation", "logprob", "train", "refit", "other")
    assert sum(step[f"{phase}_s"] for phase in phases) == pytest.approx(step["step_s"]) == 134.5
    assert step["refit_s"] == 5.1  # without the timer that lies within it
    assert step["generation_share"] == pytest.approx(70.0 / 134.5) and "checkpoint_s" not in step


@pytest.mark.parametrize("timers", [{}, {"total_step_time": 0.0}, {"generation": 3.0}, {"total_step_time": math.nan}])
def test_a_step_without_its_whole_time_has_no_share(tmp_path: Path, timers: dict[str, float]) -> None:
    assert "generation_share" not in recorded(tmp_path, timers)
    assert "Where a step's time goes" not in page_of(tmp_path / "specrollout").charts


def test_any_figure_may_be_missing_or_not_a_number(tmp_path: Path) -> None:
    full = with_everything([metrics(0, random.Random(0))])[0]
    without = [{k: v for k, v in full.items() if k != key} | {"step": i} for i, key in enumerate(full, 1)]
    numbers = [key for key, value in full.items() if isinstance(value, float)]
    nan = [{**full, key: math.nan, "step": i} for i, key in enumerate(numbers, len(full) + 1)]
    page = page_of(write_run(tmp_path, without + nan))
    assert "nan" not in page.text.split() and "not recorded" not in page.text
    page = page_of(write_run(tmp_path / "bare", [{"step": 1}]))
    assert page.charts == [] and "1 finished step: step 1" in page.text
    assert imread(tmp_path / "bare/specrollout/picture.png").shape[:2] == (420, 1200)


def test_all_nan_columns_are_no_charts(tmp_path: Path) -> None:
    full = metrics(1, random.Random(0), acceptance={})
    steps = [{k: math.nan if isinstance(v, float) else v for k, v in full.items()} | {"step": i} for i in (1, 2)]
    assert page_of(write_run(tmp_path, steps)).charts == []


def test_one_step_and_a_torn_last_line(tmp_path: Path) -> None:
    folder = written(tmp_path, 1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 0.')
    page = page_of(folder)
    assert "1 finished step: step 1" in page.text and page.charts == list(OF_EVERY_RUN)


def test_no_step_at_all(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, []))
    assert "no finished step yet" in page.text and "<svg" not in page.source
    assert imread(tmp_path / "specrollout/picture.png").shape[:2] == (420, 1200)


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    folder = written(tmp_path, 2, first=51)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(52, random.Random(1), speedup_estimate=9.0)) + "\n")
    assert [s["speedup_estimate"] for s in Run.read(folder).steps][1:] == [9.0]
    assert "2 finished steps: steps 51 to 52" in page_of(folder).text


def test_a_long_run_has_its_last_rows_and_alarms(tmp_path: Path) -> None:
    rng, steps = random.Random(0), range(1, MAX_ROWS + 51)
    page = page_of(write_run(tmp_path, [metrics(i, rng, alarms=["engine and trainer"]) for i in steps]))
    assert f"Alarms 250 the last {MAX_ROWS} are listed below" in page.text
    assert "step 50: engine and" not in page.text and "step 51: engine and" in page.text
    assert f"The last {MAX_ROWS} of 250 steps" in page.text
    assert page.source.count("<tr>") == MAX_ROWS + 1


@pytest.mark.parametrize("changes", [{"acceptance": {"suffix": 7}}, {"acceptance": {"suffix": {"proposed": [1]}}}])
def test_a_damaged_record_is_a_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line \d+: acceptance\.suffix is"):
        write_pages(write_run(tmp_path, [metrics(1, random.Random(0), **changes)]))


def test_lag_is_from_the_policy_that_began_a_sample() -> None:
    samples = [{"policy_spans": [[4, 0]]}, {"policy_spans": [[3, 0], [4, 17]]}, {"seed": 1}]
    lag = {"policy_lag_mean": 0.5, "policy_lag_max": 1.0, "samples_updated_amid": 1.0}
    assert policy_lag(samples, 4) == lag
    assert policy_lag([], 4) == policy_lag([{"seed": 1}, None], 4) == {}


def test_a_run_without_samples_has_no_chart_of_staleness(tmp_path: Path) -> None:
    steps = [{k: v for k, v in metrics(i, random.Random(0)).items() if "lag" not in k} for i in (1, 2)]
    assert "Staleness" not in page_of(write_run(tmp_path, steps)).text


def test_the_picture_as_a_figure_is_the_picture(tmp_path: Path) -> None:
    _, picture = write_pages(written(tmp_path))
    figure_of(picture).savefig(tmp_path / "again.png")
    assert abs(imread(tmp_path / "again.png")[..., :3] - imread(picture)[..., :3]).max() < 0.01


def test_the_folder_is_found_from_all_around(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "logs" / "exp_001")
    for path in (folder, folder.parent, tmp_path / "logs"):
        assert read_run(find_folders(path)).folder == folder
    assert main(["report", str(folder.parent)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out and (folder / "picture.png").is_file()
    shutil.copytree(folder.parent, tmp_path / "logs" / "exp_002")
    assert main(["report", str(tmp_path / "logs")]) == 2
    assert "holds 2 runs (exp_001, exp_002); name one of them" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "is no run directory: it has neither run.json nor specrollout/run.json" in capsys.readouterr().err


def test_records_of_another_version_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (written(tmp_path) / "run.json").unlink()
    assert main(["report", str(tmp_path)]) == 2
    assert "were written by another version of nemo-specrollout" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("junk", ["hello\n", "[1, 2]\n", "\x00\x01"])
def test_junk_instead_of_steps_is_refused(tmp_path: Path, junk: str, capsys: pytest.CaptureFixture[str]) -> None:
    (write_run(tmp_path, []) / "metrics.jsonl").write_text(junk)
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl holds no record of a step" in capsys.readouterr().err
    assert not list(tmp_path.rglob("report.html"))


def test_writes_take_less_than_a_hundredth_of_the_time() -> None:
    now_s = due_s = written_s = 0.0
    rng = random.Random(0)
    while now_s < 50_000:
        if now_s >= due_s:
            took_s = rng.uniform(0.5, 4.0)
            due_s = next_write_s(now_s, now_s + took_s)
            now_s, written_s = now_s + took_s, written_s + took_s
        now_s += 7.0
    assert 0.005 < written_s / now_s < 0.01


def test_a_quick_write_still_has_a_least_distance() -> None:
    assert next_write_s(0.0, 0.1, shortest_pause_s=600.0) == 600.1


class Clock:
    """Advances by a second with each reading, and by what a test adds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_pages_are_written_when_due_and_at_the_end(tmp_path: Path) -> None:
    folder, clock, logged = write_run(tmp_path, [{"step": 1}]), Clock(), []
    report = LiveReport(folder, last_step=9, clock=clock)
    page = folder / "report.html"

    def wrote(act: Callable[[], None]) -> bool:
        page.unlink(missing_ok=True)
        act()
        return page.is_file()

    def step(number: int) -> bool:
        return wrote(lambda: report.step_done(number, lambda figure, step, name: logged.append((figure, step, name))))

    assert step(1) and not step(2)
    clock.now_s += 400
    assert step(3) and not step(4) and step(9)
    assert not wrote(report.close)  # nothing new
    assert not step(10) and wrote(report.close) and not wrote(report.close)
    assert [(number, name) for _, number, name in logged] == [(1, PICTURE_NAME), (9, PICTURE_NAME)]
    assert isinstance(logged[0][0], Figure)


def test_an_error_of_the_report_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("[no] room")

    report = LiveReport(write_run(tmp_path, [{"step": 1}]), last_step=2)
    report.step_done(1, refuse)
    report.step_done(2, refuse)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("was not written (RuntimeError: [no] room); the run goes on") == 1
    LiveReport(tmp_path / "gone").step_done(1)
    assert "the run goes on" in " ".join(capsys.readouterr().err.split())


def test_without_matplotlib_the_run_goes_on_with_a_warning(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path; from nemo_specrollout.nemo_rl.live_report import LiveReport\n"
        f"LiveReport(Path({str(written(tmp_path))!r})).step_done(1)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "install matplotlib" in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


def test_the_logger_writes_the_report_before_a_step_is_finished(tmp_path: Path) -> None:
    log = StepLog(samples=[{"seed": 1, "policy_spans": [[0, 0]]}])
    logger = watching_logger(tmp_path, log=log, last_step=1)
    logger.log_metrics({"total_validation_time": 9.0}, 0, prefix="timing/validation")
    logger.log_metrics({"token_mult_prob_error": 1.0, "loss": 0.1, "reward": 0.5}, 1, prefix="train")
    logger.log_metrics({"total_validation_time": 4.0}, 1, prefix="timing/validation")
    seconds = {"generation": 3.0, "total_step_time": 10.0, "workers": [1.0]}
    logger.log_metrics(seconds, 1, prefix="timing/train", step_finished=True)
    folder = tmp_path / "specrollout"
    assert logger.events[-2:] == [f"{PICTURE_NAME} 1", "timing/train 1"]
    assert json.loads((folder / "metrics.jsonl").read_text())["policy_lag_max"] == 0.0
    (step,) = Run.read(folder).steps
    assert (step["generation_share"], step["validation_s"], step["other_s"]) == (0.3, 4.0, 3.0)
    logger.log_metrics({"token_mult_prob_error": 1.0, "loss": 0.1}, 2, prefix="train")
    logger.log_metrics({"total_step_time": 2.0}, 2, prefix="timing/train")
    assert "1 finished step" in (folder / "report.html").read_text()
    logger.finish()
    assert logger.events[-1] == "finish" and "2 finished steps" in (folder / "report.html").read_text()


def test_a_logger_that_is_given_up_leaves_a_whole_report(tmp_path: Path) -> None:
    logger = watching_logger(tmp_path)
    for step in (1, 2):
        logger.log_metrics({"token_mult_prob_error": 1.0, "loss": 0.1}, step, prefix="train")
        logger.log_metrics({"total_step_time": 2.0}, step, prefix="timing/train")
    del logger
    assert "2 finished steps" in (tmp_path / "specrollout" / "report.html").read_text()


def test_an_event_loop_does_not_wait_for_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SingleController's actor has an event loop. The last pages cover all steps."""
    writers = list[bool]()
    write_pages = report_module.write_pages

    def watched(folder: Path) -> Any:
        writers.append(threading.current_thread() is threading.main_thread())
        return write_pages(folder)

    monkeypatch.setattr(report_module, "write_pages", watched)
    record = RunRecord(tmp_path, {})
    report = LiveReport(record.folder, 2)

    async def steps() -> None:
        for step in (1, 2):
            record.add(step, {"loss": 1.0, "reward": 0.5}, StepLog())
            record.finish_step()
            report.step_done(step)

    asyncio.run(steps())
    report.close()
    assert writers == [False, True]
    assert "2 finished steps" in (record.folder / "report.html").read_text()


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    def record(step: int) -> None:
        of_run = RunRecord(tmp_path, {})
        of_run.add(step, {"loss": float(step)}, StepLog())
        of_run.finish_step()

    record(1)
    path = tmp_path / "specrollout" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    record(2)
    assert [step["loss"] for step in Run.read(path.parent).steps] == [1.0, 2.0]


def test_a_step_whose_timers_never_come_is_kept(tmp_path: Path) -> None:
    logger = watching_logger(tmp_path)
    for step in (1, 2):
        logger.log_metrics({"token_mult_prob_error": 1.0, "loss": 0.1}, step, prefix="train")
    logger.finish()
    assert [step["step"] for step in Run.read(tmp_path / "specrollout").steps] == [1, 2]
