# SPDX-License-Identifier: Apache-2.0
"""Where commands print."""

from rich.console import Console

# Columns of what goes into a file.
_WIDTH_OF_LOGS = 120


def log_console() -> Console:
    """The terminal as it is, or a file of a width that tables fit in."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH_OF_LOGS
    return console
