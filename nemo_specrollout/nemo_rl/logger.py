# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's logger, extended by the log-prob gap between engine and trainer, its alarm, a record and a report."""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG, Tree, asynchronous_block, at, stale_kv_field
from nemo_specrollout.nemo_rl.live_report import LiveReport
from nemo_specrollout.nemo_rl.step_log import RunRecord, StepLog
from nemo_specrollout.remote.protocol.drafter_stats import in_words
from nemo_specrollout.reports.nemo_rl_run import PREFIX, policy_lag

_LINE = {
    "tokens_per_request_step": "{:.2f} tokens a request and step",
    "draft_tokens_per_request_step": "{:.2f} drafts",
    "speedup_estimate": "{:.2f}x by estimate",
    "logprob_gap": "log-prob gap {:.1e}",
    "head_age": "head age {:.0f}",
    "tail/moves": "{:.0f} moves",
    "tail/races": "{:.0f} races",
    "tail/saved_s": "which saved {:.2f} s, by estimate",
}
"""Metrics of the line that the terminal shows for a step, with their formats."""


@dataclass
class Watch:
    """Settings of the extended logger."""

    gap_alarm: float
    """`logprob_gap_alarm` of the block, nats a token."""

    causes: Sequence[str] = ()
    """Likely causes of a large gap, the likeliest first."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the run for `summary.json`."""

    log: StepLog = field(default_factory=StepLog)
    """The log that the supervisor fills."""

    last_step: int | None = None
    """Last step of the run, or None if it is not known."""

    def logger_class(self, native: Any) -> Any:
        """Returns a subclass of NeMo-RL's `Logger` class, which watches the metrics of each training step."""
        watch = self

        class WatchingLogger(native):
            """NeMo-RL's logger. It keeps and extends the metrics of a training step before it passes them on."""

            def __init__(self, cfg: Mapping[str, Any]) -> None:
                super().__init__(cfg)
                self._record = RunRecord(Path(cfg["log_dir"]), watch.facts)
                self._report = LiveReport(self._record.folder, watch.last_step)
                self._validation = (0, 0.0)
                # Runs when the logger is dropped or its process ends. A method of the logger would keep it alive.
                weakref.finalize(self, self._report.close)

            def finish(self) -> None:
                """Completes the report at the end of the SingleController's run."""
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
                if prefix == "train" and "loss" in metrics:  # NeMo-RL may have logged metrics of rollouts before
                    metrics = watch.extended(metrics, step, self._record)
                super().log_metrics(metrics, step, prefix, step_metric, step_finished)

            def _step_done(self, timing: Mapping[str, Any], step: int) -> None:
                """Keeps a step's timers, which NeMo-RL logs last, and updates the report before the step is finished."""
                validated, seconds = self._validation
                validation = {"total_validation_time": seconds} if validated == step else {}
                self._record.add_timing(step, {**timing, **validation})
                self._report.step_done(step, self.log_plot if getattr(self, "loggers", ()) else None)

        return WatchingLogger

    def extended(self, metrics: Mapping[str, Any], step: int, record: RunRecord) -> dict[str, Any]:
        """Adds our metrics to a training step's, keeps all of them in `record`, and shows them."""
        log = self.log.take(request_figures=not any(name.startswith(PREFIX) for name in metrics))
        gap = logprob_gap(metrics)
        lags = {PREFIX + name: lag for name, lag in policy_lag(log.samples, step).items()}
        metrics = {**_as_floats(metrics), **log.figures, **lags}
        if gap is not None:
            metrics |= {PREFIX + "logprob_gap": gap, PREFIX + "logprob_gap_alarm": float(gap > self.gap_alarm)}
            if gap > self.gap_alarm:
                _show_alarm(
                    step,
                    f"engine and trainer differ by {gap:.4f} nats a token, above logprob_gap_alarm {self.gap_alarm}. "
                    f"Likely causes, the likeliest first: {'; '.join(self.causes)}.",
                )
        record.add(step, metrics, log)
        print(f"  • specrollout: {in_a_line(metrics)}", flush=True)
        _show(step, log)
        return metrics


def in_a_line(metrics: Mapping[str, Any]) -> str:
    """Returns a step's metrics as a line for the terminal. Metrics that the step lacks are left out."""
    parts = [text.format(metrics[PREFIX + name]) for name, text in _LINE.items() if PREFIX + name in metrics]
    shares = {k.split("/")[1]: v for k, v in metrics.items() if k.startswith(PREFIX) and k.endswith("/share_of_drafts")}
    drafters = [f"{name} {share:.0%}" for name, share in shares.items()]
    return "; ".join([*parts, f"drafted by {', '.join(drafters)}"] if drafters else parts)


def logprob_gap(metrics: Mapping[str, Any]) -> float | None:
    """Returns the log-prob gap of a step, nats a token, or None if NeMo-RL does not log it.

    NeMo-RL logs the mean of exp|difference|. The logarithm of that mean is at least the mean of |difference|, and equal
    to it where the differences are small.
    """
    error = metrics.get("token_mult_prob_error")
    return None if error is None else math.log(max(float(error), 1.0))


def gap_causes(tree: Tree) -> list[str]:
    """Returns the likely causes of a log-prob gap in a run with the config `tree`, the likeliest first."""
    causes = []
    if at(tree, "policy.draft.enabled"):
        causes.append("draft weights entered a module that the drafter shares with the policy (docs/upstream)")
    block, field_of_kv = asynchronous_block(tree), stale_kv_field(tree)
    lag = None if block is None else f"{block}.max_trajectory_age_steps"
    if at(tree, "async_rl") is not None:
        lag = "async_rl.sampler"
    if lag is not None:
        causes.append(f"samples of an older policy ({lag}), which is no fault if the gap stays small")
    if field_of_kv is not None:
        causes.append(f"KV of older weights ({field_of_kv}: false)")
    causes.append("weights that did not arrive in the engine at the last refit")
    if at(tree, f"{VLLM_CFG}.precision") != "float32" or at(tree, "policy.precision") != "float32":
        causes.append(
            "rounding: engine and trainer compute in low precision; raise logprob_gap_alarm if it was so from the start"
        )
    return causes


def _as_floats(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Turns our metrics, which are arrays of one number until here (`generation.py`), into floats."""
    return {k: float(v) if k.startswith(PREFIX) else v for k, v in metrics.items()}


def _show(step: int, log: StepLog) -> None:
    refresh, stats = log.entries.get("draft_refresh"), log.entries.get("draft_supply")
    if refresh is not None:
        print(f"  • specrollout draft head: {refresh.get('gate', refresh['decision'])}", flush=True)
    if stats is not None:
        print(f"  • specrollout drafters: {in_words(stats)}", flush=True)
    for sentence in log.alarms:
        _show_alarm(step, sentence)


def _show_alarm(step: int, sentence: str) -> None:
    Console(stderr=True).print(f"specrollout ALARM, step {step}: {sentence}", style="bold red", highlight=False)
