# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM that cannot get lost: both end a command in the same way, and its exit code tells which it was."""

import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which Slurm sends before it kills a job."""


class Interrupts:
    """While entered, SIGINT raises KeyboardInterrupt as ever, SIGTERM raises Terminated, and both are remembered: where Python
    ignores exceptions, in a finalizer or a callback from C++, the first is swallowed. `check` then raises it again.

    Outside of the main thread, where Python sets no handlers, entering changes nothing.
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
        """Raises what a signal since entering asked for: KeyboardInterrupt or Terminated."""
        if self._asked is not None:
            raise self._asked

    def shield(self) -> None:
        """From now on signals are remembered but raise nothing: what has been done is being written down."""
        self._is_shielded = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        asked = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        self._asked = self._asked or asked
        if not self._is_shielded:
            raise asked
