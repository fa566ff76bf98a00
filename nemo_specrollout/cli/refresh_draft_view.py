# SPDX-License-Identifier: Apache-2.0
"""Terminal output of `refresh-draft`: progress bars on a terminal, lines of text anywhere, and a closing table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from nemo_specrollout.training.refresh.candidate import Judgement


class TerminalView:
    """Prints to a console; implements `refresh_job.RefreshView`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self.console.print(f"warning: {text}", style="yellow", markup=False)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Shows `text` while the block runs."""
        with self.console.status(text):
            yield

    @contextmanager
    def bar(self, text: str, total: int | None = None) -> Iterator[Callable[..., None]]:
        """Shows a progress bar while the block runs.

        Yields the function that moves the bar: `move(done)`, or `move(done, total=..., description=...)`.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            task = progress.add_task(text, total=total)
            yield lambda done, **changes: progress.update(task, completed=done, **changes)

    def judged(self, judgement: "Judgement") -> None:
        """Prints a table of the held-out acceptance before and after, by draft position."""
        before, after = judgement.before, judgement.after
        measured = [after] if before is None else [before, after]
        table = Table(title=f"held-out acceptance, {judgement.decision.num_samples} prompts", title_justify="left")
        for name in ("", "before", "after") if before else ("", "after"):
            table.add_column(name, justify="right" if name else "left")
        for k in range(len(after.acceptance_rate_K)):
            table.add_row(f"draft {k + 1}", *(f"{a.acceptance_rate_K[k]:.3f}" for a in measured))
        table.add_row("acceptance length", *(f"{a.expected_length:.3f}" for a in measured))
        self.console.print(table)
