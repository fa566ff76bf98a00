# SPDX-License-Identifier: Apache-2.0
"""`specrollout-lab`, which waits in one phase of one step: `phased_run.py PHASE STEP MARKER ARGUMENTS`.

The phase makes the file MARKER, and goes on when the test has removed it.
Only the clock of a run is touched: what runs is the product.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.cli.main import main
from lab.local import run_report
from lab.local.policy import MegatronPolicy
from lab.local.runner import GrpoRunner

# Longest wait, for the case that the test has ended.
WAIT_S = 120.0


def main_in_phases(phase: str, step: int, marker: Path, arguments: list[str]) -> int:
    """Runs a command, which waits for the removal of `marker` when the phase of that step begins."""

    def waits(owner: Any, name: str, calls_before: int) -> None:
        native: Callable[..., Any] = getattr(owner, name)
        calls = [0]

        def waiting(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == calls_before + 1:
                marker.touch()
                until = time.monotonic() + WAIT_S
                while marker.exists() and time.monotonic() < until:  # a signal's handler runs between these
                    time.sleep(0.01)
            return native(*args, **kwargs)

        setattr(owner, name, waiting)

    if phase == "start":
        waits(GrpoRunner, "_load_policy", 0)
    elif phase == "rollout":
        waits(GrpoRunner, "roll_out", step)
    elif phase == "training":
        waits(MegatronPolicy, "train_step", step)
    elif phase == "refit":
        waits(GrpoRunner, "refit", step)
    elif phase == "checkpoint":
        waits(sys.modules["lab.local.policy"], "_save", step)
    elif phase == "report":
        waits(run_report, "write_pages", 0)
    else:
        raise ValueError(phase)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(main_in_phases(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
