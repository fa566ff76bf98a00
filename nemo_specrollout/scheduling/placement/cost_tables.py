# SPDX-License-Identifier: Apache-2.0
"""What verifying and drafting cost on a kind of device, as measured: seconds by size of the engine and by rows or requests.

`nemo-specrollout profile` writes such a file, `nemo-specrollout plan` reads it; by hand it is written for devices that are
elsewhere. A size is a number of threads, or of GPUs.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nemo_specrollout.config.files import read_regular
from nemo_specrollout.config.strict import ConfigError, bounded, build, check_rising, choice
from nemo_specrollout.scheduling.speculation.step_time import non_decreasing

FORMAT = 1


@dataclass(frozen=True)
class CostCurve:
    """Seconds of one step of an engine of a size, by how much it does."""

    size: int = bounded(low=1)
    """Threads or GPUs of the engine."""

    counts: tuple[int, ...] = bounded(low=1)
    """What was measured, rising: rows of a verifier's step, or requests that a drafter makes a token for."""

    seconds: tuple[float, ...] = bounded(above=0.0)
    """Of one step, for each of `counts`."""

    def check(self, path: str) -> None:
        """Raises ConfigError unless every count has its seconds."""
        if not self.counts or len(self.counts) != len(self.seconds):
            raise ConfigError(
                f"{path}.seconds: {len(self.seconds)} for {len(self.counts)} counts; give one for each, and at least one"
            )
        check_rising(f"{path}.counts", self.counts)

    def at(self, count: float) -> float:
        """Seconds of a step of `count`: between two measurements on the line through them, never falling as it grows.

        Below the first as at the first. Beyond the last on the slope of the upper half of the measurements, for the last two
        alone say little of it.
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
        return non_decreasing(np.array(self.seconds), np.ones(len(self.seconds)))


@dataclass(frozen=True)
class CostTables:
    """All that the placement planner knows of the devices. Example: `CostTables.from_json(text, name).verify_s[0].at(64)`."""

    device: str
    """What was measured, in words."""

    policy: str
    """The policy's folder or name."""

    draft_model: str
    """The draft model's folder or name."""

    verify_s: tuple[CostCurve, ...]
    """Seconds of a step of the policy's engine by rows: requests and their draft tokens. One curve a size."""

    unit: str = choice("thread", "GPU")
    """What a size counts."""

    draft_s: tuple[CostCurve, ...] = ()
    """Seconds in which a drafter's engine makes one token for each request, by requests. One curve a size."""

    coupled_draft_s: tuple[CostCurve, ...] = ()
    """Seconds of one draft token for each request where the policy's own engine drafts, by requests. One curve a size."""

    format: int = bounded(FORMAT, low=FORMAT, high=FORMAT)
    """The version of this file's format."""

    def check(self, path: str) -> None:
        """Raises ConfigError if a size has two curves, or nothing verifies."""
        for name in ("verify_s", "draft_s", "coupled_draft_s"):
            sizes = sorted(sizes_of(getattr(self, name)))
            if len(set(sizes)) < len(sizes):
                raise ConfigError(f"{name}: sizes {sizes}; keep one curve a size")
        if not self.verify_s:
            raise ConfigError("verify_s: empty; without it nothing can be planned")

    def to_json(self) -> str:
        """The file's text; `from_json` is its inverse."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path, field: str) -> "CostTables":
        """From the file `path`, which the user named as `field`. Raises ConfigError with the field, the value and the fix."""
        try:
            text = read_regular(path).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{field}: {path} cannot be read ({type(error).__name__}); `nemo-specrollout profile` writes such a file"
            ) from error
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, name: str) -> "CostTables":
        """From the text of the file `name`. Raises ConfigError with the field, the value and the fix."""
        try:
            return build(cls, json.loads(text), "")
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}: not JSON ({error}); `nemo-specrollout profile` writes such a file") from error
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error


def sizes_of(curves: Sequence[CostCurve]) -> list[int]:
    """The sizes that were measured."""
    return [curve.size for curve in curves]
