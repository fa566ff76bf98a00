# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM that cannot get lost: both end a command in the same way, with different exit codes."""

import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which Slurm sends before it kills a job."""


class Interrupts:
    """Context in which SIGINT raises KeyboardInterrupt, SIGTERM raises Terminated, and both are remembered.

    Python ignores exceptions in a finalizer or a callback from C++, so an interrupt may get lost there. `check` raises it
    again. Outside of the main thread, where Python sets no signal handlers, the context changes nothing.
    """

    def __init__(self) -> None:
        self._asked: KeyboardInterrupt | None = None
        self._is_shielded = False

    def __enter__(self) -> "Interrupts":
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._before = {s: signal.signal(s, self._interrupt) for s in _SIGNALS} if in_main_thread else {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises the KeyboardInterrupt or Terminated of the first signal since entering."""
        if self._asked is not None:
            raise self._asked

    def shield(self) -> None:
        """Keeps later signals from raising anything, while results are written. They are still remembered."""
        self._is_shielded = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        asked = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        self._asked = self._asked or asked
        if not self._is_shielded:
            raise asked
