# SPDX-License-Identifier: Apache-2.0
"""Terminal output of a run, with the current phase, the rollout's progress, and a line for every finished step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.local.timeline import describe as describe_tail
from nemo_specrollout.cli.terminal import progress_bar
from nemo_specrollout.remote.protocol.drafter_stats import in_words

_HEADER = " step  reward  length   rollout  speedup tok/step       equal   train      gap"


class Progress:
    """Prints to the terminal. Owns the console."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._has_header = False

    def warn(self, sentence: str) -> None:
        """Prints a warning in a line of its own."""
        self.console.print(sentence, style="yellow", markup=False, soft_wrap=True)

    def phase(self, text: str) -> AbstractContextManager[object]:
        """Returns a context that shows `text` in the terminal while it lasts."""
        return self.console.status(text)

    def engine_started(self, facts: Mapping[str, Any]) -> None:
        """Prints the settings that are in force in the engine, and what it has taken over from earlier starts."""
        scheduling = "asynchronous" if facts["async_scheduling"] else "synchronous"
        self.console.print(
            f"engine: vLLM {facts['vllm']}, {facts['model_runner']} model runner, {scheduling} scheduling, CUDA graphs "
            f"{facts['cudagraph_mode']}",
            style="dim",
        )
        if facts.get("began"):
            self.console.print(f"engine: {facts['began']}", style="dim", markup=False)

    @contextmanager
    def rollout(self, step: int, num_requests: int) -> Iterator[Callable[[int], None]]:
        """Shows a bar of finished requests while the context lasts, and yields the function that sets their number."""
        with progress_bar(self.console) as bar:
            task = bar.add_task(f"step {step}: rollout", total=num_requests)
            yield lambda done: bar.update(task, completed=done)

    def step_done(self, record: dict[str, Any]) -> None:
        """Prints the line of a finished step, and its alarms."""
        if not self._has_header:
            self.console.print(_HEADER, style="bold")
            self._has_header = True
        speedup = record["speedup_estimate"]
        self.console.print(
            f"{record['step']:>5} {record['reward']:>7.3f} {record['mean_gen_tokens_per_sample']:>7.1f} "
            f"{record['rollout_s']:>7.2f} s {'-' if speedup is None else f'{speedup:.2f}x':>8} "
            f"{record['acceptance_length']:>8.2f} {record['tokens_equal']:>5}/{record['tokens_checked']:<5} "
            f"{record['train_s']:>5.1f} s {record['logprob_gap']:>8.1e}"
        )
        if "draft_supply" in record:
            self._note(in_words(record["draft_supply"]), "dim")
        if "tail" in record and (words := describe_tail(record["tail"])):
            self._note(words, "dim")
        for alarm in record["alarms"]:
            self._note(f"ALARM: {alarm}", "bold red")

    def summary(self, summary: dict[str, Any], run_dir: str) -> None:
        """Prints the table at the end of a run, and where its report and picture are."""
        table = Table(
            title=f"{summary['steps']} steps in {summary['wall_s']:.0f} s", show_header=False, title_justify="left"
        )
        for name, value in _summary_rows(summary) if summary["steps"] else [("steps", "none finished")]:
            table.add_row(name, value)
        self.console.print(table)
        self.console.print(
            f"report  {run_dir}/report.html\npicture {run_dir}/picture.png", markup=False, soft_wrap=True
        )

    def _note(self, text: str, style: str) -> None:
        """Prints `text` below the line of a step. Brackets are not read as markup."""
        self.console.print(f"      {text}", style=style, markup=False, soft_wrap=True)


def _summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    speedup = summary["speedup_estimate"]
    first, last = ("-" if (v := summary[key]) is None else f"{v:.3f}" for key in ("reward_first", "reward_last"))
    return [
        ("rollout speedup over plain (estimate)", "-" if speedup is None else f"{speedup:.2f}x"),
        ("tokens equal to plain decoding", f"{summary['tokens_equal']} of {summary['tokens_checked']} checked"),
        (f"reward, first and last {summary['reward_averaged_over_steps']} steps", f"{first} -> {last}"),
        ("tokens per request and engine step", f"{summary['acceptance_length']:.2f}"),
        ("alarms", str(summary["alarms"])),
        *([("processes that died", str(summary["deaths"]))] if summary["deaths"] else []),
    ]
