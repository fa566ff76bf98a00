# SPDX-License-Identifier: Apache-2.0
"""Ends a driver whose run was taken over by a later start of the run's job, and tells the job how a driver has ended.

A node that loses its network continues to compute, while Slurm considers it dead and starts the job again on other nodes. If
the node still reaches the shared disk, two drivers write checkpoints of one run. So each start of the job writes its name into
a file of the run directory, and the driver of an earlier start ends as soon as it reads another name than its own.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from nemo_specrollout.reports.start_facts import NAME_OF_START

FILE = "SPECROLLOUT_NEWEST_START"
"""Variable with the path of this file. The job's script sets it. Older copies of the code in run directories ignore it."""
INTERVAL_S = 10.0
"""Seconds between two checks of the file, which is short compared with a start of container, Ray and engines."""
EXIT_TAKEN_OVER = 75
"""Exit code of a driver whose run was taken over, EX_TEMPFAIL of sysexits.h."""
EXIT_LOST = 69
"""Exit code of a run that has lost a process or a node, EX_UNAVAILABLE of sysexits.h. The job's script reads it."""


def watch(environment: Mapping[str, str], interval_s: float = INTERVAL_S) -> None:
    """Starts a thread that ends this process when the file has another name than this start's.

    It does nothing for a run that `launch` has not started, and it keeps trying where the file cannot be read.
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
    """Returns the name in the file, or "" if it has none or the disk does not answer."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
