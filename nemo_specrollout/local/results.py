# SPDX-License-Identifier: Apache-2.0
"""Results of a run, made from its finished steps: `summary.json`, `report.html` and `picture.png`."""

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
from nemo_specrollout.reports.panels import head_summary
from nemo_specrollout.reports.records import naming_damage, overall_speedup, read_lines, reward_window, series
from nemo_specrollout.reports.tail_panels import tail_summary

_RECORDS = "metrics.jsonl, trace.jsonl or timeline.jsonl"


def write_results(run_dir: Path, wall_s: float | None, completed: bool) -> dict[str, Any]:
    """Writes all three and returns the summary. `wall_s` is the command's seconds, None if unknown.

    The old pages are removed before the summary is written: if all three files are there, they describe the same steps.
    Raises OSError, and ConfigError if records are damaged.
    """
    with naming_damage(run_dir, _RECORDS):
        summary = summary_of(read_lines(run_dir / "metrics.jsonl"), wall_s, completed)
    for name in PAGES:
        (run_dir / name).unlink(missing_ok=True)
    write_atomically(run_dir / SUMMARY, json.dumps(summary, indent=1))
    write_pages(run_dir)
    return summary


def results_are_of(run_dir: Path, num_steps: int) -> bool:
    """Returns whether all three exist and describe a run that completed `num_steps` steps."""
    try:
        summary = read_object(run_dir / SUMMARY)
    except ValueError:
        return False
    is_whole = summary.get("completed") is True and summary.get("steps") == num_steps
    return is_whole and all((run_dir / name).is_file() for name in PAGES)


def write_pages(run_dir: Path) -> tuple[Path, Path]:
    """Writes report and picture, and returns their paths.

    Raises ConfigError if records are damaged or `run_dir` is not a folder.
    """
    picture = run_dir / "picture.png"
    with naming_damage(run_dir, _RECORDS):
        report = write_report(run_dir)
        run_picture(run_dir, picture)
    return report, picture


def summary_of(metrics: Sequence[Mapping[str, Any]], wall_s: float | None, completed: bool) -> dict[str, Any]:
    """Returns the content of `summary.json` from the lines of `metrics.jsonl`; docs/reference/metrics.md names every key."""
    summary: dict[str, Any] = {"steps": len(metrics), "wall_s": wall_s, "completed": completed}
    if not metrics:
        return summary
    window = reward_window(len(metrics))
    rewards = series(metrics, "reward")
    totals = {
        key: int(np.nansum(series(metrics, key)))
        for key in ("tokens_checked", "tokens_equal", "num_tokens", "request_steps", "deaths")
    }
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
