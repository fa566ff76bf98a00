# SPDX-License-Identifier: Apache-2.0
"""The report of a run and the chart of a bench, from files that the test writes."""

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from lab.bench.bench_charts import bench_chart
from lab.local.run_report import write_pages, write_results
from nemo_specrollout.cli.main import main
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports import charts, records
from nemo_specrollout.reports.panels import head_acceptance, head_summary

pytestmark = pytest.mark.unit

CHARTS = ("speedup", "drain", "time", "acceptance", "reward", "gap")
COLUMNS = ["time_s", "seconds", "num_requests", "num_rows", "is_decode", "host_s"]


def metrics(step: int, rng: random.Random, **changes: Any) -> dict[str, Any]:
    """A step as a 16-step demo run records it."""
    rollout_s, speedup = rng.uniform(1.7, 2.2), rng.uniform(1.45, 1.8)
    proposed = [int(900 * 0.62**k) + rng.randrange(9) for k in range(5)]
    line = {
        "step": step, "reward": 0.52 + 0.012 * step + rng.uniform(-0.03, 0.03), "num_samples": 64,
        "response_length": {"mean": rng.uniform(65, 80), "median": 55, "max": rng.randrange(250, 320)},
        "num_tokens": rng.randrange(4300, 4800), "rollout_s": rollout_s, "plain_estimate_s": rollout_s * speedup,
        "rollout_speedup": speedup, "logprob_s": 1.2, "train_s": rng.uniform(3.1, 3.5), "refit_s": 0.1, "verify_s": 0.3,
        "target_steps": rng.randrange(160, 200), "request_steps": 2700, "acceptance_length": rng.uniform(1.6, 1.8),
        "acceptance": {
            "suffix": {"proposed": proposed, "accepted": [int(p * 0.7 * 0.95**k) for k, p in enumerate(proposed)]},
            "ngram": {"proposed": [210, 90, 31], "accepted": [80, 30, 9]},
        },
        "num_draft_tokens": 1400, "share_of_steps_with_drafts": 0.7, "host_share": 0.011,
        "logprob_gap": {"mean": rng.uniform(0.8e-7, 1.5e-7), "max": rng.uniform(1e-6, 4e-6)},
        "tokens_checked": 300, "tokens_equal": 300, "loss": 0.01, "approx_kl": 0.0, "approx_entropy": 0.4, "grad_norm": 0.7,
        "lr": 2e-4, "alarms": [],
    }  # fmt: skip
    return line | changes


def trace(step: int, rng: random.Random, drafters: tuple[str, ...] = ("suffix", "ngram")) -> dict[str, Any]:
    """A rollout of 64 requests whose lengths are log-normal; the clock starts anywhere."""
    lengths = sorted(int(55 * math.exp(rng.gauss(0, 0.6))) for _ in range(64))
    rows, time_s, done = [], 81_234.5, 0.0
    while running := sum(length > done for length in lengths):
        drafted = [rng.randrange(0, max(2, min(running * 3, 90 - running))) if running < 60 else 0 for _ in drafters]
        accepted = [int(d * rng.uniform(0.3, 0.9)) for d in drafted]
        seconds = 0.004 + 0.00012 * (running + sum(drafted))
        time_s, done = time_s + seconds, done + 1 + sum(accepted) / running
        counts = [n for pair in zip(drafted, accepted, strict=True) for n in pair]
        rows.append([time_s, seconds, running, running + sum(drafted), 1.0, 6e-5, *counts])
    names = [f"{kind}_{name}" for name in drafters for kind in ("drafted", "accepted")]
    return {"step": step, "columns": COLUMNS + names, "rows": rows}


def write_run(run_dir: Path, steps: list[dict[str, Any]], traces: list[dict[str, Any]], **summary: Any) -> Path:
    """A run directory as the local runner leaves it; without `summary`, as an interrupted run leaves it."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (run_dir / "trace.jsonl").write_text("".join(json.dumps(t) + "\n" for t in traces))
    (run_dir / "config.yaml").write_text("grpo:\n  num_prompts_per_step: 8  # <b>&\n  seed: 42\n")
    about = {"command": "nemo-specrollout run 'a<b>.yaml'", "versions": {"vllm": "0.32.0", "torch": "2.13.0"},
             "commit": "0123abc", "started": "2025-01-01T00:00:00"}  # fmt: skip
    (run_dir / "run.json").write_text(json.dumps(about))
    if summary:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def write_full_run(run_dir: Path, num_steps: int = 16) -> Path:
    """A completed run, in which one step has no plain estimate."""
    rng = random.Random(0)
    steps = [metrics(i, rng) for i in range(num_steps)]
    steps[0] |= {"plain_estimate_s": None, "rollout_speedup": None}
    return write_run(
        run_dir, steps, [trace(i, rng) for i in range(num_steps)], rollout_speedup_vs_plain_estimate=1.634,
        tokens_checked=4800, tokens_equal=4800, reward_first=0.5, reward_last=0.71, acceptance_length=1.7,
        wall_s=140.1, completed=True,
    )  # fmt: skip


def bench_rows() -> list[dict[str, Any]]:
    """A bench with every kind of row."""
    speedups = {"stock": 1.07, "plain": 1.0, "ngram k=1": 1.04, "ngram k=3": 0.86, "vLLM's ngram k=3": 0.61,
                "eagle3 greedy k=3": 1.31, "vLLM's eagle3 probabilistic k=3": 1.12, "ours": 1.62}  # fmt: skip
    return [
        {"mode": mode, "seconds": 3.1 / x, "tokens": 4556, "tokens_per_s": 1470 * x, "target_steps": 310,
         "acceptance_length": 1.0, "speedup_vs_plain": x, "speedup_low": x - 0.05, "speedup_high": x + 0.04,
         "tokens_equal": None if mode.startswith("vLLM's") else 4556, "tokens_total": 4556}
        for mode, x in speedups.items()
    ]  # fmt: skip


def with_head(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same steps with a head, refreshed after every fourth, published every other time."""
    for step in steps:
        at = step["step"]
        step["acceptance"] |= {"eagle3": {"proposed": [400, 200], "accepted": [300, 120]}} if at else {}
        step["draft_refresh"] = {"decision": f"skipped: <{at}>", "gain_s": 0.1, "capture_s": 0.01}
        if at % 4 == 3:
            published = at % 8 == 7
            step["draft_refresh"] |= {"decision": f"refreshed: {at}", "gate": "better & so", "published": published,
                                      "refresh_s": 1.0}  # fmt: skip
    return steps


class Page(HTMLParser):
    """Text and attributes of a page; asserts that every element which must be closed is, in order."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self.feed(self.source)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


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
    page = Page(write_pages(write_full_run(tmp_path))[0])
    for figure in ("1.63x", "4,800", "of 4,800 checked", "0.50 → 0.71", "1.70", "16 finished steps, completed, 140 s"):
        assert figure in page.text
    assert page.source.count("<svg") == len(CHARTS)
    assert "none raised" in page.text and "not recorded" not in page.text
    assert page.source.count("<tr>") == 2 * (16 + 1)


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
    assert "3 finished steps, not completed" in page.text
    assert "nan" not in page.text.split()


@pytest.mark.parametrize(
    "damage", [{"suffix": {"proposed": [1, 2]}}, {"suffix": 7}, 5, {"suffix": {"proposed": "x", "accepted": []}}]
)
def test_a_damaged_record_is_a_sentence(tmp_path: Path, damage: Any) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics(0, random.Random(0), acceptance=damage)) + "\n")
    with pytest.raises(ConfigError, match=r"a line of metrics\.jsonl, trace\.jsonl or timeline\.jsonl is damaged"):
        write_results(tmp_path, 1.0, completed=True)


@pytest.mark.parametrize("missing", [None, "metrics.jsonl", "trace.jsonl", "config.yaml", "run.json"])
def test_no_finished_step(tmp_path: Path, missing: str | None) -> None:
    run_dir = write_run(tmp_path, [], [])
    if missing:
        (run_dir / missing).unlink()
    page = Page(write_pages(run_dir)[0])
    assert "no finished step yet" in page.text
    assert "<svg" not in page.source
    charts.run_picture(run_dir, tmp_path / "run.png")
    assert imread(tmp_path / "run.png").shape[:2] == (420, 1200)


def test_any_key_may_be_missing(tmp_path: Path) -> None:
    full = metrics(0, random.Random(0))
    steps = [{k: v for k, v in full.items() if k != key} | {"step": i} for i, key in enumerate(full)]
    page = Page(write_pages(write_run(tmp_path, steps, []))[0])
    assert page.text.count("not recorded") == 1
    page = Page(write_pages(write_run(tmp_path, [{"step": 0}], [{"step": 0, "columns": COLUMNS, "rows": []}]))[0])
    assert page.text.count("not recorded") == len(CHARTS)
    charts.run_picture(tmp_path, tmp_path / "run.png")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.yaml", "", "config.yaml is no config of a run"),
        ("config.yaml", "hello", "config.yaml is no config of a run"),
        ("config.yaml", "a: [", "config.yaml is no config of a run"),
        ("config.yaml", "\x00", "config.yaml is no config of a run"),
        ("metrics.jsonl", "hello\n", "metrics.jsonl holds no record of a step"),
        ("metrics.jsonl", '{"reward": 1.0}\n', "metrics.jsonl holds no record of a step"),
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


def test_missing_directory_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="log_dir"):
        write_pages(tmp_path / "nowhere")


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
    steps, traces = (records.read_lines(run_dir / name) for name in ("metrics.jsonl", "trace.jsonl"))
    drawn = [charts.speedup_chart, charts.time_chart, charts.acceptance_chart, charts.reward_chart, charts.gap_chart]
    for chart in drawn:
        assert ElementTree.fromstring(chart(steps)).tag.endswith("svg")
        assert chart([]) == ""
        assert ElementTree.fromstring(chart(steps[1:2])).tag.endswith("svg")
    assert charts.reward_chart(steps) == charts.reward_chart(steps)
    for shown in (traces[0], trace(0, random.Random(0), drafters=())):
        assert ElementTree.fromstring(charts.drain_chart(shown)).tag.endswith("svg")
    assert "pale: rejected" in charts.drain_chart(traces[0])


def test_a_gap_of_zero_is_drawn() -> None:
    assert charts.gap_chart([{"step": i, "logprob_gap": {"mean": 0.0, "max": 0.0}} for i in range(3)])


def test_a_head_has_its_section(tmp_path: Path) -> None:
    rng = random.Random(0)
    run = write_run(tmp_path / "run", with_head([metrics(i, rng) for i in range(16)]), [])
    page = Page(write_pages(run)[0])
    assert "Draft heads 2 of 4" in page.text and "Time of refreshes, of the run so far" in page.text
    assert "step 7: refreshed: 7; gate: better & so" in page.text and "skipped: <14>" not in page.text
    assert "Draft head" not in Page(write_pages(write_full_run(tmp_path / "without"))[0]).text


def test_figures_of_a_head() -> None:
    rng = random.Random(0)
    steps = with_head([metrics(i, rng) for i in range(16)])
    figures = head_summary(steps)
    run_s = sum(s[k] for s in steps for k in ("rollout_s", "logprob_s", "train_s", "refit_s", "verify_s"))
    assert (figures["refreshes"], figures["heads_published"], figures["refresh_s"]) == (4, 2, 4.0)
    assert figures["refresh_share"] == pytest.approx(4.0 / (run_s + 4.0))
    assert figures["capture_share"] == pytest.approx(0.16 / sum(s["rollout_s"] for s in steps))
    assert head_acceptance(steps)[1:] == pytest.approx(0.7) and math.isnan(head_acceptance(steps)[0])
    assert head_summary([metrics(0, rng)]) == {}


def test_pictures(tmp_path: Path) -> None:
    bench_chart(bench_rows(), tmp_path / "bench.png")
    assert ElementTree.parse(tmp_path / "bench.svg").getroot().tag.endswith("svg")
    assert imread(tmp_path / "bench.png").shape[1] == 1200
    charts.run_picture(write_full_run(tmp_path), tmp_path / "run.png")
    assert imread(tmp_path / "run.png").shape[:2] == (420, 1200)


def test_bench_chart_of_a_row_without_numbers(tmp_path: Path) -> None:
    bench_chart([{"mode": "plain", "speedup_vs_plain": 1.0}, {"mode": "ours"}], tmp_path / "bench.svg")
    assert (tmp_path / "bench.png").stat().st_size > 0
