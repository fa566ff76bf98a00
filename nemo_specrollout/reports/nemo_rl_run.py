# SPDX-License-Identifier: Apache-2.0
"""Records of a run in NeMo-RL, with the names of a local run where they mean the same, so that both share charts.

Our metrics lose their prefix: `specrollout/speedup_estimate` becomes `speedup_estimate`. NeMo-RL's timers are summed to the
phases of a step, `<phase>_s`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports.records import Record, number, read_lines, read_object_or_nothing, series

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
        """Reads `<log_dir>/specrollout`. Missing files and torn lines are skipped."""
        timings = {line["step"]: line for line in read_lines(folder / "timing.jsonl")}
        steps = [_step(line, timings.get(line["step"], {})) for line in read_lines(folder / METRICS)]
        if not any("policy_lag_mean" in step for step in steps):  # an older record
            samples = {line["step"]: line.get("samples") or () for line in read_lines(folder / "samples.jsonl")}
            steps = [{**step, **policy_lag(samples.get(step["step"], ()), step["step"])} for step in steps]
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
        return _reduced(np.mean, series(self.steps, key))

    def total(self, key: str) -> float:
        """Returns the sum of a metric over the steps that have it, or NaN."""
        return _reduced(np.sum, series(self.steps, key))

    def most(self, key: str) -> float:
        """Returns the largest value of a metric over all steps, or NaN."""
        return _reduced(np.max, series(self.steps, key))


def find_folder(path: Path) -> Path:
    """Returns the `specrollout` folder of a run.

    `path` is that folder, the run's log folder, or the folder in which NeMo-RL makes a log folder for each start. Raises
    ConfigError if there is no such folder, or more than one.
    """
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
    raise ConfigError(
        f"RUN_DIR: {path} is no run directory: it has neither a config.yaml nor {FOLDER}/{METRICS}; name the logger.log_dir "
        "of a run"
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
    phases = {f"{phase}_s": _added(timing, names) for phase, names in PHASE_TIMERS.items()}
    known = {name: seconds for name, seconds in phases.items() if math.isfinite(seconds)}
    step_s = number(timing, "total_step_time")
    if not step_s > 0:
        return known
    known |= {"step_s": step_s, "other_s": max(step_s - sum(known.values()), 0.0)}
    return known | {"generation_share": known["generation_s"] / step_s} if "generation_s" in known else known


def _added(timing: Record, names: Sequence[str]) -> float:
    """Returns the sum of the timers that exist, or NaN."""
    seconds = np.array([number(timing, name) for name in names])
    return _reduced(np.sum, seconds)


def _reduced(how: Any, values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(how(known)) if len(known) else math.nan
