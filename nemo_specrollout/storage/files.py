# SPDX-License-Identifier: Apache-2.0
"""Writes files atomically, reads only regular files, and locks folders."""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""The file of `lock_folder`, which does not count as content of a folder."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file at `path` by `content`, which is on disk when this returns. Text is written as UTF-8.

    If this raises OSError, the old file stays. A process that dies during the call may leave a temporary file in the folder.
    """
    with replacing_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yields the path for a temporary file, which is synced and replaces the file at `path` if the `with` block succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def lock_folder(folder: Path) -> TextIO:
    """Returns a file that keeps other callers of this function out of `folder` until it is closed.

    Raises BlockingIOError if another process has the lock. Where the file system has no locks, nobody is kept out.
    """
    file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        reason = "another process works in this folder; wait for it, or name another"
        raise BlockingIOError(error.errno, reason, str(folder)) from error
    except OSError:
        logger.warning("%s: this file system has no locks; make sure that only one process writes", folder)
    return file


def read_regular(path: Path, most_bytes: int | None = None) -> bytes:
    """Returns the content of a file that the user named, at most the first `most_bytes` bytes.

    Raises OSError, also for a path that is not a regular file, because reading a pipe without a writer would never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read(-1 if most_bytes is None else most_bytes)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a power cut, if the file system supports that (some network ones do not)."""
    with suppress(OSError):
        sync(folder)


def sync(path: Path) -> None:
    """Writes a file's content, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
