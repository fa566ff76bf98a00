# SPDX-License-Identifier: Apache-2.0
"""Records of moves and races in a run: estimated savings, counts, charts, sentences. No engine is started."""

import json
import math
import random
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import ROOT
from matplotlib.image import imread
from rich.console import Console
from run_files import COLUMNS, Page, metrics, trace, write_run
from test_fastest_of_n import EvenSpeeds

from lab.cli.main import main
from lab.local.progress import Progress
from lab.local.rollout_charts import MAX_ENGINES, MAX_ROWS, shown_requests, shown_timeline, tail_chart
from lab.local.run_report import write_pages
from lab.local.timeline import AttemptSpan, Timeline, describe
from lab.local.traces import can_drain, whole_trace
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.reports.records import summary_of
from nemo_specrollout.stragglers.attempts import Attempt, AttemptOutcome, Response
from nemo_specrollout.stragglers.decisions.straggler_policy import TailDecision
from nemo_specrollout.stragglers.decisions.tail_forecast import Assignment, drain, undisturbed_end_s
from nemo_specrollout.stragglers.estimates import DecodeSpeeds, Savings

pytestmark = pytest.mark.unit

TWO_WORKERS = ROOT / "examples" / "configs" / "quickstart_two_workers_cpu.yaml"
BLOCK = "policy.generation.specrollout.fastest_of_n"

METHODS = ("suffix", "ngram")
# Request 0 moves and is then raced, 1 is raced in vain, 2 outlives an engine, 3 ends where it began.
SPANS = (
    AttemptSpan(3, 1, 0.0, 0, 1.0, 60, "won"),
    AttemptSpan(0, 0, 0.0, 0, 2.0, 100, "moved"),
    AttemptSpan(2, 1, 0.0, 0, 2.5, 90, "died"),
    AttemptSpan(1, 1, 3.0, 150, 3.5, 160, "gave up"),
    AttemptSpan(1, 0, 0.0, 0, 4.0, 230, "won"),
    AttemptSpan(0, 1, 2.0, 100, 5.0, 240, "beaten"),
    AttemptSpan(0, 0, 4.0, 200, 5.0, 250, "won"),
    AttemptSpan(2, 0, 2.5, 90, 5.5, 260, "won"),
)


def timeline(step: int = 4, saved_s: float | None = 1.5, num_workers: int = 2) -> dict[str, Any]:
    """Returns a line of `timeline.jsonl`."""
    return {"step": step, **Timeline(METHODS * (num_workers // 2), SPANS, saved_s).record()}


def with_tail(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the same steps, made by two engines."""
    figures = Timeline(METHODS, SPANS, saved_s=0.25).figures()
    return [{**s, "tail": figures | {"saved_s": 0.25 if s["step"] else None}} for s in steps]


def trace_of_two(step: int, rng: random.Random) -> dict[str, Any]:
    workers = [{"worker": w, **trace(step, rng, (name,))} for w, name in enumerate(("suffix", "ngram"))]
    return {"step": step, "columns": [], "rows": [], "workers": workers}


# Seconds saved


def test_an_engine_drains_as_its_requests_end() -> None:
    ends_B = drain(np.array([3.0, 1.0]), np.array([1.0, 1.5]))
    assert ends_B.tolist() == [3.5, 1.5], "1 s of each at 1.5, then 2 s alone"
    assert drain(np.zeros(0), np.zeros(0)).tolist() == []


def test_an_undisturbed_rollout_ends_with_its_last_worker() -> None:
    before = Assignment(np.array([0, 0, 1]), np.array([20, 40, 0]), np.array([2.0, 4.0]))
    lengths_R, method_E = np.array([120, 340, 50]), np.array([0, 0])
    even = undisturbed_end_s(before, lengths_R, np.ones((3, 1)), method_E, EvenSpeeds(0.5))
    assert even == pytest.approx(2.0 + 1.5 * 1.0 + 2.0), "100 and 300 tokens at 100 a second, told at 2 s"
    easy = undisturbed_end_s(before, lengths_R, np.array([[1.0], [3.0], [1.0]]), method_E, EvenSpeeds(0.5))
    assert easy == pytest.approx(4.0 + 0.5), "both of worker 0 end at 3.5 s, so worker 1 is the last"
    fast = undisturbed_end_s(before, lengths_R, np.ones((3, 2)), np.array([1, 0]), EvenSpeeds(0.0, ratio=2.0))
    assert fast == pytest.approx(4.5), "method 1 makes 200 tokens a second"


def responses(**runs: tuple[int, int]) -> dict[int, Response]:
    """Returns responses by request. The values are the engine that has it (-1: none) and its tokens so far."""
    found = {}
    for name, (worker, num_tokens) in runs.items():
        response = Response(RolloutRequest([1, 2], 0, 0), [7] * num_tokens)
        response.attempts = {worker: Attempt(worker, 0, num_tokens)} if worker >= 0 else {}
        found[int(name.removeprefix("r"))] = response
    return found


class EvenLadder(EvenSpeeds):
    """A ladder of one method, on which all tasks are equally fast."""

    methods = ("any",)

    def task_speed(self, task: str, method: int) -> float:
        return 1.0


def saved_s(savings: Savings, under_way: dict[int, Response], ended_s: float, lengths: dict[int, int]) -> float | None:
    """Returns the estimate if the responses have those lengths in the end."""
    for key, length in lengths.items():
        under_way[key].tokens = [7] * length
    ladder: Any = EvenLadder()
    speeds = DecodeSpeeds(ladder)
    speeds.begin(list(under_way), "any")
    return savings.saved_s(ended_s, under_way, speeds, [0, 0])


def test_savings_count_from_the_first_move_or_race() -> None:
    savings, under_way = Savings(2, 10.0), responses(r5=(0, 100), r6=(0, 50), r8=(1, 30))
    savings.heard_s_E[0] = 11.0
    savings.note(TailDecision(), [5, 6, 8], under_way)
    assert savings.keys == [], "no request has moved yet"
    savings.note(TailDecision(starts=((0, 1),), stops=((0, 0),)), [5, 6, 8], under_way)
    savings.heard_s_E[0] = 12.0
    savings.note(TailDecision(starts=((1, 1),)), [5, 6, 8], under_way)
    assert saved_s(savings, under_way, 12.5, {5: 400, 6: 150, 8: 60}) == pytest.approx(11.0 + 3.0 - 12.5)


def test_savings_may_be_negative_or_unknown() -> None:
    under_way = responses(r0=(0, 0), r1=(-1, 0))
    savings = Savings(2, 0.0)
    assert saved_s(savings, under_way, 3.0, {}) is None, "no request has moved"
    savings.note(TailDecision(starts=((1, 1),)), [0, 1], under_way)
    assert savings.keys == [], "a waiting request that begins does not move"
    savings.note(TailDecision(starts=((1, 1), (0, 1))), [0, 1], under_way)
    assert saved_s(savings, under_way, 3.0, {0: 100, 1: 200}) == pytest.approx(-1.0)
    savings.is_unknown = True
    assert saved_s(savings, under_way, 3.0, {}) is None, "an engine died"


# Counts and words


def test_figures_of_a_timeline() -> None:
    figures = Timeline(METHODS, SPANS, saved_s=0.5).figures()
    assert (figures["moves"], figures["races"], figures["won_by_racer"]) == (1, 2, 1)
    assert (figures["deaths"], figures["diverged"], figures["saved_s"]) == (1, 0, 0.5)
    assert figures["idle_share"] == pytest.approx((11.0 - 5.5 - 5.0) / 11.0)


def test_a_death_is_one_whatever_it_took_along() -> None:
    under_way = [Response(RolloutRequest([1, 2], 0, 0)) for _ in range(3)]
    for response, worker in zip(under_way, (0, 0, 1), strict=True):
        response.open(worker, 7)
    for response in under_way[:2]:
        response.close(0, AttemptOutcome.DIED, 1e9)
    under_way[2].close(1, AttemptOutcome.WON, time.perf_counter())
    found = Timeline.of(under_way, METHODS, None)
    assert found.figures()["deaths"] == 1 and [s.request for s in found.spans] == [2, 0, 1]


def test_words_of_a_tail() -> None:
    figures = Timeline(METHODS, SPANS, saved_s=0.5).figures()
    assert describe(figures) == (
        "1 move, 2 races (1 won by the racer), 1 worker died; saved 0.50 s (estimate); workers idle for 5% of their time"
    )
    assert describe(Timeline(METHODS, SPANS[:1]).figures()) == ""


def test_a_step_s_line_has_the_tail_s_beneath(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        progress = Progress(Console(file=file, width=200))
        for step in with_tail([metrics(i, random.Random(i)) for i in range(2)]):
            progress.step_done(step)
        progress.step_done(metrics(2, random.Random(2)))
    assert (tmp_path / "out").read_text().count("1 move, 2 races (1 won by the racer)") == 2


def test_a_log_file_has_no_empty_lines(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        progress = Progress(Console(file=file, width=200))
        for step in (metrics(i, random.Random(i)) for i in range(2)):
            with progress.rollout(step["step"], num_requests=1) as on_finished:
                on_finished(1)
            progress.step_done(step)
    assert all((tmp_path / "out").read_text().splitlines())


def test_an_alarm_and_a_folder_are_printed_as_they_are(tmp_path: Path) -> None:
    """Brackets are not markup, and a path is not broken in a log file."""
    alarm, folder = "a worker died ([rank0]: cannot open [/usr/lib/x.so])", f"/runs/[lr=1e-4]/{'long/' * 40}[/b]"
    with (tmp_path / "out").open("w") as file:
        progress = Progress(Console(file=file, width=80))
        progress.step_done(metrics(0, random.Random(0), alarms=[alarm]))
        progress.summary({"steps": 0, "wall_s": 1.0}, folder)
    said = (tmp_path / "out").read_text()
    assert alarm in said and f"{folder}/report.html" in said


def test_a_run_s_summary_adds_tails_up() -> None:
    steps = with_tail([metrics(i, random.Random(i)) for i in range(4)])
    summary = summary_of(steps)
    assert (summary["tail_moves"], summary["tail_races"], summary["tail_won_by_racer"]) == (4, 8, 4)
    assert summary["tail_saved_s"] == pytest.approx(0.75) and summary["tail_deaths"] == 4
    assert summary["tail_idle_share"] == pytest.approx(steps[0]["tail"]["idle_share"])
    assert summary_of(steps[:1])["tail_saved_s"] is None and "tail_moves" not in summary_of(
        [metrics(0, random.Random(0))]
    )


# Charts


def test_the_rollout_shown_is_the_one_where_most_was_saved() -> None:
    lines = [timeline(0, None), timeline(1, -0.5), timeline(2, 0.3), timeline(3, 0.1)]
    shown = shown_timeline(lines)
    assert shown is not None and shown["step"] == 2
    assert (shown_timeline([timeline(0, None), timeline(1, None)]) or {})["step"] == 1, (
        "the last, if no savings are known"
    )
    assert shown_timeline([{"step": 0, "num_workers": 2, "spans": []}]) is None and shown_timeline([]) is None


def test_rows_are_for_requests_that_several_had_and_for_the_last() -> None:
    spans = Timeline(METHODS, SPANS).record()["spans"]
    assert shown_requests(spans) == [3, 1, 0, 2]
    late = tuple(AttemptSpan(r, 0, 0.0, 0, 10.0 + r, 9, "won") for r in range(10, 60))
    many = Timeline(METHODS, late).record()["spans"]
    assert shown_requests([*many, *spans]) == [1, 0, 2, *range(60 - MAX_ROWS + 3, 60)]


@pytest.mark.parametrize("num_workers", [2, 6, 2 * MAX_ENGINES])
def test_the_tail_s_chart_is_svg_and_repeatable(num_workers: int) -> None:
    lines = [timeline(num_workers=num_workers)]
    svg = tail_chart(lines)
    assert ElementTree.fromstring(svg).tag.endswith("svg") and svg == tail_chart(lines)
    for word in ("worker 1: ngram", "saved 1.50 s, by estimate", "gave up", "beaten", "died", "moved", "request 3"):
        assert word in svg
    assert "diverged" not in svg, "a legend of what is there"
    assert ("more workers are left out" in svg) == (num_workers > MAX_ENGINES)
    assert tail_chart([]) == "" and "by estimate" not in tail_chart([timeline(saved_s=None)])


def test_a_run_over_two_workers_has_its_section(tmp_path: Path) -> None:
    rng = random.Random(0)
    steps, traces = with_tail([metrics(i, rng) for i in range(4)]), [trace_of_two(i, rng) for i in range(4)]
    run = write_run(tmp_path / "run", steps, traces)
    (run / "timeline.jsonl").write_text("".join(json.dumps(timeline(i)) + "\n" for i in range(4)))
    report, picture = write_pages(run)
    page = Page(report)
    for words in ("The tail", "Saved in the tail +0.8 s", "estimate; moves: 4, races: 8, won by the racer: 4",
                  "Running requests of all 2 workers", "all workers' present engine steps",
                  "Moves and races"):  # fmt: skip
        assert words in page.text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert imread(picture).shape[:2] == (840, 1200)
    alone = Page(write_pages(write_run(tmp_path / "alone", [metrics(0, rng)], []))[0])
    assert "The tail" not in alone.text and "Moves and races" not in alone.text


def test_traces_of_workers_are_put_together() -> None:
    """Worker 1 is idle from 2 to 5 s, and its last step ends at 6."""
    rows = [[[1.0, 1.0, 4], [2.0, 1.0, 3], [6.5, 4.5, 1]], [[1.5, 0.5, 8], [2.0, 0.5, 2], [6.0, 1.0, 1]]]
    names = [COLUMNS[:3], [*COLUMNS[:3], "drafted_ngram"]]
    workers = [{"worker": 0, "columns": names[0], "rows": rows[0]},
               {"worker": 1, "columns": names[1], "rows": [[*r, 5] for r in rows[1]]}]  # fmt: skip
    whole = whole_trace({"step": 3, "columns": [], "rows": [], "workers": workers})
    assert whole["columns"] == ["time_s", "num_requests", "drafted_ngram"] and whole["step"] == 3
    assert whole["rows"] == [[1.0, 12, 5], [1.5, 11, 5], [2.0, 5, 5], [5.0, 1, 0], [6.0, 2, 5], [6.5, 1, 0]]
    one = trace(0, random.Random(0))
    assert whole_trace(one) is one and not can_drain(whole_trace({"step": 0, "workers": []}))
    assert math.isclose(whole["rows"][-1][0], 6.5)


# `explain`


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("max_racers=2", "2 rollout workers, a core each"),
        ("max_racers=2", "each with suffix+ngram"),
        ("max_racers=2", "no engine races: all draft alike"),
        ("methods=[[suffix],[ngram]]", "0 with suffix, 1 with ngram"),
        ("methods=[[suffix],[ngram]]", "stragglers move to another engine or are raced by up to 2 engines"),
        ("methods=[[suffix],[ngram,suffix]]", "1 with suffix+ngram"),
        ("min_gain=0.25", "to end the slower of two engines 25% sooner; decode speeds are learned while running"),
        ("enabled=false", "off: each engine does its own share"),
    ],
)
def test_check_says_what_happens_to_the_tail(
    override: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["explain", str(TWO_WORKERS), f"{BLOCK}.{override}"]) == 0
    output = capsys.readouterr().out
    assert words in output and "vLLM in 2 others, which are Ray actors" in output and "one process" not in output
