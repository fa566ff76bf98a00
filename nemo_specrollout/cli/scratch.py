# SPDX-License-Identifier: Apache-2.0
"""One folder for all temporary files of a command and its child processes, removed when the command ends."""

import fcntl
import getpass
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "specrollout-"
"""Beginning of a folder's name."""
LOCK = "in_use"
"""File that the owner of a folder holds locked."""
LEFT_BEHIND_S = 3600.0
"""Least age, in seconds, of an unlocked folder that a later command removes. A younger one may be about to be locked."""


@contextmanager
def scratch_folder() -> Iterator[None]:
    """Context in which temporary files of this process and its children go into a new folder, which is then removed.

    vLLM leaves a file of each engine, and Ray a folder of each run. Folders that killed commands left are removed as well.
    """
    usual, named = Path(tempfile.gettempdir()), os.environ.get("TMPDIR")
    with suppress(KeyError, OSError):  # a user without a name
        # Compiled kernels stay for the next run.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(usual / f"torchinductor_{getpass.getuser()}"))
    _remove_left_behind(usual)
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


def _remove_left_behind(usual: Path) -> None:
    """Removes folders of commands that were killed."""
    for folder in usual.glob(f"{PREFIX}*"):
        with suppress(OSError), (folder / LOCK).open() as lock:  # another user's, or not one of these
            if time.time() - folder.stat().st_mtime > LEFT_BEHIND_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
