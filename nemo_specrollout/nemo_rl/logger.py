# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's logger, watching what the run depends on: that engine and trainer have the same policy."""

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_specrollout.nemo_rl.live_report import LiveReport
from nemo_specrollout.nemo_rl.run_record import RunRecord
from nemo_specrollout.nemo_rl.step_log import StepNotes
from nemo_specrollout.remote.protocol.drafter_stats import in_words
from nemo_specrollout.reports.nemo_rl_run import PREFIX
from nemo_specrollout.reports.policy_lag import policy_lag


@dataclass
class Watch:
    """What a logger of a run watches and keeps: the arguments of `watching_logger`."""

    block: Mapping[str, Any]
    causes: list[str]
    facts: Mapping[str, Any]
    notes: StepNotes
    last_step: int | None = None

    def logger_class(self, native: Any) -> Any:
        """Returns NeMo-RL's `Logger` class, extended."""
        return watching_logger(native, self.block, self.causes, self.facts, self.notes, self.last_step)


def watching_logger(
    native: Any,
    block: Mapping[str, Any],
    causes: list[str],
    facts: Mapping[str, Any],
    notes: StepNotes,
    last_step: int | None = None,
) -> Any:
    """NeMo-RL's `Logger` class, extended by the log-prob gap of each step, its alarm, a record and a report of the run.

    `causes` are sentences for the alarm, the likeliest first; `facts` go into the summary; `notes` of each step are kept,
    its alarms, what became of a draft head and how remote drafters kept up are shown. `last_step` is the last step
    of the whole run, if it is known.
    """
    bound = block["logprob_gap_alarm"]

    class WatchingLogger(native):
        """NeMo-RL's logger; the figures of a training step pass a watch, and are kept, on their way."""

        def __init__(self, cfg: Mapping[str, Any]) -> None:
            super().__init__(cfg)
            self._record = RunRecord(Path(cfg["log_dir"]), facts)
            self._report = LiveReport(self._record.folder, last_step)
            self._validation = (0, 0.0)
            # When the logger is given up, or its process ends; not a method of the logger, which would keep it alive.
            weakref.finalize(self, self._report.close)

        def finish(self) -> None:
            """NeMo-RL's, of the single controller: the run is over."""
            self._report.close()
            super().finish()

        def log_metrics(
            self,
            metrics: dict[str, Any],
            step: int,
            prefix: str | None = "",
            step_metric: str | None = None,
            step_finished: bool = False,
        ) -> None:
            if prefix == "timing/validation":
                self._validation = (step, float(metrics.get("total_validation_time", 0.0)))
            if prefix == "timing/train":
                self._step_done(metrics, step)
            if prefix == "train" and "loss" in metrics:  # NeMo-RL may log figures of rollouts before
                metrics = self._watched(metrics, step)
            super().log_metrics(metrics, step, prefix, step_metric, step_finished)

        def _watched(self, metrics: dict[str, Any], step: int) -> dict[str, Any]:
            """Keeps and shows a training step's figures; returns NeMo-RL's and ours."""
            asks = not any(name.startswith(PREFIX) for name in metrics)
            noted, gap = notes.take(asks=asks), logprob_gap(metrics)
            lags = {PREFIX + name: lag for name, lag in policy_lag(noted.samples, step).items()}
            metrics = {**_plain(metrics), **noted.figures, **lags}
            if gap is not None:
                metrics |= {PREFIX + "logprob_gap": gap, PREFIX + "logprob_gap_alarm": float(gap > bound)}
                if gap > bound:
                    _raise_alarm(step, gap, bound, causes)
            self._record.add(step, metrics, noted)
            print(f"  • specrollout: {in_a_line(metrics)}", flush=True)
            _show(step, noted)
            return metrics

        def _step_done(self, timing: Mapping[str, Any], step: int) -> None:
            """The timers of a step are its last figures; pictures must come before them."""
            validated, seconds = self._validation
            validation = {"total_validation_time": seconds} if validated == step else {}
            self._record.add_timing(step, {**timing, **validation})
            self._report.step_done(step, self.log_plot if getattr(self, "loggers", ()) else None)

    return WatchingLogger


def in_a_line(metrics: Mapping[str, Any]) -> str:
    """A step's figures for the terminal, beside NeMo-RL's own; what there is none of is left out."""
    texts = {
        "tokens_per_request_step": "{:.2f} tokens a request and step",
        "draft_tokens_per_request_step": "{:.2f} drafts",
        "speedup_estimate": "{:.2f}x by estimate",
        "logprob_gap": "log-prob gap {:.1e}",
        "head_age": "head age {:.0f}",
        "tail/moves": "{:.0f} moves",
        "tail/races": "{:.0f} races",
        "tail/saved_s": "which saved {:.2f} s, by estimate",
    }
    said = [text.format(metrics[PREFIX + name]) for name, text in texts.items() if PREFIX + name in metrics]
    shares = {k.split("/")[1]: v for k, v in metrics.items() if k.startswith(PREFIX) and k.endswith("/share_of_drafts")}
    drafters = [f"{name} {share:.0%}" for name, share in shares.items()]
    return "; ".join([*said, f"drafted by {', '.join(drafters)}"] if drafters else said)


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Ours are arrays of one number until here (`generation.py`)."""
    return {k: float(v) if k.startswith(PREFIX) else v for k, v in metrics.items()}


def logprob_gap(metrics: Mapping[str, Any]) -> float | None:
    """Nats a token between engine and trainer, from NeMo-RL's mean of exp|difference|; None where it is not logged.

    It is no less than the mean of |difference|, and equal to it where the difference is small.
    """
    error = metrics.get("token_mult_prob_error")
    return None if error is None else math.log(max(float(error), 1.0))


def _show(step: int, notes: StepNotes) -> None:
    refresh = notes.words.get("draft_refresh")
    if refresh is not None:
        print(f"  • specrollout draft head: {refresh.get('gate', refresh['decision'])}", flush=True)
    supply = notes.words.get("draft_supply")
    if supply is not None:
        print(f"  • specrollout drafters: {in_words(supply)}", flush=True)
    for sentence in notes.alarms:
        _cry(f"specrollout ALARM, step {step}: {sentence}")


def _raise_alarm(step: int, gap: float, bound: float, causes: list[str]) -> None:
    _cry(
        f"specrollout ALARM, step {step}: engine and trainer differ by {gap:.4f} nats a token, above logprob_gap_alarm "
        f"{bound}. Likely causes, the likeliest first: {'; '.join(causes)}."
    )


def _cry(sentence: str) -> None:
    Console(stderr=True).print(sentence, style="bold red", highlight=False)
