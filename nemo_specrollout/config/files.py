# SPDX-License-Identifier: Apache-2.0
"""Files that are never half-written."""

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file at `path` by `content`, text as UTF-8; it is on disk when this returns.

    Raises OSError, and leaves what was there. A process that dies meanwhile may leave `.<name>.<pid>` beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a power cut, where the file system can."""
    with suppress(OSError):  # some network file systems have no such thing
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
