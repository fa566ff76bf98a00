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
"""Name of the file by which `lock_folder` locks a folder. A folder that has only this file counts as empty."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file at `path` by one with `content`, and returns when it is on disk. Text is written as UTF-8.

    Raises OSError if that fails. The old file then stays as it is. If the process dies during the call, it may leave a
    temporary file in the folder.
    """
    with replacing_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Context that yields the path of a temporary file, which the caller has to write.

    If the `with` block succeeds, the temporary file is synced to disk and replaces the file at `path`. If the block fails, the
    temporary file is removed.
    """
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
    """Locks `folder` against other callers of this function, and returns an open file.

    The lock lasts until this file is closed. Raises BlockingIOError if another process has locked the folder. If the file
    system has no locks, logs a warning, and the folder is not locked.
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
    """Returns the content of a regular file, or its first `most_bytes` bytes.

    Raises OSError if the file cannot be read. Also raises it if `path` is not a regular file, because reading from a pipe may
    never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read(-1 if most_bytes is None else most_bytes)


def sync_folder(folder: Path) -> None:
    """Writes the names of the files in `folder` to disk, so that they survive a power cut.

    It does nothing if the file system cannot do this. Some network file systems cannot.
    """
    with suppress(OSError):
        sync(folder)


def sync(path: Path) -> None:
    """Waits until the content of a file, or the names of the files in a folder, are on disk. Raises OSError if that fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
