# SPDX-License-Identifier: Apache-2.0
"""What a user of `refresh-draft` sees: bars on a terminal, a line about every 20 s anywhere, a closing table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from nemo_specrollout.training.refresh.refresh_round import Judgement

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


class RefreshView:
    """Prints to the terminal; owns nothing but the console."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", markup=False)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Shows that `text` is going on."""
        with self.console.status(text):
            yield

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar; yields the function that moves it."""
        with Progress(
            *_COLUMNS, console=self.console, transient=True, disable=not self.console.is_terminal
        ) as progress:
            task = progress.add_task(text, total=total)
            yield lambda done: progress.update(task, completed=done)

    @contextmanager
    def training(self) -> Iterator[Callable[[int, int, str], None]]:
        """A bar of steps; yields the function that is told step, total and the figures of the moment."""
        with Progress(
            *_COLUMNS, console=self.console, transient=True, disable=not self.console.is_terminal
        ) as progress:
            task = progress.add_task("training", total=None)
            yield lambda step, total, text: progress.update(task, completed=step, total=total, description=text)

    def judged(self, judgement: "Judgement") -> None:
        """Held-out acceptance before and after, by draft position."""
        before, after = judgement.before, judgement.after
        table = Table(title=f"held-out acceptance, {judgement.decision.num_samples} prompts", title_justify="left")
        for name in ("", *(["before"] if before else []), "after"):
            table.add_column(name, justify="right" if name else "left")
        for k, rate in enumerate(after.acceptance_rate_K):
            rates = [before.acceptance_rate_K[k], rate] if before else [rate]
            table.add_row(f"draft {k + 1}", *(f"{r:.3f}" for r in rates))
        lengths = [before.expected_length, after.expected_length] if before else [after.expected_length]
        table.add_row("acceptance length", *(f"{n:.3f}" for n in lengths))
        self.console.print(table)
