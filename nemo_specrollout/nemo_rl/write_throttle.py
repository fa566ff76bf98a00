# SPDX-License-Identifier: Apache-2.0
"""How often something may be written that takes long, beside a run that must not wait for it."""

import math


class WriteThrottle:
    """Owns when the last write ended and how long it took. A write of t seconds is followed by `rest` times t without one, and
    by `least_s` seconds at least: its share of the time is below 1 / `rest`.

    The caller passes the clock, seconds. The first write is due at once.
    """

    def __init__(self, rest: float = 100.0, least_s: float = 0.0) -> None:
        self._rest, self._least_s = rest, least_s
        self._due_s = -math.inf

    def is_due(self, now_s: float) -> bool:
        """Returns whether something may be written now."""
        return now_s >= self._due_s

    def wrote(self, began_s: float, ended_s: float) -> None:
        """Something was written, or was tried."""
        self._due_s = ended_s + max(self._rest * (ended_s - began_s), self._least_s)
