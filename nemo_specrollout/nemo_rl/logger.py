# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's logger, extended so that it adds this package's metrics to each training step, records both, and prints alarms."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_specrollout.nemo_rl.live_report import LiveReport
from nemo_specrollout.nemo_rl.logprob_gap import logprob_gap
from nemo_specrollout.nemo_rl.run_record import RunRecord
from nemo_specrollout.nemo_rl.step_log import STEP_LOG
from nemo_specrollout.remote.protocol.drafter_stats import in_words
from nemo_specrollout.reports.records import BEGAN, PREFIX, policy_lag

_LINE = {
    "acceptance_length": "{:.2f} tokens per request and engine step",
    "draft_tokens_per_request_step": "{:.2f} drafts",
    "speedup_estimate": "{:.2f}x by estimate",
    "logprob_gap": "log-prob gap {:.1e}",
    "head_age": "head age {:.0f}",
    "tail/moves": "{:.0f} moves",
    "tail/races": "{:.0f} races",
    "tail/saved_s": "which saved {:.2f} s, by estimate",
}
"""Metrics in the line that the terminal shows for a step, with their formats."""


class WatchingLogger:
    """Mixin for NeMo-RL's `Logger` that adds this package's metrics to those of a training step, and records both."""

    loggers: Sequence[Any]
    log_plot: Callable[[Any, int, str], None]

    def __init__(
        self,
        cfg: Mapping[str, Any],
        *args: Any,
        gap_alarms: Callable[[float], list[str]],
        facts: Mapping[str, Any],
        last_step: int,
        **kwargs: Any,
    ) -> None:
        """`cfg`, `args` and `kwargs` are the arguments of NeMo-RL's logger.

        `gap_alarms` returns alarms for a log-prob gap. `facts` are written to `run.json`. `last_step` is the last step of the
        run.
        """
        super().__init__(cfg, *args, **kwargs)  # type: ignore[call-arg]
        self.step_log = STEP_LOG
        self._gap_alarms = gap_alarms
        self._record = RunRecord(Path(cfg["log_dir"]), facts)
        self._report = LiveReport(self._record.folder, last_step)
        self._validation = (0, 0.0)
        # Runs when the logger is dropped or its process ends. A method of the logger here would keep the logger alive.
        weakref.finalize(self, _close, self._record, self._report)

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        """Completes the report at the end of a run of the SingleController."""
        _close(self._record, self._report)
        return super().finish(*args, **kwargs)  # type: ignore[misc]

    def log_metrics(
        self, metrics: dict[str, Any], step: int, prefix: str | None = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Logs as NeMo-RL does, and adds this package's metrics to those of a training step."""
        if prefix == "timing/validation":
            self._validation = (step, float(metrics.get("total_validation_time", 0.0)))
        if prefix == "timing/train":
            self._step_done(metrics, step)
        if prefix == "train" and "loss" in metrics:  # metrics of rollouts, which may come first, have no loss
            metrics = self._with_ours(metrics, step)
        return super().log_metrics(metrics, step, prefix, *args, **kwargs)  # type: ignore[misc]

    def _step_done(self, timers: Mapping[str, Any], step: int) -> None:
        """Records a step with its timers, which NeMo-RL logs last, and updates the report."""
        validated, seconds = self._validation
        self._record.finish_step({**timers, "total_validation_time": seconds} if validated == step else timers)
        self._report.step_done(step, self.log_plot if self.loggers else None)

    def _with_ours(self, metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Returns a step's metrics with those of this package, after recording and showing them."""
        log = self.step_log.take(request_figures=not any(name.startswith(PREFIX) for name in metrics))
        # Up to this point our metrics are arrays of one number (`generation.py`).
        metrics = {k: float(v) if k.startswith(PREFIX) else v for k, v in metrics.items()} | log.figures
        metrics |= {PREFIX + name: lag for name, lag in policy_lag(log.samples, step - 1).items()}
        gap = logprob_gap(metrics)
        if gap is not None:
            found = self._gap_alarms(gap)
            metrics |= {PREFIX + "logprob_gap": gap, PREFIX + "logprob_gap_alarm": float(bool(found))}
            log.alarms = [*found, *log.alarms]
        self._record.add(step, metrics, log)
        show_step(step, metrics, log.entries, log.alarms)
        return metrics


def _close(record: RunRecord, report: LiveReport) -> None:
    record.finish_step()
    report.close()


def show_step(step: int, metrics: Mapping[str, Any], entries: Mapping[str, Any], alarms: Sequence[str]) -> None:
    """Prints a step's metrics, the decision about the draft head, the state of the remote drafters, and the alarms."""
    print(f"  • specrollout: {in_a_line(metrics)}", flush=True)
    if (refresh := entries.get("draft_refresh")) is not None:
        print(f"  • specrollout draft head: {refresh.get('gate', refresh['decision'])}", flush=True)
    if (stats := entries.get("draft_supply")) is not None:
        print(f"  • specrollout drafters: {in_words(stats)}", flush=True)
    for sentence in entries.get(BEGAN, ()):
        print(f"  • specrollout: {sentence}", flush=True)
    for sentence in alarms:
        Console(stderr=True).print(f"specrollout ALARM, step {step}: {sentence}", style="bold red", highlight=False)


def in_a_line(metrics: Mapping[str, Any]) -> str:
    """Returns a step's metrics as one line for the terminal. Metrics that the step lacks are left out."""
    parts = [text.format(metrics[PREFIX + name]) for name, text in _LINE.items() if PREFIX + name in metrics]
    shares = {k.split("/")[1]: v for k, v in metrics.items() if k.startswith(PREFIX) and k.endswith("/share_of_drafts")}
    drafters = [f"{name} {share:.0%}" for name, share in shares.items()]
    return "; ".join([*parts, f"drafted by {', '.join(drafters)}"] if drafters else parts)
