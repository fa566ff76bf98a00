# SPDX-License-Identifier: Apache-2.0
"""The log of a step beyond NeMo-RL's own metrics, and the files in `<log_dir>/specrollout/` that keep it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.reports.nemo_rl_run import FOLDER, METRICS, PREFIX
from nemo_specrollout.reports.records import read_lines

_NATIVE_KEYS = (
    "loss", "reward", "gen_kl_error", "token_mult_prob_error", "draft_loss", "mean_gen_tokens_per_sample",
    "avg_trajectory_age",
)  # fmt: skip
"""NeMo-RL's own metrics that the record keeps beside ours."""


@dataclass
class StepLog:
    """Passes the log of a step from the supervisor, which fills it, to the logger, which takes it."""

    figures: dict[str, float] = field(default_factory=dict)
    """Numbers by name that NeMo-RL's own metrics lack."""

    entries: dict[str, Any] = field(default_factory=dict)
    """Structured entries by name, which go into the step's line of `metrics.jsonl`."""

    alarms: list[str] = field(default_factory=list)
    """Sentences that are kept and shown."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    """Sample stats, which go into the step's line of `samples.jsonl`."""

    source: Callable[[], Callable[[], dict[str, float]] | None] | None = None
    """Weak reference to a function that returns the step's figures, for loops of NeMo-RL that never request them."""

    def take(self, *, request_figures: bool = False) -> "StepLog":
        """Returns the log since the previous call, and clears it.

        With `request_figures`, figures that nothing has logged yet are requested from `source`.
        """
        request = self.source() if request_figures and self.source is not None else None
        taken = StepLog(self.figures or (request() if request else {}), self.entries, self.alarms, self.samples)
        self.figures, self.entries, self.alarms, self.samples = {}, {}, [], []
        return taken


class RunRecord:
    """Owns `metrics.jsonl`, `timing.jsonl`, `samples.jsonl` and `summary.json` of a run.

    A line of the first three is a training step. If a resumed run repeats a step, the later line counts.
    """

    def __init__(self, log_dir: Path, facts: Mapping[str, Any]) -> None:
        """`facts` go into the summary as they are."""
        self.folder = log_dir / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self._facts = dict(facts)
        self._end_torn_lines()
        self._steps = read_lines(self.folder / METRICS)

    def add(self, step: int, metrics: Mapping[str, Any], log: StepLog) -> None:
        """Appends a step's metrics, entries and samples, and rewrites the summary."""
        kept = {name: x for name, x in metrics.items() if name.startswith(PREFIX) or name in _NATIVE_KEYS}
        entries = {**log.entries, **({"alarms": log.alarms} if log.alarms else {})}
        record = {"step": step, **_numbers(kept), **{PREFIX + name: value for name, value in entries.items()}}
        self._append(METRICS, record)
        if log.samples:
            self._append("samples.jsonl", {"step": step, "samples": log.samples})
        self._steps.append(record)
        summary = summarize(self._steps, self._facts)
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")

    def add_timing(self, step: int, seconds: Mapping[str, Any]) -> None:
        """Appends NeMo-RL's timers of a step, in seconds."""
        self._append("timing.jsonl", {"step": step, **_numbers(seconds)})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _end_torn_lines(self) -> None:
        """Ends lines that a killed run left unfinished, so that the next record starts a line of its own."""
        for path in self.folder.glob("*.jsonl"):
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):
                path.write_bytes(content + b"\n")


def summarize(steps: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `summary.json` for a run with these `steps`."""

    def column(name: str) -> list[float]:
        return [s[PREFIX + name] for s in steps if PREFIX + name in s]

    def mean(name: str) -> float | None:
        values = column(name)
        return sum(values) / len(values) if values else None

    return {
        **facts,
        "num_steps": len(steps),
        "speedup_estimate_mean": mean("speedup_estimate"),
        "tokens_per_request_step_mean": mean("tokens_per_request_step"),
        "logprob_gap_max": max(column("logprob_gap"), default=None),
        "num_alarms": int(sum(column("logprob_gap_alarm"))),
        "num_canary_alarms": int(sum(column("canary_alarms"))),
        "num_heads_published": int(sum(column("heads_published"))),
        "num_heads_refused": int(sum(column("heads_refused"))),
        "num_seeds_made_up": int(sum(column("seeds_made_up"))),
    }


def _numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(x) for name, x in figures.items() if isinstance(x, Number)}  # type: ignore[arg-type]
