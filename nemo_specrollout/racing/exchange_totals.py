# SPDX-License-Identifier: Apache-2.0
"""What moves and races came to, over rollouts."""

from dataclasses import dataclass

from nemo_specrollout.racing.timeline import Timeline

_COUNTS = ("moves", "races", "won_by_racer", "diverged")


@dataclass
class TailTotals:
    """Sums of `Timeline.figures`; `saved_s` is None where it is known of no rollout."""

    moves: int = 0
    races: int = 0
    won_by_racer: int = 0
    diverged: int = 0
    saved_s: float | None = None

    def add(self, timeline: Timeline) -> None:
        """One more rollout, or requests of one."""
        figures = timeline.figures()
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + figures[name])
        if figures["saved_s"] is not None:
            self.saved_s = (self.saved_s or 0.0) + figures["saved_s"]

    def figures(self) -> dict[str, float]:
        """By name; what is not known is left out."""
        saved = {} if self.saved_s is None else {"saved_s": self.saved_s}
        return {**{name: float(getattr(self, name)) for name in _COUNTS}, **saved}
