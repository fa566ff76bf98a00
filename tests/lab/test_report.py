# SPDX-License-Identifier: Apache-2.0
"""The report of a run and the chart of a bench, from files that the test writes."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread
from run_files import COLUMNS, Page, clashing_titles, metrics, trace, write_run

from lab.bench.bench_charts import bench_chart, throughput_chart
from lab.local.rollout_charts import drain_chart
from lab.local.run_report import write_pages, write_results
from nemo_specrollout.cli.main import main
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports import records
from nemo_specrollout.reports.charts import charts_of
from nemo_specrollout.reports.records import Run, accepted_shares, summary_of

pytestmark = pytest.mark.unit

CHARTS = (
    "Rollout time", "Where a step's time goes", "Tokens and drafts", "Acceptance by position", "Acceptance, step by step",
    "Reward", "Engine against trainer", "How a batch drains",
)  # fmt: skip


def write_full_run(run_dir: Path, num_steps: int = 16) -> Path:
    """A completed run, in which one step has no plain estimate."""
    rng = random.Random(0)
    steps = [metrics(i, rng) for i in range(num_steps)]
    steps[0] |= {"plain_estimate_s": None, "speedup_estimate": None}
    return write_run(run_dir, steps, [trace(i, rng) for i in range(num_steps)], wall_s=140.1, completed=True)


def bench_rows() -> list[dict[str, Any]]:
    """A bench with every kind of row."""
    speedups = {"stock": 1.07, "plain": 1.0, "ngram k=1": 1.04, "ngram k=3": 0.86, "vLLM's ngram k=3": 0.61,
                "eagle3 greedy k=3": 1.31, "vLLM's eagle3 probabilistic k=3": 1.12, "ours": 1.62}  # fmt: skip
    return [
        {"mode": mode, "seconds": 3.1 / x, "tokens": 4556, "tokens_per_s": 1470 * x, "engine_steps": 310,
         "acceptance_length": 1.0, "speedup_vs_plain": x, "speedup_low": x - 0.05, "speedup_high": x + 0.04,
         "tokens_equal": None if mode.startswith("vLLM's") else 4556, "tokens_total": 4556}
        for mode, x in speedups.items()
    ]  # fmt: skip


def with_head(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same steps with a head, refreshed after every fourth, published every other time."""
    for step in steps:
        at = step["step"]
        step["head_age"] = at % 4
        step["acceptance"] |= {"eagle3": {"proposed": [400, 200], "accepted": [300, 120]}} if at else {}
        step["draft_refresh"] = {"decision": f"skipped: <{at}>", "gain_s": 0.1, "capture_s": 0.01}
        if at % 4 == 3:
            published = at % 8 == 7
            step["draft_refresh"] |= {"decision": f"refreshed: {at}", "gate": "better & so", "published": published,
                                      "refresh_s": 1.0}  # fmt: skip
    return steps


def test_page_is_self_contained(tmp_path: Path) -> None:
    page = Page(write_pages(write_full_run(tmp_path / "demo"))[0])
    outside = [a for a in page.attributes if "//" in a[1] and not a[0].startswith("xmlns")]
    assert not outside
    assert not {"script", "link", "img", "iframe", "object"} & page.tags
    assert not re.search(r"@import|url\((?!#)", page.source)
    links = [value for name, value in page.attributes if name.endswith("href")]
    assert links and all(link.startswith("#") for link in links)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)
    assert [p.name for p in (tmp_path / "demo").iterdir() if "report" in p.name] == ["report.html"]


def test_page_has_the_figures(tmp_path: Path) -> None:
    run = write_full_run(tmp_path)
    page, steps = Page(write_pages(run)[0]), records.read_lines(run / "metrics.jsonl")
    known = [step for step in steps if step["plain_estimate_s"] is not None]
    speedup = sum(s["plain_estimate_s"] for s in known) / sum(s["rollout_s"] for s in known)
    first, last = (sum(s["reward"] for s in part) / 3 for part in (steps[:3], steps[-3:]))
    for figure in (f"{speedup:.2f}x", "4,800", "of 4,800 checked", f"{first:.2f} → {last:.2f}", "1.70",
                   "16 finished steps: steps 0 to 15, completed, 140 s in all"):  # fmt: skip
        assert figure in page.text
    assert page.charts == list(CHARTS) and page.source.count("<svg") == len(CHARTS)
    assert "none raised" in page.text and page.source.count("<tr>") == 16 + 1


def test_what_the_user_wrote_is_escaped(tmp_path: Path) -> None:
    alarm = "acceptance fell <script>alert(1)</script> & stayed"
    steps = [metrics(0, random.Random(0), alarms=[alarm])]
    page = Page(write_pages(write_run(tmp_path / "a<i>&b", steps, []))[0])
    assert "script" not in page.tags and "i" not in page.tags and "b" not in page.tags
    for text in (alarm, "a<b>.yaml", "# <b>&", "Run a<i>&b"):
        assert text in page.text


def test_alarms_and_unequal_tokens_stand_out(tmp_path: Path) -> None:
    steps = [metrics(i, random.Random(i), tokens_equal=299, alarms=["suffix died"] * i) for i in range(3)]
    page = Page(write_pages(write_run(tmp_path, steps, []))[0])
    assert page.source.count('class="card bad"') == 2
    assert "99.667%" in page.text and "897 of 900 checked" in page.text
    assert page.text.count("suffix died") == 3 and "step 2: suffix died" in page.text
    assert page.source.count('<td class="bad">') == 3


def test_an_interrupted_run_is_summed_from_its_steps(tmp_path: Path) -> None:
    rng = random.Random(1)
    steps = [metrics(i, rng, rollout_s=2.0, plain_estimate_s=p) for i, p in enumerate((3.0, 5.0, None))]
    steps[1]["acceptance_length"] = math.nan
    run_dir = write_run(tmp_path, steps, [trace(0, rng)])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 0.')
    page = Page(write_pages(run_dir)[0])
    assert "2.00x" in page.text and "900" in page.text
    assert "3 finished steps: steps 0 to 2" in page.text and "completed" not in page.text
    assert "nan" not in page.text.split()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"acceptance": {"suffix": {"proposed": [1, 2]}}}, "acceptance.suffix is {'proposed': [1, 2]}, where"),
        ({"acceptance": {"suffix": {"proposed": [1], "accepted": []}}}, "two lists of equal length"),
        ({"acceptance": {"suffix": {"proposed": ["x"], "accepted": [1]}}}, "acceptance.suffix is"),
        ({"acceptance": {"suffix": {"proposed": [10**400], "accepted": [1]}}}, "acceptance.suffix is"),
        ({"acceptance": {"suffix": 7}}, "acceptance.suffix is 7, where a record of a step has the counts"),
        ({"acceptance": 5}, "acceptance is 5, where a record of a step has a block; remove the line, or bring"),
        ({"alarms": "fire"}, "alarms is 'fire', where a record of a step has a list of sentences"),
        ({"draft_refresh": [1]}, "draft_refresh is [1], where"),
        ({"draft_supply": 1, "tail": {}}, "draft_supply is 1, where"),
        ({"tail": True}, "tail is True, where"),
    ],
)
def test_a_damaged_record_is_named_with_its_line(tmp_path: Path, damage: dict[str, Any], words: str) -> None:
    lines = [json.dumps(metrics(step, random.Random(0), **(damage if step == 2 else {}))) for step in (0, 1, 2, 3)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join([lines[0], "", *lines[1:]]))  # a blank line counts, too
    for write in (lambda: write_results(tmp_path, 1.0, completed=True), lambda: write_pages(tmp_path)):
        with pytest.raises(ConfigError) as raised:
            write()
        assert str(raised.value).startswith(f"{file}, line 4: ") and words in str(raised.value)


def test_a_metrics_file_that_other_programs_wrote_is_read(tmp_path: Path) -> None:
    """A byte-order mark costs no step, pandas' numbers and columns are understood, and nothing is too large to draw."""
    steps = [metrics(i, random.Random(i), draft_refresh=None, draft_supply=None, tail=None) for i in range(3)]
    steps[1] |= {"reward": 10**400, "loss": 1e308, "step_s": math.inf, "alarms": ["half of a pair: \ud800 \u2028 <b>"]}
    steps[2]["step"] = 2.0
    run_dir = write_run(tmp_path, [], [])
    content = b"\r\n".join(json.dumps(step).encode() for step in steps)
    (run_dir / "metrics.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    page = Page(write_pages(run_dir)[0])
    assert "3 finished steps: steps 0 to 2" in page.text and "half of a pair: \\ud800" in page.text
    assert [step["step"] for step in records.read_steps(run_dir)] == [0, 1, 2]


@pytest.mark.parametrize("missing", [None, "metrics.jsonl", "trace.jsonl", "config.yaml"])
def test_no_finished_step(tmp_path: Path, missing: str | None) -> None:
    run_dir = write_run(tmp_path, [], [])
    if missing:
        (run_dir / missing).unlink()
    report, picture = write_pages(run_dir)
    assert "no finished step yet" in Page(report).text and "<svg" not in Page(report).source
    assert imread(picture).shape[:2] == (420, 1200)


def test_any_key_may_be_missing(tmp_path: Path) -> None:
    full = metrics(0, random.Random(0))
    steps = [{k: v for k, v in full.items() if k != key} | {"step": i} for i, key in enumerate(full)]
    assert Page(write_pages(write_run(tmp_path, steps, []))[0]).charts == list(CHARTS[:-1])
    empty = [{"step": 0, "columns": COLUMNS, "rows": []}]
    assert Page(write_pages(write_run(tmp_path, [{"step": 0}], empty))[0]).charts == []


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.json", "", "by another version of nemo-specrollout, or run.json is damaged"),
        (
            "run.json",
            '{"command": "run", "versions": {}, "started": "today"}',
            "by another version of nemo-specrollout",
        ),
        ("metrics.jsonl", "hello\n", "metrics.jsonl holds no record of a step"),
    ],
)
def test_a_report_of_junk_is_refused(
    tmp_path: Path, name: str, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_run(tmp_path, [metrics(0, random.Random(0))], []) / name).write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "report.html").exists()


def test_a_config_alone_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("grpo: {seed: 1}\n")
    assert main(["report", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err and not (tmp_path / "report.html").exists()


def test_a_run_killed_in_its_first_line_has_a_report(tmp_path: Path) -> None:
    (write_run(tmp_path, [], []) / "metrics.jsonl").write_text('{"step": 0, "rew')
    assert main(["report", str(tmp_path)]) == 0
    assert "no finished step yet" in (tmp_path / "report.html").read_text()


def test_a_resumed_step_replaces_the_first_try(tmp_path: Path) -> None:
    write_run(tmp_path, [{"step": 1, "reward": 0.1}, {"step": 0, "reward": 0.2}, {"step": 1, "reward": 0.3}], [])
    assert records.series(records.read_lines(tmp_path / "metrics.jsonl"), "reward").tolist() == [0.2, 0.3]


def test_acceptance_totals_add_positions_of_any_length() -> None:
    counts = [{"suffix": {"proposed": [9, 4], "accepted": [6, 2]}, "idle": {"proposed": [0], "accepted": [0]}},
              {"suffix": {"proposed": [1, 1, 1, 0], "accepted": [1, 1, 0, 0]}}, None]  # fmt: skip
    totals = records.acceptance_totals([{"step": i, "acceptance": c} for i, c in enumerate(counts)])
    assert {name: np.stack(pair).tolist() for name, pair in totals.items()} == {"suffix": [[10, 5, 1], [7, 3, 0]]}


def test_charts_are_svg_and_repeatable(tmp_path: Path) -> None:
    run_dir = write_full_run(tmp_path)
    run, traces = Run.read(run_dir), records.read_lines(run_dir / "trace.jsonl")
    assert [title for title, *_ in charts_of(run)] == list(CHARTS[:-1]) and list(charts_of(run)) == list(charts_of(run))
    one = Run(run.folder, run.about, run.steps[1:2], {})
    for _, svg, *_ in [*charts_of(run), *charts_of(one)]:
        assert ElementTree.fromstring(svg).tag.endswith("svg")
    for shown in (traces[0], trace(0, random.Random(0), drafters=())):
        assert ElementTree.fromstring(drain_chart(shown)).tag.endswith("svg")
    assert "pale: rejected" in drain_chart(traces[0])


def test_a_gap_of_zero_is_drawn(tmp_path: Path) -> None:
    run = Run(tmp_path, {}, [{"step": i, "logprob_gap": 0.0} for i in range(3)], {})
    assert [title for title, *_ in charts_of(run)] == ["Engine against trainer"]


def test_a_head_has_its_section(tmp_path: Path) -> None:
    rng = random.Random(0)
    run = write_run(tmp_path / "run", with_head([metrics(i, rng) for i in range(15)]), [])
    page = Page(write_pages(run)[0])
    assert "Draft heads 1 of 3" in page.text and "Age of the head (policy versions)" in page.text
    assert "step 7: refreshed: 7; gate: better & so" in page.text and "skipped: <13>" not in page.text
    assert "step 14: skipped: <14>" in page.text, "the latest decision"
    assert "Draft head" not in Page(write_pages(write_full_run(tmp_path / "without"))[0]).text


def test_figures_of_a_head() -> None:
    rng = random.Random(0)
    steps = with_head([metrics(i, rng) for i in range(16)])
    figures = summary_of(steps)
    run_s = sum(s[k] for s in steps for k in ("generation_s", "logprob_s", "train_s", "refit_s", "verify_s"))
    assert (figures["refreshes"], figures["heads_published"], figures["refresh_s"]) == (4, 2, 4.0)
    assert figures["refresh_share"] == pytest.approx(4.0 / (run_s + 4.0))
    shares = accepted_shares(steps, ("eagle3",))
    assert shares[1:] == pytest.approx(0.7) and math.isnan(shares[0])
    assert "refreshes" not in summary_of([metrics(0, rng)])


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clashes = clashing_titles(monkeypatch)
    bench_chart(bench_rows(), tmp_path / "bench.png")
    assert ElementTree.parse(tmp_path / "bench.svg").getroot().tag.endswith("svg")
    assert imread(tmp_path / "bench.png").shape[1] == 1200
    _, picture = write_pages(write_full_run(tmp_path))
    assert imread(picture).shape[:2] == (840, 1200)
    assert not clashes


def test_the_chart_of_tokens_a_second_has_plain_the_best_of_vllms_rows_and_ours(tmp_path: Path) -> None:
    speeds = {
        "plain": 10.0,
        "vLLM's ngram k=5": 8.0,
        "vLLM's eagle3 greedy k=5": 14.0,
        "ours": 17.0,
        "ours, head alone": 16.0,
    }
    rows = [
        {"mode": mode, "batch": batch, "tokens_per_s": batch * speed, "speedup_vs_plain": speed / 10.0}
        for batch in (1, 4, 32)
        for mode, speed in speeds.items()
    ]
    throughput_chart(rows, tmp_path / "bench.png")
    texts = (tmp_path / "bench.svg").read_text()
    assert all(
        f"<!-- {label} -->" in texts for label in ("plain decoding", "vLLM's best method", "this package", "1.70x")
    )
    assert "1.40x" not in texts and "1.60x" not in texts
    throughput_chart([row for row in rows if row["mode"] == "plain"], tmp_path / "bench.png")
    texts = (tmp_path / "bench.svg").read_text()
    assert "<!-- plain decoding -->" in texts and "<!-- this package -->" not in texts


def test_bench_chart_of_a_row_without_numbers(tmp_path: Path) -> None:
    bench_chart([{"mode": "plain", "speedup_vs_plain": 1.0}, {"mode": "ours"}], tmp_path / "bench.svg")
    assert (tmp_path / "bench.png").stat().st_size > 0
