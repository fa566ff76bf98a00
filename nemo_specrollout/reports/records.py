# SPDX-License-Identifier: Apache-2.0
"""Readers of a run's records, which charts and reports share.

A step is one line of `metrics.jsonl`, and a trace is one line of `trace.jsonl`. A number that is missing, null or not finite
becomes NaN, so that a half-written run can still be shown.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nemo_specrollout.config.model_folder import read_object
from nemo_specrollout.config.strict import ConfigError

Record = Mapping[str, Any]
_DRAFTS = ("drafted_", "accepted_")
SHORTEST_IDLE_S = 0.002
"""Seconds between two steps of an engine from which it counts as idle. Shorter gaps come from reading the clock."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a JSON-lines file in the order of their steps. The last record of a step counts.

    A missing file has no records. Torn lines, which a killed run leaves behind, are skipped.
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


def check_lines(path: Path) -> None:
    """Raises ConfigError if a file with text has no record. A torn line alone is what a killed run leaves behind."""
    if not path.is_file() or read_lines(path):
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if any(line.strip() and not _is_torn(line) for line in lines):
        raise ConfigError(
            f"RUN_DIR: {path} holds no record of a step; bring the file back from a copy, or name another run"
        )


def _is_torn(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith("{")
    return False


def read_object_or_nothing(path: Path) -> Record:
    """Returns the object in a JSON file, or an empty one if the file is missing or damaged."""
    try:
        return read_object(path)
    except ValueError:
        return {}


@contextmanager
def naming_damage(folder: Path, names: str) -> Iterator[None]:
    """Turns errors from damaged records into a ConfigError. `names` lists the files that are read inside the context."""
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
    """Returns the number at a dotted `key`, or NaN."""
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def series(records: Sequence[Record], key: str) -> np.ndarray:
    """Returns `number` of every record, float64."""
    return np.array([number(r, key) for r in records], float)


def reward_window(num_steps: int) -> int:
    """Returns the steps over which rewards are averaged, a fifth of the run. Single steps have different problems."""
    return max(1, num_steps // 5)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of each value and the `window - 1` values before it, or NaN if one of them is missing."""
    means = np.full(len(values), math.nan)
    if len(values) >= window:
        means[window - 1 :] = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return means


def speedups(steps: Sequence[Record]) -> np.ndarray:
    """Returns plain-estimate seconds over measured seconds of each step, or NaN if either is missing."""
    measured = series(steps, "rollout_s")
    return series(steps, "plain_estimate_s") / np.where(measured > 0, measured, math.nan)


def overall_speedup(steps: Sequence[Record]) -> float:
    """Returns plain-estimate seconds over measured seconds, summed over the steps that have both, or NaN."""
    both = np.isfinite(speedups(steps))
    plain, measured = series(steps, "plain_estimate_s")[both].sum(), series(steps, "rollout_s")[both].sum()
    return float(plain / measured) if measured > 0 else math.nan


def acceptance_totals(steps: Sequence[Record]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns proposed and accepted draft tokens by position, int64, summed over steps, for each drafter that proposed any."""
    totals: dict[str, np.ndarray] = {}
    for step in steps:
        for name, counts in (step.get("acceptance") or {}).items():
            pair = np.array([counts["proposed"], counts["accepted"]], np.int64)
            old = totals.get(name, np.zeros((2, 0), np.int64))
            width = max(old.shape[1], pair.shape[1])
            totals[name] = sum(np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in (old, pair))  # type: ignore[assignment]
    return {n: (t[0][t[0] > 0], t[1][t[0] > 0]) for n, t in totals.items() if t[0].any()}


def whole_trace(trace: Record) -> Record:
    """Merges the traces of several engines into one; the trace of a single engine is returned as it is.

    The merged trace has a row for each moment at which any engine samples, with sums over the steps of all engines then.
    """
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
    """Returns when each engine step begins and ends in the chart, seconds.

    A step ends when it samples. It begins when the previous step sampled, or at its real beginning if the engine was idle
    before. The beginning of the first step is not known.
    """
    sampled = column(trace, "time_s")
    ends = sampled + sum(column(trace, n) for n in ("host_s", "draft_s") if n in trace["columns"])
    begins = ends[1:] - column(trace, "seconds")[1:]
    was_idle = begins - ends[:-1] > SHORTEST_IDLE_S
    return np.append(-np.inf, np.where(was_idle, begins, sampled[:-1])), sampled


def _under_way(trace: Record, starts: np.ndarray, ends: np.ndarray, name: str, at_s: np.ndarray) -> np.ndarray:
    """Returns a column's value in the step that runs at each moment, or 0 between steps; float64."""
    if name not in trace["columns"]:
        return np.zeros(len(at_s))
    step = np.minimum(np.searchsorted(ends, at_s), len(ends) - 1)
    return np.where((starts[step] < at_s) & (at_s <= ends[step]), column(trace, name)[step], 0.0)


def can_drain(trace: Record) -> bool:
    """Returns whether a trace has what a chart of running requests needs."""
    return len(trace.get("rows", ())) > 1 and {"time_s", "num_requests"} <= set(trace.get("columns", ()))


def seconds_since_start(trace: Record) -> np.ndarray:
    """Returns the time of each row since the first, seconds."""
    time_s = column(trace, "time_s")
    return time_s - time_s[0]


def drafts_by_name(trace: Record) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns drafted and accepted tokens of each engine step by drafter. Drafters without drafts are left out."""
    names = [c.removeprefix("drafted_") for c in trace["columns"] if c.startswith("drafted_")]
    found = {n: (column(trace, f"drafted_{n}"), column(trace, f"accepted_{n}")) for n in names}
    return {n: pair for n, pair in found.items() if pair[0].any()}


def column(trace: Record, name: str) -> np.ndarray:
    """Returns a column of a trace, float64."""
    i = trace["columns"].index(name)
    return np.array([row[i] for row in trace["rows"]], float)


# A run in NeMo-RL

PREFIX = "specrollout/"
"""Prefix of our metrics in NeMo-RL's logger and in `metrics.jsonl`."""
FOLDER = "specrollout"
"""Folder of our records in NeMo-RL's log folder."""
METRICS = "metrics.jsonl"
PHASE_TIMERS = {
    "generation": ("generation", "exposed_generation"),
    "logprob": ("policy_and_reference_logprobs", "logprob_inference_prep"),
    "train": ("policy_training", "training_prep"),
    "refit": ("prepare_for_generation/total", "weight_sync", "offload_before_refit"),
    "validation": ("total_validation_time",),
    "checkpoint": ("checkpointing",),
}
"""NeMo-RL's timers of each phase, in all its loops. None of the timers lies within another."""
_FRACTIONS = ("/acceptance", "/share_of_drafts")


@dataclass(frozen=True)
class NemoRlRun:
    """Steps and summary of a run. Both may be empty, because a run may be killed at any time."""

    steps: Sequence[Record]
    summary: Record

    @classmethod
    def read(cls, folder: Path) -> "NemoRlRun":
        """Reads the folder `<log_dir>/exp_NNN/specrollout`. Missing files and torn lines are skipped."""
        timings = {line["step"]: line for line in read_lines(folder / "timing.jsonl")}
        steps = [_step(line, timings.get(line["step"], {})) for line in read_lines(folder / METRICS)]
        return cls(steps, read_object_or_nothing(folder / "summary.json"))

    @property
    def block(self) -> Record:
        """Block of the run's config."""
        block = self.summary.get("block")
        return block if isinstance(block, Mapping) else {}

    @property
    def alarm_bound(self) -> float:
        """`logprob_gap_alarm` of the block, nats a token, or NaN if it is not known."""
        return number(self.block, "logprob_gap_alarm")

    @property
    def alarms(self) -> list[tuple[Any, str]]:
        """Step and sentence of every alarm."""
        return [(step["step"], text) for step in self.steps for text in self._alarms_of(step)]

    def _alarms_of(self, step: Record) -> list[str]:
        sentences = step.get("alarms")
        own = [str(sentence) for sentence in sentences] if isinstance(sentences, list) else []
        if number(step, "logprob_gap_alarm") != 1.0:
            return own
        gap, bound = number(step, "logprob_gap.mean"), self.alarm_bound
        above = f"logprob_gap_alarm {bound:g}" if math.isfinite(bound) else "logprob_gap_alarm"
        return [f"engine and trainer differ by {gap:.4f} nats a token, above {above}", *own]

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters that drafted."""
        return list(dict.fromkeys(key.split("/")[0] for s in self.steps for key in s if key.endswith(_FRACTIONS)))

    def mean(self, key: str) -> float:
        """Returns the mean of a metric over the steps that have it, or NaN."""
        return reduced(np.mean, series(self.steps, key))

    def total(self, key: str) -> float:
        """Returns the sum of a metric over the steps that have it, or NaN."""
        return reduced(np.sum, series(self.steps, key))

    def most(self, key: str) -> float:
        """Returns the largest value of a metric over all steps, or NaN."""
        return reduced(np.max, series(self.steps, key))


def is_local_run(folder: Path) -> bool:
    """Returns whether a local run has written into the folder. Every file but its config may be missing."""
    has_records = any((folder / name).is_file() for name in ("run.json", METRICS))
    return has_records and (folder / "config.yaml").is_file() and not (folder / FOLDER).is_dir()


def check_local_run(run_dir: Path) -> None:
    """Raises ConfigError if the config of a local run is damaged, or all of its steps are."""
    file = run_dir / "config.yaml"
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        config = None
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"RUN_DIR: {file} is no config of a run; bring the file back from a copy, or name another run"
        )
    check_lines(run_dir / METRICS)


def find_folder(path: Path) -> Path:
    """Returns the `specrollout` folder of a run.

    `path` is that folder, the run's log folder, or the folder in which NeMo-RL makes a log folder for each start. The run
    directory of `launch` is taken for its `logs`. Raises ConfigError if there is no such folder, or more than one.
    """
    is_launched = (path / "job.sh").is_file() and not (path / "run.json").exists()
    if is_launched:
        path = path / "logs"
    if (path / FOLDER / METRICS).is_file():
        return path / FOLDER
    if (path / METRICS).is_file() and not (path / "run.json").exists():  # a local run has a run.json
        return path
    found = sorted(metrics.parent for metrics in path.glob(f"exp_*/{FOLDER}/{METRICS}"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(folder.parent.name for folder in found)
        raise ConfigError(f"RUN_DIR: {path} holds {len(found)} runs ({names}); name one of them")
    if is_launched:
        raise ConfigError(f"RUN_DIR: {path} has no exp_NNN/{FOLDER}/{METRICS} yet; wait for the first step of the run")
    raise ConfigError(
        f"RUN_DIR: {path} is no run directory: it has neither a run.json nor {FOLDER}/{METRICS}; name the logger.log_dir "
        "of a run, or one of the folders exp_NNN that NeMo-RL makes there"
    )


def policy_lag(samples: Sequence[Record], step: int) -> dict[str, float]:
    """Returns how many training steps the policies that began `samples` lag behind, and how many samples got new weights.

    `samples` are from a line of `samples.jsonl`. Training step `step`, counted from 1, starts from policy `step - 1`.
    """
    spans = [sample["policy_spans"] for sample in samples if sample.get("policy_spans")]
    lags = [step - 1 - min(version for version, _ in sample_spans) for sample_spans in spans]
    if not lags:
        return {}
    return {
        "policy_lag_mean": sum(lags) / len(lags),
        "policy_lag_max": float(max(lags)),
        "samples_updated_amid": float(sum(len(sample_spans) > 1 for sample_spans in spans)),
    }


def _step(line: Record, timing: Record) -> dict[str, Any]:
    step = {key.removeprefix(PREFIX): value for key, value in line.items()}
    step["logprob_gap"] = {"mean": number(step, "logprob_gap")}
    for key in ("draft_refresh", "draft_supply", "acceptance"):
        if not isinstance(step.get(key), Mapping):
            step.pop(key, None)
    return step | _phases(timing)


def _phases(timing: Record) -> dict[str, float]:
    """Returns the seconds of the step, of each phase that has a timer and of the rest, and the share of generation."""
    timers = {phase: [number(timing, name) for name in names] for phase, names in PHASE_TIMERS.items()}
    phases = {f"{phase}_s": reduced(np.sum, np.array(seconds)) for phase, seconds in timers.items()}
    known = {name: seconds for name, seconds in phases.items() if math.isfinite(seconds)}
    step_s = number(timing, "total_step_time")
    if not step_s > 0:
        return known
    known |= {"step_s": step_s, "other_s": max(step_s - sum(known.values()), 0.0)}
    return known | {"generation_share": known["generation_s"] / step_s} if "generation_s" in known else known


def reduced(how: Any, values: np.ndarray) -> float:
    """Returns a sum, mean or maximum of the finite values, or NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(how(known)) if len(known) else math.nan
