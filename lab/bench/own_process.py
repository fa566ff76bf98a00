# SPDX-License-Identifier: Apache-2.0
"""Runs a part of a bench in a process of its own, which measures one way and prints its figures as JSON."""

import json
import subprocess
import sys


def figures_of_process(module: str, *options: str) -> dict[str, float]:
    """Runs `python -m module options` in a new process, and returns the figures that it prints as JSON in its last line.

    What the process writes to stderr goes to this process's stderr.
    """
    said = subprocess.run(
        [sys.executable, "-m", module, *options], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return dict(json.loads(said.splitlines()[-1]))
