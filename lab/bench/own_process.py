# SPDX-License-Identifier: Apache-2.0
"""Runs a bench again in a process of its own, which measures one way and prints its figures as JSON."""

import json
import subprocess
import sys


def figures_of_process(module: str, *options: str) -> dict[str, float]:
    """Runs `python -m module options`, and returns the JSON of the last line that it prints. Forwards its stderr to ours."""
    said = subprocess.run(
        [sys.executable, "-m", module, *options], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return dict(json.loads(said.splitlines()[-1]))
