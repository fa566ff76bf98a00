# SPDX-License-Identifier: Apache-2.0
"""The log of a step, which passes from the supervisor of the engines to NeMo-RL's logger."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class StepLog:
    """Log of a step, which the supervisor fills and the logger takes."""

    figures: dict[str, float] = field(default_factory=dict)
    """Numbers by name that NeMo-RL's own metrics lack."""
    entries: dict[str, Any] = field(default_factory=dict)
    """Structured entries by name, which go into the step's line of `metrics.jsonl`."""
    alarms: list[str] = field(default_factory=list)
    """Sentences for the user, which are recorded and printed."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Sample stats, which go into the step's line of `samples.jsonl`."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of whole files by name, which replace the files of these names beside the records."""
    source: Callable[[], Callable[[], dict[str, float]] | None] | None = None
    """Weak reference to a function that returns the step's figures, for loops of NeMo-RL that never request them."""

    def take(self, *, request_figures: bool = False) -> "StepLog":
        """Returns and clears the log. With `request_figures`, figures that nothing has logged are requested from `source`."""
        request = self.source() if request_figures and self.source is not None else None
        if request is not None and not self.figures:
            self.figures = request()
        taken = replace(self)
        self.figures = {}
        self.entries = {}
        self.alarms = []
        self.samples = []
        self.files = {}
        return taken


STEP_LOG = StepLog()
"""Log of the process that supervises the engines: NeMo-RL's driver, or the actor of its SingleController."""
