# SPDX-License-Identifier: Apache-2.0
"""What a step leaves in words, and sample by sample: NeMo-RL's metrics are numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def _nothing() -> None:
    return None


@dataclass
class StepNotes:
    """From the generation, which makes them, to the logger, which keeps them; both are on the driver.

    `figures` are numbers by name that NeMo-RL's own metrics lack. `words` go into the step's line of `metrics.jsonl`.
    `alarms` are sentences, which are also shown. `samples` are the lines of the step's samples.
    """

    figures: dict[str, float] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    source: Callable[[], Callable[[], dict[str, float]] | None] = _nothing
    """A weak reference to what has the step's figures, for a loop of NeMo-RL's that does not ask the generation."""

    def take(self, *, asks: bool = False) -> "StepNotes":
        """What was noted since last asked; with `asks` also the figures that nothing has asked for yet."""
        ask = self.source() if asks else None
        taken = StepNotes(self.figures or (ask() if ask else {}), self.words, self.alarms, self.samples)
        self.figures, self.words, self.alarms, self.samples = {}, {}, [], []
        return taken
