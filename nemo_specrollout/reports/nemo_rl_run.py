# SPDX-License-Identifier: Apache-2.0
"""What a run in NeMo-RL recorded, under the names of a local run where they mean the same, so that charts are shared.

Our figures lose their prefix: `specrollout/speedup_estimate` becomes `speedup_estimate`. NeMo-RL's timers are summed up to
the phases of a step, `<phase>_s`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.reports.policy_lag import policy_lag
from nemo_specrollout.reports.records import Record, number, read_lines, read_object_or_nothing, series

PREFIX, FOLDER, METRICS = "specrollout/", "specrollout", "metrics.jsonl"
# Phase -> the timers of NeMo-RL that make it up, in synchronous GRPO and in others; none lies within another.
PHASE_TIMERS = {
    "generation": ("generation", "exposed_generation"),
    "logprob": ("policy_and_reference_logprobs", "logprob_inference_prep"),
    "train": ("policy_training", "training_prep"),
    "refit": ("prepare_for_generation/total", "weight_sync", "offload_before_refit"),
    "validation": ("total_validation_time",),
    "checkpoint": ("checkpointing",),
}
_FRACTIONS = ("/acceptance", "/share_of_drafts")


@dataclass(frozen=True)
class NemoRlRun:
    """A run's steps and what `summary.json` says of it. Both may be empty: the run may have been killed anywhere."""

    steps: Sequence[Record]
    summary: Record

    @classmethod
    def read(cls, folder: Path) -> "NemoRlRun":
        """Reads `<log_dir>/specrollout`. A missing file has nothing, a torn line is skipped."""
        timings = {line["step"]: line for line in read_lines(folder / "timing.jsonl")}
        steps = [_step(line, timings.get(line["step"], {})) for line in read_lines(folder / METRICS)]
        if not any("policy_lag_mean" in step for step in steps):  # recorded before they were figures of a step
            samples = {line["step"]: line.get("samples") or () for line in read_lines(folder / "samples.jsonl")}
            steps = [{**step, **policy_lag(samples.get(step["step"], ()), step["step"])} for step in steps]
        return cls(steps, read_object_or_nothing(folder / "summary.json"))

    @property
    def block(self) -> Record:
        """The block of the run's config."""
        block = self.summary.get("block")
        return block if isinstance(block, Mapping) else {}

    @property
    def alarm_bound(self) -> float:
        """`logprob_gap_alarm`, nats; NaN where it is not known."""
        return number(self.block, "logprob_gap_alarm")

    @property
    def alarms(self) -> list[tuple[Any, str]]:
        """(step, text) of every alarm."""
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
        """Names of those that drafted."""
        return list(dict.fromkeys(key.split("/")[0] for s in self.steps for key in s if key.endswith(_FRACTIONS)))

    def mean(self, key: str) -> float:
        """Mean over the steps that have the figure; NaN where none has."""
        return _reduced(np.mean, series(self.steps, key))

    def total(self, key: str) -> float:
        """Sum over the steps that have the figure; NaN where none has."""
        return _reduced(np.sum, series(self.steps, key))

    def most(self, key: str) -> float:
        """Largest of the steps that have the figure; NaN where none has."""
        return _reduced(np.max, series(self.steps, key))


def find_folder(path: Path) -> Path:
    """Returns the `specrollout` folder of a run. `path` is that folder, the run's log folder, or the folder in which
    NeMo-RL makes a log folder for each start. Raises ConfigError where there is none, or more than one."""
    if (path / FOLDER / METRICS).is_file():
        return path / FOLDER
    if (path / METRICS).is_file() and not (path / "run.json").exists():  # which a local run has
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


def _step(line: Record, timing: Record) -> dict[str, Any]:
    step = {key.removeprefix(PREFIX): value for key, value in line.items()}
    step["logprob_gap"] = {"mean": number(step, "logprob_gap")}
    for key in ("draft_refresh", "draft_supply", "acceptance"):
        if not isinstance(step.get(key), Mapping):
            step.pop(key, None)
    return step | _phases(timing)


def _phases(timing: Record) -> dict[str, float]:
    """Seconds of each phase that has a timer, of what is left of the step, and the generation's share of it."""
    phases = {f"{phase}_s": _added(timing, names) for phase, names in PHASE_TIMERS.items()}
    known = {name: seconds for name, seconds in phases.items() if math.isfinite(seconds)}
    step_s = number(timing, "total_step_time")
    if not step_s > 0:
        return known
    known |= {"step_s": step_s, "other_s": max(step_s - sum(known.values()), 0.0)}
    return known | {"generation_share": known["generation_s"] / step_s} if "generation_s" in known else known


def _added(timing: Record, names: Sequence[str]) -> float:
    """Sum of the timers that there are; NaN where there is none."""
    seconds = np.array([number(timing, name) for name in names])
    return _reduced(np.sum, seconds)


def _reduced(how: Any, values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(how(known)) if len(known) else math.nan
