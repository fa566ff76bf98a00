# SPDX-License-Identifier: Apache-2.0
"""`report.html` of a run: one file without script or outside resource, made from the run directory's records alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.model_folder import read_object
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.local import charts
from nemo_specrollout.local.head_panels import head_summary, refreshes
from nemo_specrollout.local.records import Record, number, overall_speedup, read_lines, series
from nemo_specrollout.local.report_page import CSS, HOW_TO_READ, PAGE, ROLLOUT_COLUMNS, TAIL_COLUMNS, TRAINING_COLUMNS
from nemo_specrollout.local.tail_panels import tail_summary

NONE, BAD = "\N{EN DASH}", ' class="bad"'


@dataclass(frozen=True)
class RunRecords:
    """What a run directory holds. Every part may be empty: the run may have been interrupted anywhere."""

    steps: Sequence[Record]
    traces: Sequence[Record]
    timelines: Sequence[Record]
    summary: Record
    about: Record
    config: str

    @classmethod
    def read(cls, run_dir: Path) -> "RunRecords":
        """Read `run_dir`. Raises ConfigError if it is not a folder."""
        if not run_dir.is_dir():
            raise ConfigError(f"run directory {str(run_dir)!r} is not a folder: name the `logger.log_dir` of a run")
        config = run_dir / "config.yaml"
        return cls(
            steps=read_lines(run_dir / "metrics.jsonl"),
            traces=read_lines(run_dir / "trace.jsonl"),
            timelines=read_lines(run_dir / "timeline.jsonl"),
            summary=_read_object(run_dir / "summary.json"),
            about=_read_object(run_dir / "run.json"),
            config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        )

    @property
    def alarms(self) -> list[tuple[Any, str]]:
        """(step, text) of every alarm."""
        return [(s["step"], str(alarm)) for s in self.steps for alarm in s.get("alarms") or ()]

    def figure(self, key: str, from_steps: float) -> float:
        """The summary's `key`; a run without a summary gets what its finished steps say. NaN where neither knows."""
        value = number(self.summary, key)
        return value if math.isfinite(value) else from_steps


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into `run_dir` and return its path; a reader never sees half a file."""
    target = run_dir / "report.html"
    page = _page(RunRecords.read(run_dir), run_dir.resolve().name)
    write_atomically(target, page)
    return target


def _read_object(path: Path) -> Record:
    try:
        return read_object(path)
    except ValueError:
        return {}


def _page(run: RunRecords, name: str) -> str:
    parts = [_cards(run), _alarms(run), _charts(run), _tail(run), _head(run), *_tables(run)] if run.steps else []
    body = "\n".join([*parts, _config(run), _about(run)])
    return PAGE.substitute(title=escape(f"Run {name}"), css=CSS, status=escape(_status(run)), body=body)


def _status(run: RunRecords) -> str:
    if not run.steps:
        return "no finished step yet"
    steps = f"{len(run.steps)} finished step" + "s" * (len(run.steps) > 1)
    wall_s = number(run.summary, "wall_s")
    state = "completed" if run.summary.get("completed") else "not completed: interrupted, or still running"
    return f"{steps}, {state}" + (f", {wall_s:.0f} s in all" if math.isfinite(wall_s) else "")


def _cards(run: RunRecords) -> str:
    return f'<div class="cards">{"".join(_card_list(run))}</div>'


def _card_list(run: RunRecords) -> Iterable[str]:
    speedup = run.figure("rollout_speedup_vs_plain_estimate", overall_speedup(run.steps))
    yield _card("Rollout speedup", _format(speedup, ".2f", "x"), "over the plain estimate", "good" * (speedup > 1))
    yield _equality_card(run)
    rewards = series(run.steps, "reward")
    first, last = run.figure("reward_first", rewards[0]), run.figure("reward_last", rewards[-1])
    change = f"{_format(first, '.2f')} \N{RIGHTWARDS ARROW} {_format(last, '.2f')}"
    yield _card("Reward", change, "means of the first and last fifth")
    length = run.figure("acceptance_length", _acceptance_length(run.steps))
    yield _card("Acceptance length", _format(length, ".2f"), "tokens a request gains in an engine step; 1 is plain")
    if head := head_summary(run.steps):
        made = f"{head['heads_published']} of {head['refreshes']}"
        yield _card("Draft heads", made, f"refreshes published; {head['refresh_share']:.1%} of the run's time")
    if tail := tail_summary(run.steps):
        won = f"races: {tail['tail_races']}, won by the racer: {tail['tail_won_by_racer']}"
        saved_s = math.nan if tail["tail_saved_s"] is None else tail["tail_saved_s"]
        yield _card(
            "Saved in the tail", _format(saved_s, "+.1f", " s"), f"estimate; moves: {tail['tail_moves']}, {won}"
        )
    note, kind = ("listed below", "bad") if run.alarms else ("none raised", "")
    yield _card("Alarms", str(len(run.alarms)), note, kind)


def _card(title: str, value: str, note: str, kind: str = "") -> str:
    title, value, note = escape(title), escape(value), escape(note)
    return f'<div class="card {kind}"><p>{title}</p><p class="value">{value}</p><p>{note}</p></div>'


def _equality_card(run: RunRecords) -> str:
    checked = run.figure("tokens_checked", float(np.nansum(series(run.steps, "tokens_checked"))))
    equal = run.figure("tokens_equal", float(np.nansum(series(run.steps, "tokens_equal"))))
    if checked == 0:
        return _card("Tokens equal", NONE, "none was checked against a plain rollout")
    if equal < checked:
        return _card("Tokens equal", f"{equal / checked:.3%}", f"{equal:,.0f} of {checked:,.0f} checked", "bad")
    return _card("Tokens equal", f"{equal:,.0f}", f"of {checked:,.0f} checked against a plain rollout", "good")


def _acceptance_length(steps: Sequence[Record]) -> float:
    """Tokens over request steps, summed over the run's steps; a step's request steps follow from its own ratio."""
    tokens, lengths = series(steps, "num_tokens"), series(steps, "acceptance_length")
    known = np.isfinite(tokens) & (lengths > 0)
    return float(tokens[known].sum() / (tokens[known] / lengths[known]).sum()) if tokens[known].sum() else math.nan


def _alarms(run: RunRecords) -> str:
    items = "".join(f"<li>step {escape(str(step))}: {escape(text)}</li>" for step, text in run.alarms)
    return f'<section class="alarms"><h2>Alarms</h2><ul>{items}</ul></section>' if items else ""


def _charts(run: RunRecords) -> str:
    speedup, time = charts.speedup_chart(run.steps), charts.time_chart(run.steps)
    drain = charts.drain_chart(run.traces[-1]) if run.traces else ""
    acceptance, reward, gap = (c(run.steps) for c in (charts.acceptance_chart, charts.reward_chart, charts.gap_chart))
    return "\n".join(
        (
            _chart("Rollout time", speedup),
            _chart("How a batch drains", drain),
            _pair(_chart("Where a step's time goes", time), _chart("Acceptance by position", acceptance)),
            _pair(_chart("Reward", reward), _chart("Engine against trainer", gap)),
        )
    )


def _tail(run: RunRecords) -> str:
    """The chart of workers and requests; nothing for a run with one worker."""
    svg = charts.tail_chart(run.timelines)
    return _chart("The tail", svg) if svg else ""


def _head(run: RunRecords) -> str:
    """The draft head's chart, and what was decided at each refresh; nothing for a run without."""
    svg = charts.head_chart(run.steps)
    if not svg:
        return ""
    items = "".join(
        f"<li>step {escape(str(step))}: {escape(str(r.get('decision', '')))}; gate: {escape(str(r.get('gate', NONE)))}</li>"
        for step, r in refreshes(run.steps)
    )
    last = escape(str(run.steps[-1].get("draft_refresh", {}).get("decision", NONE)))
    said = f'<details><summary>Refreshes</summary><ul class="said">{items}</ul></details>' if items else ""
    return (
        f"{_chart('Draft head', svg).removesuffix('</section>')}{said}<p>Last word of the trigger: {last}</p></section>"
    )


def _pair(left: str, right: str) -> str:
    return f'<div class="pair">{left}{right}</div>'


def _chart(title: str, svg: str) -> str:
    label = escape(title)
    drawing = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    how_to_read = escape(HOW_TO_READ[title])
    return f"<section><h2>{label}</h2><p>{how_to_read}</p>{drawing or '<p><em>not recorded</em></p>'}</section>"


def _tables(run: RunRecords) -> Iterable[str]:
    yield _table("Rollouts, step by step", ROLLOUT_COLUMNS, run.steps)
    if tails := [s for s in run.steps if "tail" in s]:
        yield _table("Tails, step by step", TAIL_COLUMNS, tails)
    yield _table("Training, step by step", TRAINING_COLUMNS, run.steps)


def _table(title: str, columns: Mapping[str, tuple[str, str]], steps: Sequence[Record]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in columns)
    rows = "".join(f"<tr>{''.join(_cell(step, *column) for column in columns.values())}</tr>" for step in steps)
    return (
        f'<section><h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _cell(step: Record, key: str, spec: str) -> str:
    bad = key == "tokens_equal" and number(step, key) < number(step, "tokens_checked")
    return f"<td{BAD if bad else ''}>{_format(number(step, key), spec)}</td>"


def _format(value: float, spec: str, unit: str = "") -> str:
    if not math.isfinite(value):
        return NONE
    return format(int(value) if spec.endswith("d") else value, spec) + unit


def _config(run: RunRecords) -> str:
    text = f"<pre>{escape(run.config)}</pre>" if run.config else "<p>config.yaml is missing</p>"
    return f"<section><details><summary>Resolved config</summary>{text}</details></section>"


def _about(run: RunRecords) -> str:
    versions = run.about.get("versions")
    facts = {key: run.about[key] for key in ("command", "started", "commit") if run.about.get(key)}
    facts |= dict(sorted(versions.items())) if isinstance(versions, Mapping) else {}
    items = "".join(f"<dt>{escape(str(k))}</dt><dd><code>{escape(str(v))}</code></dd>" for k, v in facts.items())
    return f"<section><h2>How this run was made</h2><dl>{items or '<dt>run.json is missing</dt>'}</dl></section>"
