# SPDX-License-Identifier: Apache-2.0
"""What a run recorded, as numbers: the readers that charts and report share.

A step is one line of `metrics.jsonl`, a trace one line of `trace.jsonl`. A number that is missing, null or not finite
is NaN, so that a half-written run can still be shown.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.config.model_folder import read_object
from nemo_specrollout.config.strict import ConfigError

Record = Mapping[str, Any]
_DRAFTS = ("drafted_", "accepted_")
# Shorter gaps between the steps of an engine are none: its clock is read a little apart.
SHORTEST_IDLE_S = 0.002


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, one per step, in order; a later record of a step replaces an earlier one.

    A missing file has none. A torn line, which a killed run leaves behind, is skipped.
    """
    records: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records[record["step"]] = record
    return [records[step] for step in sorted(records)]


def read_object_or_nothing(path: Path) -> Record:
    """The object in a JSON file; an empty one if the file is missing or damaged."""
    try:
        return read_object(path)
    except ValueError:
        return {}


@contextmanager
def naming_damage(folder: Path, names: str) -> Iterator[None]:
    """Turns what a changed byte in the records leads to into a ConfigError; `names` are the files read within."""
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{folder}: a line of {names} is damaged, and there is no report of it "
            f"({type(error).__name__}: {error}); remove the line, or bring the file back from a copy"
        ) from error


def number(record: Record, key: str) -> float:
    """The number at a dotted `key`, NaN where there is none."""
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def series(records: Sequence[Record], key: str) -> np.ndarray:
    """`number` of every record, float64."""
    return np.array([number(r, key) for r in records], float)


def reward_window(num_steps: int) -> int:
    """Steps over which rewards are averaged, a fifth of the run: problems differ, so single steps say little."""
    return max(1, num_steps // 5)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and the `window - 1` before it; NaN for the first `window - 1` and wherever one is missing."""
    means = np.full(len(values), math.nan)
    if len(values) >= window:
        means[window - 1 :] = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return means


def speedups(steps: Sequence[Record]) -> np.ndarray:
    """Plain-estimate seconds over measured seconds of each step, NaN where either is missing."""
    measured = series(steps, "rollout_s")
    return series(steps, "plain_estimate_s") / np.where(measured > 0, measured, math.nan)


def overall_speedup(steps: Sequence[Record]) -> float:
    """Plain-estimate seconds over measured seconds, of the steps that have both; NaN where none has."""
    both = np.isfinite(speedups(steps))
    plain, measured = series(steps, "plain_estimate_s")[both].sum(), series(steps, "rollout_s")[both].sum()
    return float(plain / measured) if measured > 0 else math.nan


def acceptance_totals(steps: Sequence[Record]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Draft tokens (proposed, accepted) by position, int64, summed over steps, of the drafters that proposed any."""
    totals: dict[str, np.ndarray] = {}
    for step in steps:
        for name, counts in (step.get("acceptance") or {}).items():
            pair = np.array([counts["proposed"], counts["accepted"]], np.int64)
            old = totals.get(name, np.zeros((2, 0), np.int64))
            width = max(old.shape[1], pair.shape[1])
            totals[name] = sum(np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in (old, pair))  # type: ignore[assignment]
    return {n: (t[0][t[0] > 0], t[1][t[0] > 0]) for n, t in totals.items() if t[0].any()}


def whole_trace(trace: Record) -> Record:
    """The trace of several workers as one: at each moment at which a step of any samples, what all have under way. That of one
    engine is itself."""
    workers = [w for w in trace.get("workers", ()) if can_drain(w)]
    if not workers:
        return trace
    names = dict.fromkeys(n for w in workers for n in w["columns"] if n == "num_requests" or n.startswith(_DRAFTS))
    spans = [_step_spans(w) for w in workers]
    edges = np.unique(np.concatenate([edge for span in spans for edge in span]))
    at_s = edges[np.isfinite(edges)]
    sums = [sum(_under_way(w, *span, name, at_s) for w, span in zip(workers, spans, strict=True)) for name in names]
    rows = np.stack([at_s, *sums], 1).tolist()
    several = {"num_workers": len(workers)} if len(workers) > 1 else {}
    return {"step": trace.get("step"), "columns": ["time_s", *names], "rows": rows, **several}


def _step_spans(trace: Record) -> tuple[np.ndarray, np.ndarray]:
    """From when to when each engine step is shown: until it samples, and since the one before did, or since it began if the
    engine was idle between. When the first began is not known."""
    sampled = column(trace, "time_s")
    ends = sampled + sum(column(trace, n) for n in ("host_s", "draft_s") if n in trace["columns"])
    begins = ends[1:] - column(trace, "seconds")[1:]
    was_idle = begins - ends[:-1] > SHORTEST_IDLE_S
    return np.append(-np.inf, np.where(was_idle, begins, sampled[:-1])), sampled


def _under_way(trace: Record, starts: np.ndarray, ends: np.ndarray, name: str, at_s: np.ndarray) -> np.ndarray:
    """The column of the step that is under way at each moment, 0 where none is; float64."""
    if name not in trace["columns"]:
        return np.zeros(len(at_s))
    step = np.minimum(np.searchsorted(ends, at_s), len(ends) - 1)
    return np.where((starts[step] < at_s) & (at_s <= ends[step]), column(trace, name)[step], 0.0)


def can_drain(trace: Record) -> bool:
    return len(trace.get("rows", ())) > 1 and {"time_s", "num_requests"} <= set(trace.get("columns", ()))


def seconds_since_start(trace: Record) -> np.ndarray:
    time_s = column(trace, "time_s")
    return time_s - time_s[0]


def drafts_by_name(trace: Record) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Draft tokens (drafted, accepted) of each engine step, by drafter; drafters without any are left out."""
    names = [c.removeprefix("drafted_") for c in trace["columns"] if c.startswith("drafted_")]
    found = {n: (column(trace, f"drafted_{n}"), column(trace, f"accepted_{n}")) for n in names}
    return {n: pair for n, pair in found.items() if pair[0].any()}


def column(trace: Record, name: str) -> np.ndarray:
    i = trace["columns"].index(name)
    return np.array([row[i] for row in trace["rows"]], float)
