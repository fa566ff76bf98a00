# SPDX-License-Identifier: Apache-2.0
"""Ray for this run alone: on the loopback, and deaf to who lacks the token that is made here and that its processes inherit.
It looks for both when it is loaded, so load it from here."""

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
# Ray's sockets have names of up to 107 bytes, of which it makes 66 itself.
_LONGEST_FOLDER = 40

if "ray" not in sys.modules:  # who has loaded it has decided already
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Ray's switch for systems whose firewalls ask about each listener: without it, it listens on all addresses.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray  # noqa: E402

__all__ = ["OwnRay", "ray"]


@contextmanager
def _same_handler_of_sigterm() -> Iterator[None]:
    """Puts the handler back that Ray replaces, when it starts and when it ends: by its own the process aborts."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


class OwnRay:
    """Ray, if none runs yet. Owns its processes and its folder. States: running, then stopped."""

    def __init__(self) -> None:
        """Starts it, unless one runs, which then stays another's."""
        self._folder: Path | None = None
        if ray.is_initialized():
            return
        base = tempfile.gettempdir()
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir=base if len(base) <= _LONGEST_FOLDER else "/tmp"))
        with _same_handler_of_sigterm():
            ray.init(
                address="local",
                num_gpus=0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self._folder),
            )

    def last_words(self, pid: int) -> str:
        """The last line that a worker process wrote on stderr, empty if there is none that is known. Lines that begin with a
        colon are Ray's own marks."""
        files = [] if self._folder is None else self._folder.glob(f"session_latest/logs/worker-*-{pid}.err")
        lines = [line.strip() for file in files for line in file.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line and not line.startswith(":")), "")

    def stop(self) -> None:
        """Ends Ray and removes its folder, if it was started here."""
        if self._folder is not None:
            with _same_handler_of_sigterm():
                ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
