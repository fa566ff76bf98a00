# SPDX-License-Identifier: Apache-2.0
"""Where commands print."""

import sys

from rich.console import Console

# Columns of what goes into a file.
_WIDTH_OF_LOGS = 120


def log_console() -> Console:
    """The terminal as it is, or a file of a width that tables fit in."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH_OF_LOGS
    return console


def complain(sentence: str) -> None:
    """Prints what is wrong, in one line of stderr, whatever characters the user's values have."""
    line = " ".join(sentence.split())
    print(f"nemo-specrollout: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}", file=sys.stderr)
