# SPDX-License-Identifier: Apache-2.0
"""Results of a run, made from the records of its finished steps: `summary.json`, `report.html` and `picture.png`.

The report is one file without scripts or outside resources.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.local.run_directory import PAGES, SUMMARY
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
from nemo_specrollout.reports.records import (
    Record,
    naming_damage,
    number,
    overall_speedup,
    read_lines,
    read_object_or_nothing,
    reward_window,
    series,
)
from nemo_specrollout.reports.tail_panels import tail_summary

COLUMNS = {
    "Rollouts, step by step": {
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
    },
    "Tails, step by step": {
        "step": ("step", "d"),
        "rollout<br>s": ("rollout_s", ".2f"),
        "saved<br>est. s": ("tail.saved_s", "+.2f"),
        "workers<br>idle": ("tail.idle_share", ".0%"),
        "moves": ("tail.moves", "d"),
        "races": ("tail.races", "d"),
        "won by<br>the racer": ("tail.won_by_racer", "d"),
        "workers<br>died": ("tail.deaths", "d"),
        "attempts that<br>diverged": ("tail.diverged", "d"),
    },
    "Training, step by step": {
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
    },
}
"""Tables: title -> columns, each a heading (HTML) with the key of the step and a format."""

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


def write_results(run_dir: Path, wall_s: float | None, completed: bool) -> dict[str, Any]:
    """Writes all three and returns the summary. `wall_s` is the command's seconds, None if unknown.

    The old pages are removed before the summary is written: if all three files are there, they describe the same steps.
    Raises OSError, and ConfigError if records are damaged.
    """
    with naming_damage(run_dir, "metrics.jsonl"):
        summary = summary_of(read_lines(run_dir / "metrics.jsonl"), wall_s, completed)
    for name in PAGES:
        (run_dir / name).unlink(missing_ok=True)
    write_atomically(run_dir / SUMMARY, json.dumps(summary, indent=1))
    write_pages(run_dir)
    return summary


def results_are_of(run_dir: Path, num_steps: int) -> bool:
    """Returns whether all three exist and describe a run that completed `num_steps` steps."""
    summary = read_object_or_nothing(run_dir / SUMMARY)
    is_whole = summary.get("completed") is True and summary.get("steps") == num_steps
    return is_whole and all((run_dir / name).is_file() for name in PAGES)


def summary_of(metrics: Sequence[Mapping[str, Any]], wall_s: float | None, completed: bool) -> dict[str, Any]:
    """Returns the content of `summary.json` from the lines of `metrics.jsonl`; docs/reference/metrics.md names every key."""
    summary: dict[str, Any] = {"steps": len(metrics), "wall_s": wall_s, "completed": completed}
    if not metrics:
        return summary
    window = reward_window(len(metrics))
    rewards = series(metrics, "reward")
    keys = ("tokens_checked", "tokens_equal", "num_tokens", "request_steps", "deaths")
    totals = {key: int(np.nansum(series(metrics, key))) for key in keys}
    return summary | {
        "rollout_speedup_vs_plain_estimate": _finite(overall_speedup(metrics)),
        "tokens_checked": totals["tokens_checked"],
        "tokens_equal": totals["tokens_equal"],
        "reward_first": _finite(rewards[:window].mean()),
        "reward_last": _finite(rewards[-window:].mean()),
        "reward_averaged_over_steps": window,
        "acceptance_length": totals["num_tokens"] / max(totals["request_steps"], 1),
        "alarms": sum(len(m.get("alarms") or ()) for m in metrics),
        "deaths": totals["deaths"],
        **head_summary(metrics),
        **tail_summary(metrics),
    }


def _finite(value: float) -> float | None:
    """Returns None for NaN, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def write_pages(run_dir: Path) -> tuple[Path, Path]:
    """Writes report and picture, each atomically, and returns their paths.

    Raises ConfigError if records are damaged or `run_dir` is not a folder.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"run directory {str(run_dir)!r} is not a folder: name the `logger.log_dir` of a run")
    report, picture = run_dir / "report.html", run_dir / "picture.png"
    with naming_damage(run_dir, "metrics.jsonl, trace.jsonl or timeline.jsonl"):
        write_atomically(report, _page(run_dir))
        charts.run_picture(run_dir, picture)
    return report, picture


def _page(run_dir: Path) -> str:
    """Returns the report. Every file may be missing, because a run may be interrupted anywhere."""
    steps, summary = read_lines(run_dir / "metrics.jsonl"), read_object_or_nothing(run_dir / SUMMARY)
    about, config = read_object_or_nothing(run_dir / "run.json"), run_dir / "config.yaml"
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    versions = about.get("versions")
    known = {key: about[key] for key in ("command", "started", "commit") if about.get(key)}
    known |= dict(sorted(versions.items())) if isinstance(versions, Mapping) else {}
    parts = [folded("Resolved config", text, "config.yaml is missing")]
    parts.append(facts("How this run was made", known, "run.json is missing"))
    if steps:
        alarms = [(s["step"], str(alarm)) for s in steps for alarm in s.get("alarms") or ()]
        measured = [cards(_cards(steps, summary, len(alarms))), alarm_list(alarms), *_charts(run_dir, steps)]
        parts = [*measured, *_tables(steps), *parts]
    return page(f"Run {run_dir.resolve().name}", _status(steps, summary), parts)


def _status(steps: Sequence[Record], summary: Record) -> str:
    if not steps:
        return "no finished step yet"
    finished = f"{len(steps)} finished step" + "s" * (len(steps) > 1)
    wall_s = number(summary, "wall_s")
    state = "completed" if summary.get("completed") else "not completed: interrupted, or still running"
    return f"{finished}, {state}" + (f", {wall_s:.0f} s in all" if math.isfinite(wall_s) else "")


def _cards(steps: Sequence[Record], summary: Record, num_alarms: int) -> Iterator[str]:
    summary = {**summary_of(steps, None, completed=False), **summary}  # an interrupted run may have no summary yet
    speedup, length = (number(summary, key) for key in ("rollout_speedup_vs_plain_estimate", "acceptance_length"))
    yield card("Rollout speedup", in_digits(speedup, ".2f", "x"), "over the plain estimate", "good" * (speedup > 1))
    yield _equality_card(number(summary, "tokens_checked"), number(summary, "tokens_equal"))
    first, last = number(summary, "reward_first"), number(summary, "reward_last")
    change = f"{in_digits(first, '.2f')} \N{RIGHTWARDS ARROW} {in_digits(last, '.2f')}"
    yield card("Reward", change, "means of the first and last fifth")
    yield card("Acceptance length", in_digits(length, ".2f"), "tokens a request gains in an engine step; 1 is plain")
    if head := head_summary(steps):
        made = f"{head['heads_published']} of {head['refreshes']}"
        yield card("Draft heads", made, f"refreshes published; {head['refresh_share']:.1%} of the run's time")
    if tail := tail_summary(steps):
        note = (
            f"estimate; moves: {tail['tail_moves']}, races: {tail['tail_races']}, "
            f"won by the racer: {tail['tail_won_by_racer']}"
        )
        saved_s = math.nan if tail["tail_saved_s"] is None else tail["tail_saved_s"]
        yield card("Saved in the tail", in_digits(saved_s, "+.1f", " s"), note)
    yield card("Alarms", str(num_alarms), *(("listed below", "bad") if num_alarms else ("none raised", "")))


def _equality_card(checked: float, equal: float) -> str:
    if checked == 0:
        return card("Tokens equal", NONE, "none was checked against a plain rollout")
    if equal < checked:
        return card("Tokens equal", f"{equal / checked:.3%}", f"{equal:,.0f} of {checked:,.0f} checked", "bad")
    return card("Tokens equal", f"{equal:,.0f}", f"of {checked:,.0f} checked against a plain rollout", "good")


def _charts(run_dir: Path, steps: Sequence[Record]) -> Iterator[str]:
    def section(title: str, svg: str) -> str:
        return chart(title, svg, HOW_TO_READ[title])

    traces = read_lines(run_dir / "trace.jsonl")
    yield section("Rollout time", charts.speedup_chart(steps))
    yield section("How a batch drains", charts.drain_chart(traces[-1]) if traces else "")
    yield pair(
        section("Where a step's time goes", charts.time_chart(steps)),
        section("Acceptance by position", charts.acceptance_chart(steps)),
    )
    yield pair(
        section("Reward", charts.reward_chart(steps)), section("Engine against trainer", charts.gap_chart(steps))
    )
    if tail := charts.tail_chart(read_lines(run_dir / "timeline.jsonl")):
        yield section("The tail", tail)
    if head := charts.head_chart(steps):
        last = str(steps[-1].get("draft_refresh", {}).get("decision", NONE))
        yield head_section(section("Draft head", head), refreshes(steps), last)


def _tables(steps: Sequence[Record]) -> Iterator[str]:
    for title, columns in COLUMNS.items():
        rows = [s for s in steps if "tail" in s] if title.startswith("Tails") else steps
        if rows:
            yield table(title, columns, rows, _is_bad)


def _is_bad(step: Record, key: str) -> bool:
    return key == "tokens_equal" and number(step, key) < number(step, "tokens_checked")
