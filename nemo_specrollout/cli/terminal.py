# SPDX-License-Identifier: Apache-2.0
"""Helpers of all commands: output to the terminal, handling of Ctrl-C and SIGTERM, and a folder for temporary files."""

import fcntl
import getpass
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PREFIX = "specrollout-"
LOCK = "in_use"
"""Name of the file in a scratch folder that the command which uses the folder keeps locked."""
LEFT_BEHIND_S = 3600.0
"""Age in seconds from which a command removes an unlocked scratch folder of an earlier command.

A younger folder may belong to a command that has not locked it yet.
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def log_console() -> Console:
    """Returns a rich console for standard output. If standard output is not a terminal, its lines have 120 characters."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not console.is_terminal:
        console.width = 120
    return console


def progress_bar(console: Console) -> Progress:
    """Returns a progress bar that disappears at its end. If the console is not a terminal, it shows nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def complain(sentence: str, program: str = "nemo-specrollout") -> None:
    """Prints the program's name and a sentence as one line on stderr. Escapes unprintable characters."""
    line = " ".join(sentence.split())
    print(f"{program}: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}", file=sys.stderr)


class Terminated(KeyboardInterrupt):
    """The exception that `Interrupts` raises at the signal SIGTERM, which Slurm sends before it kills a job."""


class Interrupts:
    """Context in which the signal SIGINT raises KeyboardInterrupt, and SIGTERM raises Terminated.

    If such an exception is raised in a finalizer or in a callback from C++, Python drops it. So the context remembers it, and
    `check` raises it again. In threads other than the main thread the context does nothing, because only the main thread can
    set signal handlers.
    """

    def __init__(self) -> None:
        self._asked: KeyboardInterrupt | None = None

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._before = {s: signal.signal(s, self._interrupt) for s in _SIGNALS} if in_main_thread else {}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises the exception of the first signal since the context was entered. Does nothing if there was no signal."""
        if self._asked is not None:
            raise self._asked

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        asked = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        self._asked = self._asked or asked
        raise asked


@contextmanager
def scratch_folder() -> Iterator[None]:
    """Context in which temporary files of this process and its children go into a new folder.

    The folder is removed at the end. Otherwise vLLM would leave a file behind for each engine, and Ray a folder for each run.
    The context also removes such folders of earlier commands that were killed.
    """
    usual = Path(tempfile.gettempdir())
    named = os.environ.get("TMPDIR")
    with suppress(KeyError, OSError):  # a user without a name
        # Compiled kernels stay for the next run.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(usual / f"torchinductor_{getpass.getuser()}"))
    for left in usual.glob(f"{PREFIX}*"):
        with suppress(OSError), (left / LOCK).open() as lock:  # it is another user's, in use, or of another kind
            if time.time() - left.stat().st_mtime > LEFT_BEHIND_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with (folder / LOCK).open("w") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        try:
            yield
        finally:
            tempfile.tempdir = None
            if named is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = named
            shutil.rmtree(folder, ignore_errors=True)
