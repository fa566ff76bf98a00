# SPDX-License-Identifier: Apache-2.0
"""The log of a training step, which passes from the supervisor of the engines to NeMo-RL's logger."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class StepLog:
    """Log of a training step. The supervisor of the engines fills it, and the logger takes it."""

    figures: dict[str, float] = field(default_factory=dict)
    """Metrics by name that the logger adds to those that NeMo-RL logs."""
    entries: dict[str, Any] = field(default_factory=dict)
    """Structured entries by name, which are written into the step's line of `metrics.jsonl`."""
    alarms: list[str] = field(default_factory=list)
    """Sentences for the user, which are recorded and printed."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Statistics of samples, which are written into the step's line of `samples.jsonl`."""
    files: dict[str, str] = field(default_factory=dict)
    """Content of whole files by name. They are written into the folder of the records, and replace older ones."""
    source: Callable[[], Callable[[], dict[str, float]] | None] | None = None
    """Weak reference to a function that computes `figures`. The logger uses it in loops of NeMo-RL that never ask for this
    package's metrics."""

    def take(self, *, request_figures: bool = False) -> "StepLog":
        """Returns the log and clears it.

        With `request_figures`, `figures` is taken from the function of `source` if nothing else has filled it.
        """
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
"""Log of the process that supervises the engines, which is NeMo-RL's driver or the actor of its SingleController."""
