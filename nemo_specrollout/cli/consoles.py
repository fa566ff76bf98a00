# SPDX-License-Identifier: Apache-2.0
"""Output of the commands."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_LOG_WIDTH = 120
"""Columns of output that goes into a file."""


def log_console() -> Console:
    """Returns a console for standard output. If that is no terminal, its width fits all tables."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def new_table(names: Sequence[str], *, boxed: bool, left: Sequence[str] = ()) -> Table:
    """Returns a table with columns `names`, right-justified except for those in `left`. A log gets no box."""
    table = Table(box=box.ROUNDED if boxed else None, pad_edge=boxed)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def progress_bar(console: Console) -> Progress:
    """Returns a progress bar that disappears at its end, and that a log does not show."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def complain(sentence: str) -> None:
    """Prints a sentence as one line on stderr, with unprintable characters escaped."""
    line = " ".join(sentence.split())
    print(f"nemo-specrollout: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}", file=sys.stderr)
