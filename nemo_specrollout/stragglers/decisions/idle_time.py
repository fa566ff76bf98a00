# SPDX-License-Identifier: Apache-2.0
"""The worth of work on texts of coming steps (`run_ahead`), which an idle engine can do instead of helping with stragglers.

An engine whose requests have ended can take over a straggler, race for one, or work on texts of coming steps. This last choice
is called early work. To be compared, all three choices are measured in seconds of a rollout. A move that ends the rollout one
second earlier saves one second. What a second of early work saves, the engine measures itself
(`run_ahead/decisions/early_share.py`). It saves this time only in its own part of a later rollout, but a rollout ends only
when all engines have ended. Therefore the saving is divided by the number of engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class EarlyWorth(NamedTuple):
    """The worth of an engine's work for coming steps. By default the engine has no such work."""

    rates: tuple[float, ...] = ()
    """Seconds that this engine saves later with each second of work for coming steps. The entries are for an engine that has
    0, 1, 2, ... requests of the current step at the same time."""
    left_s: float = 0.0
    """Seconds that this engine saves later if all of the work is done."""


NOTHING_EARLY = EarlyWorth()


@dataclass(frozen=True)
class IdleTime:
    """The worth of each engine's early work, which is work for coming steps. Without `run_ahead` there is none."""

    worth_E: tuple[EarlyWorth, ...] = ()
    """For each engine, the worth of its early work."""

    @property
    def has_worth(self) -> bool:
        """Whether any engine has early work to do."""
        return any(worth.left_s > 0.0 for worth in self.worth_E)

    def rate(self, engine: int, num_own: int) -> float:
        """Returns the seconds that an engine saves later with each second of early work, while it has `num_own` requests."""
        rates = self.worth_E[engine].rates if engine < len(self.worth_E) else ()
        return rates[min(num_own, len(rates) - 1)] if rates else 0.0

    def spared_s(self, engine: int, ends_s: Sequence[float], until_s: float) -> float:
        """Returns the seconds that an engine's early work until `until_s` saves later, if its requests end at `ends_s`.

        Each second of work counts with the `rate` for the number of requests that the engine still has then. The result is at
        most the worth of all the work that is left.
        """
        spared_s = 0.0
        now_s = 0.0
        num_own = len(ends_s)
        for end_s in sorted(ends_s):
            next_s = min(end_s, until_s)
            spared_s += self.rate(engine, num_own) * (next_s - now_s)
            now_s = next_s
            num_own -= 1
        spared_s += self.rate(engine, 0) * max(until_s - now_s, 0.0)
        return min(spared_s, self.worth_E[engine].left_s if engine < len(self.worth_E) else 0.0)


NO_EARLY_WORK = IdleTime()
