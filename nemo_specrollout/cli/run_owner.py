# SPDX-License-Identifier: Apache-2.0
"""Ends the driver of a run as soon as a later start of the run's job has taken over the run.

If a node loses its network, Slurm considers it dead and starts the job again on other nodes. But the node continues to
compute, and if it still reaches the shared disk, two drivers write checkpoints of the same run. So each start of the job
writes its name into a file of the run directory. The driver of an earlier start ends when it reads a name there that is not
its own.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from nemo_specrollout.reports.start_facts import NAME_OF_START

FILE = "SPECROLLOUT_NEWEST_START"
"""Environment variable with the path of the file that has the name of the newest start. The job's script sets it."""
INTERVAL_S = 10.0
"""Seconds between two reads of the file with the newest start's name. A new start takes far longer to begin its training."""
EXIT_TAKEN_OVER = 75
"""Exit code of a driver whose run was taken over by a later start. In sysexits.h it is EX_TEMPFAIL."""
EXIT_LOST = 69
"""Exit code of a run that has lost a process or a node. In sysexits.h it is EX_UNAVAILABLE. The job's script acts on it."""


def watch(environment: Mapping[str, str], interval_s: float = INTERVAL_S) -> None:
    """Starts a thread that ends this process as soon as a later start of the run's job has taken over the run.

    The thread reads the file that the environment variable `FILE` names, every `interval_s` seconds. If the file cannot be
    read, the thread tries again. Without this variable, as in a run that `launch` did not start, there is no thread.
    """
    file, own = environment.get(FILE), environment.get(NAME_OF_START)
    if file and own:
        threading.Thread(target=_end_if_taken_over, args=(Path(file), own, interval_s), daemon=True).start()


def _end_if_taken_over(file: Path, own: str, interval_s: float) -> None:
    while (newest := _read(file)) in ("", own):
        time.sleep(interval_s)
    text = f"job {newest} runs now, so this driver, of job {own}, ends; Slurm may have lost its node for a while"
    print(f"nemo-specrollout: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_TAKEN_OVER)  # the main thread may be inside a call that no exception ends


def _read(file: Path) -> str:
    """Returns the name of a start that is written in `file`, or "" if there is none or the file cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
