# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind beside NeMo-RL's own logs: `metrics.jsonl`, `timing.jsonl`, `samples.jsonl` and `summary.json` in
`<log_dir>/specrollout/`."""

import json
from collections.abc import Mapping
from numbers import Number
from pathlib import Path
from typing import Any

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.nemo_rl.step_log import StepNotes
from nemo_specrollout.reports.nemo_rl_run import FOLDER, METRICS, PREFIX
from nemo_specrollout.reports.records import read_lines

# Of NeMo-RL's own figures, what ours are read beside.
_NATIVE_KEYS = (
    "loss", "reward", "gen_kl_error", "token_mult_prob_error", "draft_loss", "mean_gen_tokens_per_sample",
    "avg_trajectory_age",
)  # fmt: skip


class RunRecord:
    """Owns the four files. A line of the first three is a training step; the last one of a step counts."""

    def __init__(self, log_dir: Path, facts: Mapping[str, Any]) -> None:
        self.folder = log_dir / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self._facts = dict(facts)
        self._end_torn_lines()
        self._steps = read_lines(self.folder / METRICS)  # of a run before this one

    def add(self, step: int, metrics: Mapping[str, Any], notes: StepNotes) -> None:
        """Appends a step's figures, words and samples, and renews the summary."""
        kept = {name: x for name, x in metrics.items() if name.startswith(PREFIX) or name in _NATIVE_KEYS}
        record: dict[str, Any] = {"step": step, **_numbers(kept)}
        words = {**notes.words, **({"alarms": notes.alarms} if notes.alarms else {})}
        record |= {PREFIX + name: value for name, value in words.items()}
        self._append(METRICS, record)
        if notes.samples:
            self._append("samples.jsonl", {"step": step, "samples": notes.samples})
        self._steps.append(record)
        self._write_summary()

    def add_timing(self, step: int, seconds: Mapping[str, Any]) -> None:
        """Appends NeMo-RL's timers of a step."""
        self._append("timing.jsonl", {"step": step, **_numbers(seconds)})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _end_torn_lines(self) -> None:
        """A line that a killed run left unfinished must not swallow the next."""
        for path in self.folder.glob("*.jsonl"):
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):
                path.write_bytes(content + b"\n")

    def _write_summary(self) -> None:
        summary = summarize(self._steps, self._facts)
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def summarize(steps: list[dict[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The run so far in figures: sums of counts and seconds, the largest gap, alarms."""

    def column(name: str) -> list[float]:
        return [s[PREFIX + name] for s in steps if PREFIX + name in s]

    return {
        **facts,
        "num_steps": len(steps),
        "speedup_estimate_mean": _mean(column("speedup_estimate")),
        "tokens_per_request_step_mean": _mean(column("tokens_per_request_step")),
        "logprob_gap_max": max(column("logprob_gap"), default=None),
        "num_alarms": int(sum(column("logprob_gap_alarm"))),
        "num_canary_alarms": int(sum(column("canary_alarms"))),
        "num_heads_published": int(sum(column("heads_published"))),
        "num_heads_refused": int(sum(column("heads_refused"))),
        "num_seeds_made_up": int(sum(column("seeds_made_up"))),
    }


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in figures.items() if isinstance(x, Number)}  # type: ignore[arg-type]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
