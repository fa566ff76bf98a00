# SPDX-License-Identifier: Apache-2.0
"""Writes the records of a run in NeMo-RL, in the format that the report reads (docs/reference/metrics.md)."""

import json
import time
from collections.abc import Callable, Mapping
from numbers import Number
from pathlib import Path
from typing import Any

from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.reports.records import FOLDER, FORMAT, METRICS, PREFIX, RUN, SUMMARY, read_lines, summary_of
from nemo_specrollout.reports.starts import ENDED
from nemo_specrollout.storage.files import write_atomically

_NATIVE_KEYS = (
    "loss",
    "reward",
    "gen_kl_error",
    "token_mult_prob_error",
    "draft_loss",
    "mean_gen_tokens_per_sample",
    "avg_trajectory_age",
)
"""NeMo-RL's own metrics that are recorded besides those of this package."""
_PHASE_TIMERS = {
    "generation_s": ("generation", "exposed_generation"),
    "logprob_s": ("policy_and_reference_logprobs", "logprob_inference_prep"),
    "train_s": ("policy_training", "training_prep"),
    "refit_s": ("prepare_for_generation/total", "weight_sync", "offload_before_refit"),
    "validation_s": ("total_validation_time",),
    "checkpoint_s": ("checkpointing",),
    "step_s": ("total_step_time",),
}
"""For each phase of a step, and for the step, the names of NeMo-RL's timers in all of its loops. The timers of one phase do
not overlap."""


class RunRecord:
    """Owns `run.json`, `metrics.jsonl`, `samples.jsonl` and `summary.json` of a run, and files such as `ladder.json`.

    Each line of `metrics.jsonl` is a training step. If a resumed run repeats a step, the later line counts. The line of a step
    is written when NeMo-RL has logged the step's timers, which it does last.
    """

    def __init__(self, log_dir: Path, facts: Mapping[str, Any], clock: Callable[[], float] = time.time) -> None:
        """`facts` are written to `run.json`. `clock` returns the seconds since 1970."""
        self._clock = clock
        self.folder = log_dir / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / RUN, json.dumps({"records": FORMAT, **facts}, indent=2) + "\n")
        for path in self.folder.glob("*.jsonl"):  # end lines that a killed run left unfinished
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):
                path.write_bytes(content + b"\n")
        self._steps = read_lines(self.folder / METRICS)
        self._open: dict[str, Any] | None = None

    def add(self, step: int, metrics: Mapping[str, Any], log: StepLog) -> None:
        """Begins the line of a step with its metrics, entries and alarms. Appends the step's samples, and writes its files.

        Of this package's metrics, those with a group in their name, such as `specrollout/tail/moves`, are left out, because
        the entry `tail` has them.
        """
        self.finish_step()
        ours = {k.removeprefix(PREFIX): x for k, x in metrics.items() if k.startswith(PREFIX) or k in _NATIVE_KEYS}
        figures = {k: float(x) for k, x in ours.items() if isinstance(x, Number) and "/" not in k}  # type: ignore[arg-type]
        self._open = {"step": step, **figures, **log.entries, **({"alarms": log.alarms} if log.alarms else {})}
        if log.samples:
            self._append("samples.jsonl", {"step": step, "samples": log.samples})
        for name, text in log.files.items():
            write_atomically(self.folder / name, text)

    def finish_step(self, timers: Mapping[str, Any] | None = None) -> None:
        """Writes the line that `add` has begun, with NeMo-RL's `timers` in seconds, and rewrites the summary."""
        if self._open is None:
            return
        record = self._open | _phases(timers or {}) | {ENDED: round(self._clock(), 3)}
        self._open = None
        self._append(METRICS, record)
        self._steps.append(record)
        write_atomically(self.folder / SUMMARY, json.dumps(summary_of(self._steps), indent=2) + "\n")

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _phases(timers: Mapping[str, Any]) -> dict[str, float]:
    known = {
        name: [float(timers[t]) for t in of if isinstance(timers.get(t), Number)] for name, of in _PHASE_TIMERS.items()
    }
    return {name: sum(seconds) for name, seconds in known.items() if seconds}
