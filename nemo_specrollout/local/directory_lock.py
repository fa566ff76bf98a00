# SPDX-License-Identifier: Apache-2.0
"""The lock of a run directory. The kernel releases it when its process dies."""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO

from nemo_specrollout.config.strict import ConfigError

LOCK = "run.lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of a file system without locks, e.g. Lustre mounted without `flock`."""
_FIX = "wait for it to end, stop it, or choose another folder"


class DirectoryLock:
    """Holds `run.lock` of a folder, a file that names its holder. States: held, then released.

    `works` is false if the file system has no locks. Then two runs can use the folder at once.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock; makes the folder if it is missing. Raises ConfigError if another run holds the lock, OSError."""
        self._made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        self._file, self.works = _locked(self._path)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S%z")}
        self._file.truncate(0)
        self._file.write(json.dumps(holder))
        self._file.flush()

    def release(self) -> None:
        """Releases the lock, and removes the folder if it was made for the lock and is empty."""
        if self._file.closed:
            return
        # The lock is still held, so a process that opened the file before will see that it is gone.
        self._path.unlink(missing_ok=True)
        if self._made and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()
        self._file.close()


def _locked(path: Path) -> tuple[IO[str], bool]:
    """Opens and locks the file; returns it and whether locks work. Raises ConfigError if another process holds the lock."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"logger.log_dir: {path.parent} is in use by {_holder(file)}; {_FIX}") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return file, False
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file, True
        file.close()  # its holder removed it between `open` and `flock`


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}, which has run since {holder['started']}"
    except (ValueError, LookupError, TypeError):
        return "another process"
    finally:
        file.close()
