# SPDX-License-Identifier: Apache-2.0
"""The results of a run, made from its finished steps: `summary.json`, `report.html` and `picture.png`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.model_folder import read_object
from nemo_specrollout.local.run_directory import PAGES, SUMMARY
from nemo_specrollout.local.run_report import write_report
from nemo_specrollout.reports.charts import run_picture
from nemo_specrollout.reports.head_panels import head_summary
from nemo_specrollout.reports.records import naming_damage, overall_speedup, read_lines, reward_window, series
from nemo_specrollout.reports.tail_panels import tail_summary

_RECORDS = "metrics.jsonl, trace.jsonl or timeline.jsonl"


def write_results(run_dir: Path, wall_s: float | None, completed: bool) -> dict[str, Any]:
    """Writes all three; returns the summary. `wall_s`: seconds of the command, None where they are not known.

    Old pages are removed before the summary is written, so that all three are of the same steps where all are there.
    Raises OSError, ConfigError for records that are damaged.
    """
    with naming_damage(run_dir, _RECORDS):
        summary = summary_of(read_lines(run_dir / "metrics.jsonl"), wall_s, completed)
    for name in PAGES:
        (run_dir / name).unlink(missing_ok=True)
    write_atomically(run_dir / SUMMARY, json.dumps(summary, indent=1))
    write_pages(run_dir)
    return summary


def results_are_of(run_dir: Path, num_steps: int) -> bool:
    """Returns whether summary, report and picture exist and describe a run that completed `num_steps` steps."""
    try:
        summary = read_object(run_dir / SUMMARY)
    except ValueError:
        return False
    is_whole = summary.get("completed") is True and summary.get("steps") == num_steps
    return is_whole and all((run_dir / name).is_file() for name in PAGES)


def write_pages(run_dir: Path) -> tuple[Path, Path]:
    """Writes report and picture; their paths. Raises ConfigError as above, and where `run_dir` is no folder."""
    picture = run_dir / "picture.png"
    with naming_damage(run_dir, _RECORDS):
        report = write_report(run_dir)
        run_picture(run_dir, picture)
    return report, picture


def summary_of(metrics: Sequence[Mapping[str, Any]], wall_s: float | None, completed: bool) -> dict[str, Any]:
    """The content of `summary.json`, from the lines of `metrics.jsonl`; docs/reference/metrics.md names every key."""
    summary: dict[str, Any] = {"steps": len(metrics), "wall_s": wall_s, "completed": completed}
    if not metrics:
        return summary
    window = reward_window(len(metrics))
    rewards = series(metrics, "reward")
    return summary | {
        "rollout_speedup_vs_plain_estimate": _known(overall_speedup(metrics)),
        "tokens_checked": _total(metrics, "tokens_checked"),
        "tokens_equal": _total(metrics, "tokens_equal"),
        "reward_first": _known(rewards[:window].mean()),
        "reward_last": _known(rewards[-window:].mean()),
        "reward_averaged_over_steps": window,
        "acceptance_length": _total(metrics, "num_tokens") / max(_total(metrics, "request_steps"), 1),
        "alarms": sum(len(m.get("alarms") or ()) for m in metrics),
        "deaths": _total(metrics, "deaths"),
        **head_summary(metrics),
        **tail_summary(metrics),
    }


def _total(metrics: Sequence[Mapping[str, Any]], key: str) -> int:
    """The sum over the steps that have it."""
    return int(np.nansum(series(metrics, key)))


def _known(value: float) -> float | None:
    """None for NaN, which JSON does not have."""
    return float(value) if math.isfinite(value) else None
