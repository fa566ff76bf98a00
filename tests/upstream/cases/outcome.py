# SPDX-License-Identifier: Apache-2.0
"""Reports of what a case has observed."""

import sys

MARK = "OUTCOME "


def report(is_right: bool, what: str) -> None:
    """Prints `what` for the table, and ends the process: 0 if the fault is not there, else 3."""
    print(MARK + what, flush=True)
    sys.exit(0 if is_right else 3)
