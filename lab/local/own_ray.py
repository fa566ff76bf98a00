# SPDX-License-Identifier: Apache-2.0
"""A Ray that only this run uses.

It listens on the loopback interface, and refuses processes without the run's token (`ray_settings.py`).
"""

import errno
import logging
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lab.local import ray_settings  # noqa: F401  comes first, because vLLM imports Ray

# isort: split
import psutil
import ray

_MAX_TRIES = 3
"""Most tries to start Ray. Each of them ends after the 30 seconds that Ray itself allows (`ray/_private/node.py`)."""
_END_S = 10.0
"""Most seconds to wait for the end of processes that have been killed."""
_OBJECT_STORE_BYTES = 512 << 20
"""Bytes of shared memory for Ray's object store, which holds the weights."""
_LONGEST_FOLDER = 40
"""Most characters in the path of Ray's folder. A socket's path may have 107, and Ray uses 66 of them for its own part."""


class OwnRay:
    """Ray for this run. Unless Ray already runs, this object starts it, and owns its processes and its folder until `stop`."""

    def __init__(self) -> None:
        """Starts Ray, or uses the Ray that already runs in this process. `stop` leaves such a Ray running.

        Raises TimeoutError if Ray has not started after several tries, as on a machine with far too much to do.
        """
        self._folder = None if ray.is_initialized() else _start()

    def last_error(self, pid: int) -> str:
        """Returns the last line on stderr of an actor process, or "". Ray's own lines begin with a colon and are skipped."""
        files = [] if self._folder is None else self._folder.glob(f"session_latest/logs/worker-*-{pid}.err")
        lines = [line.strip() for file in files for line in file.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line and not line.startswith(":")), "")

    def stop(self) -> None:
        """Ends Ray and removes its folder, if this object has started it."""
        if self._folder is not None:
            with _keeps_sigterm_handler():
                ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _start() -> Path:
    """Starts Ray and returns its folder. Each try has a folder of its own. Raises TimeoutError if all tries fail."""
    base = tempfile.gettempdir()
    for _ in range(_MAX_TRIES):
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir=base if len(base) <= _LONGEST_FOLDER else "/tmp"))
        children = _children()
        try:
            with _keeps_sigterm_handler():
                ray.init(
                    address="local",
                    num_gpus=0,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=str(folder),
                    _system_config={"worker_niceness": 0},  # by default any other process of the machine comes first
                )
            return folder
        except BaseException as error:
            _end(_children() - children)
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, Exception):  # the user has interrupted the run
                raise
            last_error = " ".join(str(error).split())
    sentence = f"Ray has not started in {_MAX_TRIES} tries, most likely because this machine is too busy ({last_error})"
    raise TimeoutError(errno.ETIMEDOUT, sentence)


def _children() -> set[psutil.Process]:
    """Returns the processes that this one has started itself."""
    return set(psutil.Process().children())


def _end(children: set[psutil.Process]) -> None:
    """Kills the processes and all that they have started. Each is stopped first, so that it starts no more."""
    family = []
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.suspend()
            family += [*child.children(recursive=True), child]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=_END_S)


@contextmanager
def _keeps_sigterm_handler() -> Iterator[None]:
    """Returns a context that keeps the process's handler of SIGTERM, which Ray replaces when it starts and ends."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
