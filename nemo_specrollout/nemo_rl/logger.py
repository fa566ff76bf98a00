# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's logger, extended by a log of each step: figures, alarms, the log-prob gap, and files in the log folder."""

import asyncio
import json
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from pathlib import Path
from threading import Thread
from typing import Any

from rich.console import Console

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG, Tree, asynchronous_block, at, stale_kv_field
from nemo_specrollout.remote.protocol.drafter_stats import in_words
from nemo_specrollout.reports.records import FOLDER, METRICS, PREFIX, policy_lag, read_lines

_NATIVE_KEYS = (
    "loss", "reward", "gen_kl_error", "token_mult_prob_error", "draft_loss", "mean_gen_tokens_per_sample",
    "avg_trajectory_age",
)  # fmt: skip
"""NeMo-RL's own metrics that the record keeps beside ours."""
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
PAUSE_PER_WRITE = 100.0
"""Seconds without a write for each second that a write took, so writes take less than 1 % of the time."""
SHORTEST_PAUSE_BETWEEN_PICTURES_S = 600.0
"""Seconds. Weights & Biases and TensorBoard keep every picture."""
PICTURE_NAME = "train/specrollout/picture"
LogPlot = Callable[[Any, int, str], None]
"""NeMo-RL's function that logs a picture: takes a matplotlib figure, the step and a name."""


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
        if request is not None and not self.figures:
            self.figures = request()
        taken = replace(self)
        self.figures, self.entries, self.alarms, self.samples = {}, {}, [], []
        return taken


STEP_LOG = StepLog()
"""Log of the process that supervises the engines: NeMo-RL's driver, or the actor of its SingleController."""


class RunRecord:
    """Owns `metrics.jsonl`, `timing.jsonl`, `samples.jsonl` and `summary.json` of a run.

    A line of the first three is a training step. If a resumed run repeats a step, the later line counts.
    """

    def __init__(self, log_dir: Path, facts: Mapping[str, Any]) -> None:
        """`facts` go into the summary as they are."""
        self.folder, self._facts = log_dir / FOLDER, facts
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.jsonl"):  # end lines that a killed run left unfinished
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):
                path.write_bytes(content + b"\n")
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
        summary = {**self._facts, **summary_of(self._steps)}
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")

    def add_timing(self, step: int, seconds: Mapping[str, Any]) -> None:
        """Appends NeMo-RL's timers of a step, in seconds."""
        self._append("timing.jsonl", {"step": step, **_numbers(seconds)})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(x) for name, x in figures.items() if isinstance(x, Number)}  # type: ignore[arg-type]


def summary_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of `summary.json` for a run with these `steps` (docs/reference/metrics.md)."""

    def column(name: str) -> list[Any]:
        return [step[PREFIX + name] for step in steps if PREFIX + name in step]

    def mean(name: str) -> float | None:
        values = column(name)
        return sum(values) / len(values) if values else None

    return {
        "num_steps": len(steps),
        "speedup_estimate_mean": mean("speedup_estimate"),
        "tokens_per_request_step_mean": mean("tokens_per_request_step"),
        "logprob_gap_max": max(column("logprob_gap"), default=None),
        "num_alarms": int(sum(column("logprob_gap_alarm"))) + sum(map(len, column("alarms"))),
        "num_canary_alarms": int(sum(column("canary_alarms"))),
        "num_heads_published": int(sum(column("heads_published"))),
        "num_heads_refused": int(sum(column("heads_refused"))),
        "num_seeds_made_up": int(sum(column("seeds_made_up"))),
    }


def next_write_s(began_s: float, ended_s: float, shortest_pause_s: float = 0.0) -> float:
    """Returns the time from which the next write is allowed after a write between these times, in seconds."""
    return ended_s + max(PAUSE_PER_WRITE * (ended_s - began_s), shortest_pause_s)


class LiveReport:
    """Decides when the pages of `folder` are written. An error is shown once and never ends the run.

    It works in NeMo-RL's driver and in the actor of the SingleController.
    """

    def __init__(self, folder: Path, last_step: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`last_step` is the step after which the pages are written in any case."""
        self._folder, self._last_step, self._clock = folder, last_step, clock
        self._pages_due_s = self._picture_due_s = -math.inf
        self._is_behind = self._has_warned = False
        self._writer: Thread | None = None

    def step_done(self, step: int, log_plot: LogPlot | None = None) -> None:
        """Writes the pages if they are due. Call it when the records of a step are on disk.

        `log_plot` is None if NeMo-RL logs to no service. Under the SingleController only the last step's picture is logged.
        """
        self._is_behind = True
        is_last, now_s = step == self._last_step, self._clock()
        if not is_last and now_s < self._pages_due_s:
            return
        if not is_last and _has_event_loop():  # the SingleController's rollouts wait on this thread's loop
            if self._writer is None or not self._writer.is_alive():
                self._writer = Thread(target=self._write, daemon=True)
                self._writer.start()
            return
        self._wait_for_thread()
        if is_last or now_s >= self._picture_due_s:
            self._write(step, log_plot)
            self._picture_due_s = next_write_s(now_s, self._clock(), SHORTEST_PAUSE_BETWEEN_PICTURES_S)
        else:
            self._write()

    def close(self) -> None:
        """Writes the pages once more, unless they already cover every step."""
        self._wait_for_thread()
        if self._is_behind:
            self._write()

    def _wait_for_thread(self) -> None:
        """Waits for the thread, which would otherwise write its older pages last."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, step: int = 0, log_plot: LogPlot | None = None) -> None:
        began_s, self._is_behind = self._clock(), False
        try:
            from nemo_specrollout.reports.nemo_rl_charts import figure_of
            from nemo_specrollout.reports.nemo_rl_page import write_pages

            _, picture = write_pages(self._folder)
            if log_plot is not None:
                log_plot(figure_of(picture), step, PICTURE_NAME)
        except ImportError as error:
            self._warn(f"no report.html and picture.png: {error}; install matplotlib, or make them later")
        except Exception as error:  # a report is worth less than the run
            self._warn(f"report.html or picture.png was not written ({type(error).__name__}: {error}); the run goes on")
        self._pages_due_s = next_write_s(began_s, self._clock())

    def _warn(self, sentence: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            Console(stderr=True).print(f"specrollout: {sentence}", style="yellow", markup=False, highlight=False)


def _has_event_loop() -> bool:
    """Returns whether this thread runs coroutines."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class WatchingLogger:
    """Mixin for NeMo-RL's `Logger`: adds our metrics to a training step's, and records both."""

    loggers: Sequence[Any]
    log_plot: Callable[[Any, int, str], None]

    def __init__(
        self,
        cfg: Mapping[str, Any],
        *args: Any,
        gap_alarm: float,
        causes: Sequence[str],
        facts: Mapping[str, Any],
        last_step: int,
        **kwargs: Any,
    ) -> None:
        """`cfg`, `args` and `kwargs` are NeMo-RL's.

        `gap_alarm` is `logprob_gap_alarm` of the block, nats a token. `causes` are likely causes of a large gap, the likeliest
        first. `facts` of the run go into `summary.json`. `last_step` is the last step of the run.
        """
        super().__init__(cfg, *args, **kwargs)  # type: ignore[call-arg]
        self.step_log, self._gap_alarm, self._causes = STEP_LOG, gap_alarm, causes
        self._record = RunRecord(Path(cfg["log_dir"]), facts)
        self._report = LiveReport(self._record.folder, last_step)
        self._validation = (0, 0.0)
        # Runs when the logger is dropped or its process ends. A method of the logger would keep it alive.
        weakref.finalize(self, self._report.close)

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        """Completes the report at the end of the SingleController's run."""
        self._report.close()
        return super().finish(*args, **kwargs)  # type: ignore[misc]

    def log_metrics(
        self, metrics: dict[str, Any], step: int, prefix: str | None = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Logs as NeMo-RL does, a training step's metrics with ours."""
        if prefix == "timing/validation":
            self._validation = (step, float(metrics.get("total_validation_time", 0.0)))
        if prefix == "timing/train":
            self._step_done(metrics, step)
        if prefix == "train" and "loss" in metrics:  # NeMo-RL may have logged metrics of rollouts before
            metrics = self._with_ours(metrics, step)
        return super().log_metrics(metrics, step, prefix, *args, **kwargs)  # type: ignore[misc]

    def _step_done(self, timing: Mapping[str, Any], step: int) -> None:
        """Keeps a step's timers, which NeMo-RL logs last, and updates the report before the step is finished."""
        validated, seconds = self._validation
        validation = {"total_validation_time": seconds} if validated == step else {}
        self._record.add_timing(step, {**timing, **validation})
        self._report.step_done(step, self.log_plot if self.loggers else None)

    def _with_ours(self, metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Adds our metrics to a training step's, records all of them, and shows them."""
        log = self.step_log.take(request_figures=not any(name.startswith(PREFIX) for name in metrics))
        # Our metrics are arrays of one number until here (`generation.py`).
        metrics = {k: float(v) if k.startswith(PREFIX) else v for k, v in metrics.items()} | log.figures
        metrics |= {PREFIX + name: lag for name, lag in policy_lag(log.samples, step).items()}
        gap, alarms = logprob_gap(metrics), log.alarms
        if gap is not None:
            is_large = gap > self._gap_alarm
            metrics |= {PREFIX + "logprob_gap": gap, PREFIX + "logprob_gap_alarm": float(is_large)}
            if is_large:
                large_gap = (
                    f"engine and trainer differ by {gap:.4f} nats a token, above logprob_gap_alarm {self._gap_alarm}. "
                    f"Likely causes, the likeliest first: {'; '.join(self._causes)}."
                )
                alarms = [large_gap, *alarms]
        self._record.add(step, metrics, log)
        show_step(step, metrics, log.entries, alarms)
        return metrics


def show_step(step: int, metrics: Mapping[str, Any], entries: Mapping[str, Any], alarms: Sequence[str]) -> None:
    """Prints a step's metrics, the decision about the draft head, the state of the remote drafters, and the alarms."""
    print(f"  • specrollout: {in_a_line(metrics)}", flush=True)
    if (refresh := entries.get("draft_refresh")) is not None:
        print(f"  • specrollout draft head: {refresh.get('gate', refresh['decision'])}", flush=True)
    if (stats := entries.get("draft_supply")) is not None:
        print(f"  • specrollout drafters: {in_words(stats)}", flush=True)
    for sentence in alarms:
        Console(stderr=True).print(f"specrollout ALARM, step {step}: {sentence}", style="bold red", highlight=False)


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
    block, stale_kv, is_controlled = asynchronous_block(tree), stale_kv_field(tree), at(tree, "async_rl") is not None
    causes = []
    if at(tree, "policy.draft.enabled"):
        causes.append("draft weights entered a module that the drafter shares with the policy (docs/upstream)")
    if is_controlled or block is not None:
        lag = "async_rl.sampler" if is_controlled else f"{block}.max_trajectory_age_steps"
        causes.append(f"samples of an older policy ({lag}), which is no fault if the gap stays small")
    if stale_kv is not None:
        causes.append(f"KV of older weights ({stale_kv}: false)")
    causes.append("weights that did not arrive in the engine at the last refit")
    if any(at(tree, path) != "float32" for path in (f"{VLLM_CFG}.precision", "policy.precision")):
        rounding = "rounding: engine and trainer compute in low precision"
        causes.append(f"{rounding}; raise logprob_gap_alarm if it was so from the start")
    return causes
