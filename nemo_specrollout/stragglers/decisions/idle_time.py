# SPDX-License-Identifier: Apache-2.0
"""The worth of work on texts of coming steps (`run_ahead`), which an idle engine can do instead of helping with stragglers.

An engine whose requests have ended can take over a straggler, race for one, or go on with early texts. All three are measured
in seconds of a rollout, so they can be compared. A move that ends the rollout a second earlier saves a second. A second of
early work saves what the engine itself has measured (`run_ahead/decisions/early_share.py`). That saving concerns the rollout
of one engine, but a rollout ends only when all engines have ended, so the saving is divided by the number of engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class EarlyWorth(NamedTuple):
    """The worth of an engine's work for coming steps. The default is that of an engine without such work."""

    rates: tuple[float, ...] = ()
    """Seconds saved later in this engine for each second of work beside 0, 1, 2, ... requests of the current step."""
    left_s: float = 0.0
    """Seconds saved later in this engine if all of the work is done."""


NOTHING_EARLY = EarlyWorth()


@dataclass(frozen=True)
class IdleTime:
    """The worth of early work in each engine. Without `run_ahead` there is no early work."""

    worth_E: tuple[EarlyWorth, ...] = ()
    """Worth of the early work of each engine."""

    @property
    def has_worth(self) -> bool:
        """Whether any engine has early work to do."""
        return any(worth.left_s > 0.0 for worth in self.worth_E)

    def rate(self, engine: int, num_own: int) -> float:
        """Returns the seconds that an engine saves later for each second of early work beside `num_own` requests."""
        rates = self.worth_E[engine].rates if engine < len(self.worth_E) else ()
        return rates[min(num_own, len(rates) - 1)] if rates else 0.0

    def spared_s(self, engine: int, ends_s: Sequence[float], until_s: float) -> float:
        """Returns the seconds that an engine's early work until `until_s` saves later, if its requests end at `ends_s`.

        Early work that a request displaces is not lost if the engine still has time for it between the request's end and
        `until_s`. So the result is bounded only by the worth of all the work that is left.
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
