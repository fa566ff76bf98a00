# SPDX-License-Identifier: Apache-2.0
"""Tables of measured seconds of verifying and drafting on a kind of device, by size of the engine and amount of work.

`specrollout-lab profile` writes such tables to a file, and `specrollout-lab explain` reads it. For other devices the file can
be written by hand. A size is a number of threads or GPUs. The amount of work is a number of rows or requests.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from nemo_specrollout.config.measured_file import MeasuredFile, check_columns
from nemo_specrollout.config.strict import ConfigError, bounded, choice

FORMAT = 1


@dataclass(frozen=True)
class CostCurve:
    """Seconds of an engine step by the amount of work, for engines of one size."""

    size: int = bounded(low=1)
    """Number of threads or GPUs of the engine."""
    counts: tuple[int, ...] = bounded(low=1)
    """Measured amounts of work in ascending order. They are rows of a verifier's engine step, or requests of a drafter's."""
    seconds: tuple[float, ...] = bounded(above=0.0)
    """Seconds of an engine step, for each of `counts`."""

    def check(self, path: str) -> None:
        """Raises ConfigError if the two lists differ in length or are empty, or if `counts` is not ascending."""
        check_columns(path, counts=self.counts, seconds=self.seconds)

    def at(self, count: float) -> float:
        """Returns the seconds of an engine step with `count` rows or requests, which never fall as `count` grows.

        They are interpolated linearly between measurements. Below the first measurement the curve is constant. Beyond the last
        one it has the slope of the upper half of the measurements, because the last two alone are too noisy.
        """
        known = self._pooled
        if count <= self.counts[-1]:
            return float(np.interp(count, self.counts, known))
        middle = (len(known) - 1) // 2
        width = self.counts[-1] - self.counts[middle]
        slope = (known[-1] - known[middle]) / width if width else 0.0
        return float(known[-1] + slope * (count - self.counts[-1]))

    @cached_property
    def _pooled(self) -> np.ndarray:
        from scipy.optimize import isotonic_regression  # loads for 0.3 s

        return isotonic_regression(self.seconds).x


@dataclass(frozen=True)
class CostTables(MeasuredFile):
    """Measurements for the placement planner. Example: `CostTables.read(path, "--profile").verify_s[0].at(64)`."""

    KIND: ClassVar = "profile"
    device: str
    """Description of the measured device."""
    policy: str
    """Folder or name of the policy."""
    draft_model: str
    """Folder or name of the draft model."""
    verify_s: tuple[CostCurve, ...]
    """Seconds of an engine step of the policy's engine by rows (requests and their draft tokens). There is a curve for each
    measured size of this engine in threads or GPUs."""
    unit: str = choice("thread", "GPU")
    """Unit of the engines' sizes."""
    draft_s: tuple[CostCurve, ...] = ()
    """Seconds in which a separate drafter drafts one token for each request, by number of requests. There is a curve for each
    measured size of the drafter's engine."""
    coupled_draft_s: tuple[CostCurve, ...] = ()
    """Seconds in which the policy's own engine drafts one token for each request, by number of requests. There is a curve for
    each measured size of the policy's engine."""
    format: int = bounded(FORMAT, low=FORMAT, high=FORMAT)
    """Version of the file format."""

    def check(self, path: str) -> None:
        """Raises ConfigError if a size has two curves in a table, or if `verify_s` is empty."""
        for name in ("verify_s", "draft_s", "coupled_draft_s"):
            sizes = sorted(curve.size for curve in getattr(self, name))
            if len(set(sizes)) < len(sizes):
                raise ConfigError(f"{name}: sizes {sizes}; keep one curve a size")
        if not self.verify_s:
            raise ConfigError("verify_s: empty; without it nothing can be planned")
