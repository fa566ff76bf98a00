# SPDX-License-Identifier: Apache-2.0
"""Output of the commands."""

import sys

from rich.console import Console

_LOG_WIDTH = 120
"""Columns of output that goes into a file."""


def log_console() -> Console:
    """Returns a console for standard output. If that is no terminal, its width fits all tables."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def complain(sentence: str) -> None:
    """Prints a sentence as one line on stderr, with unprintable characters escaped."""
    line = " ".join(sentence.split())
    print(f"nemo-specrollout: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}", file=sys.stderr)
