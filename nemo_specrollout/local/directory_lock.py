# SPDX-License-Identifier: Apache-2.0
"""One run for each directory: a lock that the kernel lets go of when its process dies, however it dies."""

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
# What a file system without locks answers, e.g. Lustre where it is mounted without `flock`.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_FIX = "wait for it to end, stop it, or choose another folder"


class DirectoryLock:
    """Holds `run.lock` of a folder, which names its holder. States: held, then released.

    `works` is false where the file system has no locks: then two runs are not kept apart.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock, and makes the folder if need be. Raises ConfigError if another run holds it, OSError."""
        self._made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        self._file, self.works = _locked(self._path)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S%z")}
        self._file.truncate(0)
        self._file.write(json.dumps(holder))
        self._file.flush()

    def release(self) -> None:
        """Lets go of the lock; a folder that was made for it, and in which nothing else is, goes with it."""
        if self._file.closed:
            return
        # The lock is held still: a process that opened the file before finds it gone.
        self._path.unlink(missing_ok=True)
        if self._made and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()
        self._file.close()


def _locked(path: Path) -> tuple[IO[str], bool]:
    """The lock file, open and still the one at `path`, and whether it could be locked. Raises ConfigError if it is held."""
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
        file.close()  # its holder removed it between the two lines above


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}, which runs since {holder['started']}"
    except (ValueError, LookupError, TypeError):
        return "another process"
    finally:
        file.close()
