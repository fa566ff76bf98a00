# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C that cannot get lost."""

import signal
from types import FrameType, TracebackType


class Interrupts:
    """While entered, SIGINT raises KeyboardInterrupt as ever, and is remembered: where Python ignores exceptions, in a
    finalizer or a callback from C++, the first is swallowed. `check` then raises it again."""

    def __init__(self) -> None:
        self._is_asked = False

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raises KeyboardInterrupt if SIGINT came since entering."""
        if self._is_asked:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        raise KeyboardInterrupt
