# SPDX-License-Identifier: Apache-2.0
"""How much time an idle engine can save by decoding requests of coming steps (`run_ahead`) instead of helping with stragglers.

An engine whose requests have ended can take over a straggler, race for one, or decode requests of coming steps early. This
last choice is called early work. All three choices are measured in seconds of a rollout, so that they can be compared. A move
that ends the rollout one second earlier saves one second. The engine itself measures how much time a second of early work
saves (`run_ahead/decisions/early_share.py`). This time is saved only in the engine's own part of a later rollout, but a
rollout ends only when all engines have ended. Therefore the saving is divided by the number of engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class EarlyWorth(NamedTuple):
    """How much time an engine saves later by decoding requests of coming steps. By default there are no such requests."""

    rates: tuple[float, ...] = ()
    """Seconds saved later with each second in which the engine decodes requests of coming steps. The entries are for an engine
    that has 0, 1, 2, ... requests of the current step at the same time."""
    left_s: float = 0.0
    """Seconds saved later if all requests of coming steps are decoded as far as they can be."""


NOTHING_EARLY = EarlyWorth()


@dataclass(frozen=True)
class IdleTime:
    """How much time each engine saves later by early work, which is decoding requests of coming steps."""

    worth_E: tuple[EarlyWorth, ...] = ()
    """For each engine, how much time it can save later by early work. Empty without `run_ahead`."""

    @property
    def has_worth(self) -> bool:
        """Whether any engine can save time by decoding requests of coming steps."""
        return any(worth.left_s > 0.0 for worth in self.worth_E)

    def rate(self, engine: int, num_own: int) -> float:
        """Returns the seconds saved later with each second in which an engine decodes requests of coming steps.

        The engine has `num_own` requests of the current step at the same time.
        """
        rates = self.worth_E[engine].rates if engine < len(self.worth_E) else ()
        return rates[min(num_own, len(rates) - 1)] if rates else 0.0

    def spared_s(self, engine: int, ends_s: Sequence[float], until_s: float) -> float:
        """Returns the seconds that are saved later if an engine decodes requests of coming steps from now until `until_s`.

        Its requests of the current step end at `ends_s`, in seconds from now. At each time the saving depends on how many of
        them are still running (`rate`). The result is at most what the engine saves by decoding all requests of coming steps.
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
