# SPDX-License-Identifier: Apache-2.0
"""Ray for this run alone: on the loopback interface, and closed to processes without the run's token.

The token is made here and inherited by child processes. Ray reads it when it is imported, so import `ray` from this module.
"""

import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OBJECT_STORE_BYTES = 512 << 20
"""Shared memory of Ray's object store: it holds the weights."""
_LONGEST_FOLDER = 40
"""Characters of the folder that Ray may be given: its socket names may have 107 bytes, of which Ray adds 66."""

if "ray" not in sys.modules:  # a program that has imported Ray has made its own choice
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Ray's switch for systems whose firewalls ask about each listener. Without it, Ray listens on all addresses.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray  # noqa: E402

__all__ = ["OwnRay", "ray"]


@contextmanager
def _keeps_sigterm_handler() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces when it starts and ends by one that aborts the process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


class OwnRay:
    """Ray, started here unless it already runs. Owns its processes and its folder. States: running, then stopped."""

    def __init__(self) -> None:
        """Starts Ray. A Ray that already runs stays its starter's."""
        self._folder: Path | None = None
        if ray.is_initialized():
            return
        base = tempfile.gettempdir()
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir=base if len(base) <= _LONGEST_FOLDER else "/tmp"))
        with _keeps_sigterm_handler():
            ray.init(
                address="local",
                num_gpus=0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self._folder),
            )

    def last_error(self, pid: int) -> str:
        """Returns the last line of an actor process on stderr, or an empty string. Ray's own marks begin with a colon."""
        files = [] if self._folder is None else self._folder.glob(f"session_latest/logs/worker-*-{pid}.err")
        lines = [line.strip() for file in files for line in file.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line and not line.startswith(":")), "")

    def stop(self) -> None:
        """Ends Ray and removes its folder, if it was started here."""
        if self._folder is not None:
            with _keeps_sigterm_handler():
                ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
