# SPDX-License-Identifier: Apache-2.0
"""Files of a run that a test writes, and the pages that come of them."""

import json
import math
import random
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from nemo_specrollout.reports.metric_table import BOTH, LOGGER, METRICS, NEMO_RL
from nemo_specrollout.reports.records import FORMAT

COLUMNS = ["time_s", "seconds", "num_requests", "num_rows", "is_decode", "host_s"]


def undefined(record: Mapping[str, Any], runs: str) -> list[str]:
    """Returns the keys of a step's record that the table of metrics lacks for such runs, or for NeMo-RL's logger."""
    has = (BOTH, NEMO_RL, LOGGER) if runs == LOGGER else (BOTH, runs)
    names = [metric.name.replace("/", ".") for metrics in METRICS.values() for metric in metrics if metric.runs in has]
    patterns = [re.sub(r"<\w+>", r"[^.]+", re.escape(name)) for name in names]
    known = re.compile("|".join(patterns))
    keys = (key.replace("/", ".") if runs == LOGGER else key for key in dotted(record))
    return [key for key in keys if not known.fullmatch(key)]


def clashing_titles(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Returns a set to which every figure that is drawn from now on adds its titles that touch another or leave the figure."""
    found = set[str]()
    draw = Figure.draw

    def draw_and_look(figure: Figure, renderer: Any) -> None:
        draw(figure, renderer)
        titles = [text for ax in figure.axes for text in _titles(ax)]
        boxes = [(title.get_text(), title.get_window_extent(renderer)) for title in titles]
        found.update(f"{a} | {b}" for (a, box), (b, other) in combinations(boxes, 2) if box.padded(2).overlaps(other))
        found.update(text for text, box in boxes if box.x0 < 0 or box.x1 > figure.bbox.x1)

    monkeypatch.setattr(Figure, "draw", draw_and_look)
    return found


def _titles(ax: Axes) -> list[Text]:
    words = [text for place in ("left", "center", "right") if (text := ax.get_title(loc=place))]
    return [child for child in ax.get_children() if isinstance(child, Text) and child.get_text() in words]


def dotted(record: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yields the keys of a record, those of objects in it with dots."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{before}{key}.")
        else:
            yield before + key


def metrics(step: int, rng: random.Random, **changes: Any) -> dict[str, Any]:
    """A step as a 16-step demo run records it."""
    rollout_s, speedup = rng.uniform(1.7, 2.2), rng.uniform(1.45, 1.8)
    proposed = [int(900 * 0.62**k) + rng.randrange(9) for k in range(5)]
    line = {
        "step": step, "reward": 0.52 + 0.012 * step + rng.uniform(-0.03, 0.03), "num_samples": 64,
        "mean_gen_tokens_per_sample": rng.uniform(65, 80), "max_gen_tokens_per_sample": rng.randrange(250, 320),
        "num_tokens": 4590, "rollout_s": rollout_s, "plain_estimate_s": rollout_s * speedup, "speedup_estimate": speedup,
        "generation_s": rollout_s, "logprob_s": 1.2, "train_s": 3.3, "refit_s": 0.1, "verify_s": 0.3,
        "step_s": rollout_s + 5.0, "engine_steps": rng.randrange(160, 200), "request_steps": 2700,
        "acceptance_length": rng.uniform(1.6, 1.8),
        "acceptance": {
            "suffix": {"proposed": proposed, "accepted": [int(p * 0.7 * 0.95**k) for k, p in enumerate(proposed)]},
            "ngram": {"proposed": [210, 90, 31], "accepted": [80, 30, 9]},
        },
        "draft_tokens_per_request_step": 0.5, "steps_with_drafts": 0.7, "host_share": 0.011,
        "logprob_gap": rng.uniform(0.8e-7, 1.5e-7), "logprob_gap_max": rng.uniform(1e-6, 4e-6),
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
    about = {
        "records": FORMAT, "command": "specrollout-lab run 'a<b>.yaml'", "commit": "0123abc", "started": "2025-01-01T00:00:00",
        "versions": {"vllm": "0.32.0", "torch": "2.13.0"}, "block": {"logprob_gap_alarm": 0.02},
    }  # fmt: skip
    (run_dir / "run.json").write_text(json.dumps(about))
    if summary:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


class Page(HTMLParser):
    """Text and attributes of a page; asserts that every element which must be closed is, in order."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
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

    @property
    def charts(self) -> list[str]:
        """Titles of the charts, in order."""
        return [value for name, value in self.attributes if name == "aria-label"]
