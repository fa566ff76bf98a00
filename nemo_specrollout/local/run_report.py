# SPDX-License-Identifier: Apache-2.0
"""`report.html` of a run: one file without scripts or outside resources, made from the records in the run directory."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports import charts
from nemo_specrollout.reports.page import (
    NONE,
    alarm_list,
    card,
    cards,
    chart,
    facts,
    folded,
    head_section,
    in_digits,
    page,
    pair,
    table,
)
from nemo_specrollout.reports.panels import head_summary, refreshes
from nemo_specrollout.reports.records import Record, number, overall_speedup, read_lines, read_object_or_nothing, series
from nemo_specrollout.reports.tail_panels import tail_summary

ROLLOUT_COLUMNS = {
    "step": ("step", "d"),
    "tokens": ("num_tokens", ",d"),
    "length<br>mean": ("response_length.mean", ".1f"),
    "<br>max": ("response_length.max", "d"),
    "rollout<br>s": ("rollout_s", ".2f"),
    "plain<br>est. s": ("plain_estimate_s", ".2f"),
    "speedup<br>x": ("rollout_speedup", ".2f"),
    "engine<br>steps": ("target_steps", ",d"),
    "tokens a<br>step": ("acceptance_length", ".2f"),
    "draft<br>tokens": ("num_draft_tokens", ",d"),
    "steps with<br>drafts": ("share_of_steps_with_drafts", ".0%"),
    "our host<br>time": ("host_share", ".1%"),
    "tokens<br>checked": ("tokens_checked", ",d"),
    "<br>equal": ("tokens_equal", ",d"),
}
"""Columns of the table of rollouts: heading (HTML) to key of the step and format."""
TAIL_COLUMNS = {
    "step": ("step", "d"),
    "rollout<br>s": ("rollout_s", ".2f"),
    "saved<br>est. s": ("tail.saved_s", "+.2f"),
    "workers<br>idle": ("tail.idle_share", ".0%"),
    "moves": ("tail.moves", "d"),
    "races": ("tail.races", "d"),
    "won by<br>the racer": ("tail.won_by_racer", "d"),
    "workers<br>died": ("tail.deaths", "d"),
    "attempts that<br>diverged": ("tail.diverged", "d"),
}
"""Columns of the table of moves and races."""
TRAINING_COLUMNS = {
    "step": ("step", "d"),
    "reward": ("reward", ".3f"),
    "loss": ("loss", ".4f"),
    "KL": ("approx_kl", ".4f"),
    "entropy": ("approx_entropy", ".3f"),
    "gradient<br>norm": ("grad_norm", ".2f"),
    "learning<br>rate": ("lr", ".1e"),
    "log-prob gap<br>mean": ("logprob_gap.mean", ".1e"),
    "<br>max": ("logprob_gap.max", ".1e"),
    "log-prob<br>s": ("logprob_s", ".2f"),
    "train<br>s": ("train_s", ".2f"),
    "refit<br>s": ("refit_s", ".2f"),
    "verify<br>s": ("verify_s", ".2f"),
}
"""Columns of the training table."""

HOW_TO_READ = charts.HOW_TO_READ | {
    "Draft head": charts.HOW_TO_READ["Draft head"] + " On the right: the share of the run's time spent on refreshes.",
    "Rollout time": (
        "Blue is the measured time. Grey is what the same tokens would have taken one at a time, by the step times that "
        "the engine measured in this run. The area between them is the time saved; above 1x is faster."
    ),
    "How a batch drains": (
        "Short responses finish first, and few requests are left for much of the time. Drafts pay there, because an "
        "engine step has room for them. Pale tokens were rejected."
    ),
    "The tail": (
        "The rollout in which moves and races saved most, by estimate. Above: the requests of each worker. Below: a bar "
        "for each attempt at a request, with the worker's number and colour and a mark at its end. Bars side by side are "
        "a race: all racers make the same tokens, so the first to end has made the response. The solid line is the end of "
        "the rollout. The dashed line is its estimated end without moves and races."
    ),
    "Where a step's time goes": (
        "Each bar is one step, and the labels are means. The black mark is the estimated end of the rollout part without "
        "speculation."
    ),
}
"""Explanation of each chart, by its title."""


@dataclass(frozen=True)
class RunRecords:
    """Records of a run directory. Every part may be empty, because a run may be interrupted anywhere."""

    steps: Sequence[Record]
    """Lines of `metrics.jsonl`."""
    traces: Sequence[Record]
    """Lines of `trace.jsonl`."""
    timelines: Sequence[Record]
    """Lines of `timeline.jsonl`."""
    summary: Record
    """Content of `summary.json`."""
    about: Record
    """Content of `run.json`."""
    config: str
    """Text of `config.yaml`."""

    @classmethod
    def read(cls, run_dir: Path) -> "RunRecords":
        """Reads `run_dir`. Raises ConfigError if it is not a folder."""
        if not run_dir.is_dir():
            raise ConfigError(f"run directory {str(run_dir)!r} is not a folder: name the `logger.log_dir` of a run")
        config = run_dir / "config.yaml"
        return cls(
            steps=read_lines(run_dir / "metrics.jsonl"),
            traces=read_lines(run_dir / "trace.jsonl"),
            timelines=read_lines(run_dir / "timeline.jsonl"),
            summary=read_object_or_nothing(run_dir / "summary.json"),
            about=read_object_or_nothing(run_dir / "run.json"),
            config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        )

    @property
    def alarms(self) -> list[tuple[Any, str]]:
        """(step, text) of every alarm."""
        return [(s["step"], str(alarm)) for s in self.steps for alarm in s.get("alarms") or ()]

    def figure(self, key: str, from_steps: float) -> float:
        """Returns a number of the summary, or `from_steps` if there is no summary yet; NaN if both are unknown."""
        value = number(self.summary, key)
        return value if math.isfinite(value) else from_steps


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into `run_dir` and returns its path. The write is atomic."""
    target = run_dir / "report.html"
    write_atomically(target, _page(RunRecords.read(run_dir), run_dir.resolve().name))
    return target


def _page(run: RunRecords, name: str) -> str:
    parts = (
        [cards(_card_list(run)), alarm_list(run.alarms), _charts(run), _tail(run), _head(run), *_tables(run)]
        if run.steps
        else []
    )
    return page(f"Run {name}", _status(run), [*parts, _config(run), _about(run)])


def _status(run: RunRecords) -> str:
    if not run.steps:
        return "no finished step yet"
    steps = f"{len(run.steps)} finished step" + "s" * (len(run.steps) > 1)
    wall_s = number(run.summary, "wall_s")
    state = "completed" if run.summary.get("completed") else "not completed: interrupted, or still running"
    return f"{steps}, {state}" + (f", {wall_s:.0f} s in all" if math.isfinite(wall_s) else "")


def _card_list(run: RunRecords) -> Iterable[str]:
    speedup = run.figure("rollout_speedup_vs_plain_estimate", overall_speedup(run.steps))
    yield card("Rollout speedup", in_digits(speedup, ".2f", "x"), "over the plain estimate", "good" * (speedup > 1))
    yield _equality_card(run)
    rewards = series(run.steps, "reward")
    first, last = run.figure("reward_first", rewards[0]), run.figure("reward_last", rewards[-1])
    change = f"{in_digits(first, '.2f')} \N{RIGHTWARDS ARROW} {in_digits(last, '.2f')}"
    yield card("Reward", change, "means of the first and last fifth")
    length = run.figure("acceptance_length", _acceptance_length(run.steps))
    yield card("Acceptance length", in_digits(length, ".2f"), "tokens a request gains in an engine step; 1 is plain")
    if head := head_summary(run.steps):
        made = f"{head['heads_published']} of {head['refreshes']}"
        yield card("Draft heads", made, f"refreshes published; {head['refresh_share']:.1%} of the run's time")
    if tail := tail_summary(run.steps):
        won = f"races: {tail['tail_races']}, won by the racer: {tail['tail_won_by_racer']}"
        saved_s = math.nan if tail["tail_saved_s"] is None else tail["tail_saved_s"]
        yield card(
            "Saved in the tail", in_digits(saved_s, "+.1f", " s"), f"estimate; moves: {tail['tail_moves']}, {won}"
        )
    note, kind = ("listed below", "bad") if run.alarms else ("none raised", "")
    yield card("Alarms", str(len(run.alarms)), note, kind)


def _equality_card(run: RunRecords) -> str:
    checked = run.figure("tokens_checked", float(np.nansum(series(run.steps, "tokens_checked"))))
    equal = run.figure("tokens_equal", float(np.nansum(series(run.steps, "tokens_equal"))))
    if checked == 0:
        return card("Tokens equal", NONE, "none was checked against a plain rollout")
    if equal < checked:
        return card("Tokens equal", f"{equal / checked:.3%}", f"{equal:,.0f} of {checked:,.0f} checked", "bad")
    return card("Tokens equal", f"{equal:,.0f}", f"of {checked:,.0f} checked against a plain rollout", "good")


def _acceptance_length(steps: Sequence[Record]) -> float:
    """Returns the run's tokens over its request steps. The latter follow from each step's acceptance length."""
    tokens, lengths = series(steps, "num_tokens"), series(steps, "acceptance_length")
    known = np.isfinite(tokens) & (lengths > 0)
    return float(tokens[known].sum() / (tokens[known] / lengths[known]).sum()) if tokens[known].sum() else math.nan


def _charts(run: RunRecords) -> str:
    speedup, time = charts.speedup_chart(run.steps), charts.time_chart(run.steps)
    drain = charts.drain_chart(run.traces[-1]) if run.traces else ""
    acceptance, reward, gap = (c(run.steps) for c in (charts.acceptance_chart, charts.reward_chart, charts.gap_chart))
    return "\n".join(
        (
            _chart("Rollout time", speedup),
            _chart("How a batch drains", drain),
            pair(_chart("Where a step's time goes", time), _chart("Acceptance by position", acceptance)),
            pair(_chart("Reward", reward), _chart("Engine against trainer", gap)),
        )
    )


def _tail(run: RunRecords) -> str:
    """Returns the chart of engines and requests; an empty string for a run with one engine."""
    svg = charts.tail_chart(run.timelines)
    return _chart("The tail", svg) if svg else ""


def _head(run: RunRecords) -> str:
    """Returns the draft head's chart and the decision of each refresh; an empty string for a run without refreshes."""
    svg = charts.head_chart(run.steps)
    last = str(run.steps[-1].get("draft_refresh", {}).get("decision", NONE))
    return head_section(_chart("Draft head", svg), refreshes(run.steps), last) if svg else ""


def _chart(title: str, svg: str) -> str:
    return chart(title, svg, HOW_TO_READ[title])


def _tables(run: RunRecords) -> Iterable[str]:
    yield table("Rollouts, step by step", ROLLOUT_COLUMNS, run.steps, _is_bad)
    if tails := [s for s in run.steps if "tail" in s]:
        yield table("Tails, step by step", TAIL_COLUMNS, tails)
    yield table("Training, step by step", TRAINING_COLUMNS, run.steps)


def _is_bad(step: Record, key: str) -> bool:
    return key == "tokens_equal" and number(step, key) < number(step, "tokens_checked")


def _config(run: RunRecords) -> str:
    return folded("Resolved config", run.config, "config.yaml is missing")


def _about(run: RunRecords) -> str:
    versions = run.about.get("versions")
    known = {key: run.about[key] for key in ("command", "started", "commit") if run.about.get(key)}
    known |= dict(sorted(versions.items())) if isinstance(versions, Mapping) else {}
    return facts("How this run was made", known, "run.json is missing")
