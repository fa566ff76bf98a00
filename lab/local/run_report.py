# SPDX-License-Identifier: Apache-2.0
"""Writes the results of a local run, which are its `summary.json`, `report.html` and `picture.png`."""

import json
from pathlib import Path
from typing import Any

from lab.local.rollout_charts import drain_chart, draw_drain, tail_chart
from lab.local.run_directory import PAGES
from lab.local.traces import can_drain, whole_trace
from nemo_specrollout.reports import report
from nemo_specrollout.reports.page import chart
from nemo_specrollout.reports.records import (
    SUMMARY,
    Run,
    naming_damage,
    read_lines,
    read_object_or_nothing,
    read_steps,
    summary_of,
)
from nemo_specrollout.storage.files import write_atomically

HOW_TO_READ = {
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
}
"""Explanation of each chart, by its title."""


def write_results(run_dir: Path, wall_s: float | None, completed: bool) -> dict[str, Any]:
    """Writes summary, report and picture of a run, and returns the summary.

    `wall_s` is the command's duration in seconds, or None if unknown. The old report and picture are removed before the
    summary is written. So if all three files exist, they describe the same steps. Raises OSError, and ConfigError if records
    are damaged.
    """
    with naming_damage(run_dir):
        figures = summary_of(read_steps(run_dir))
    summary = {**figures, "wall_s": wall_s, "completed": completed}
    for name in PAGES:
        (run_dir / name).unlink(missing_ok=True)
    write_atomically(run_dir / SUMMARY, json.dumps(summary, indent=1))
    write_pages(run_dir)
    return summary


def results_are_of(run_dir: Path, num_steps: int) -> bool:
    """Returns whether a run has summary, report and picture, and its summary says that it has completed `num_steps` steps."""
    summary = read_object_or_nothing(run_dir / SUMMARY)
    is_whole = summary.get("completed") is True and summary.get("steps") == num_steps
    return is_whole and all((run_dir / name).is_file() for name in PAGES)


def write_pages(run_dir: Path) -> tuple[Path, Path]:
    """Writes report and picture, each atomically, and returns their paths. Raises ConfigError and OSError."""
    return report.write_pages(run_dir, extras_of)


def extras_of(run: Run) -> report.Extras:
    """Returns what only local runs add to the report and to the picture.

    First come the charts for the report, as HTML. Then come the panels for the picture, each a function that draws together
    with its data.
    """
    trace_file, timeline_file = run.folder / "trace.jsonl", run.folder / "timeline.jsonl"
    with naming_damage(trace_file):
        traces = read_lines(trace_file)
        drain = drain_chart(traces[-1]) if traces else ""
        last = whole_trace(traces[-1]) if traces else {}
        panels = [(draw_drain, last)] if can_drain(last) else []
    with naming_damage(timeline_file):
        tail = tail_chart(read_lines(timeline_file))
    drawn = {"How a batch drains": drain, "The tail": tail}
    return [chart(title, svg, HOW_TO_READ[title]) for title, svg in drawn.items() if svg], panels
