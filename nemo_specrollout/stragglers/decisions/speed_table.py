# SPDX-License-Identifier: Apache-2.0
"""Measured decode speeds of each draft method, by task and by the number of requests in the engine.

SpecActor (arXiv 2511.16193), Algorithm 3, uses a "draft ladder" instead, which ranks methods by acceptance alone.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nemo_specrollout.config.block import SpecrolloutConfig

ANY_TASK = "any"
"""Task under which the measurements of all tasks are counted together."""
PLAIN = "plain"
"""Name of the method without drafts."""
MEMORY_S = 20.0
"""Seconds of an engine's decoding that a measurement remembers. Older samples decay."""
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024])
"""Batch sizes with separate measurements. Others count for the nearest one."""
GUESSED_SLOPE = 0.5
"""Beyond the measured batch sizes, the speed of a request is assumed to be proportional to batch ** -GUESSED_SLOPE."""


def draft_method(block: SpecrolloutConfig) -> str:
    """Returns the name of an engine's draft method, which joins the types of the drafters in the engine's block."""
    return "+".join(d.type for d in block.drafters) or PLAIN


class SpeedModel(Protocol):
    """Decode and prefill speeds of engines, measured or simulated."""

    def tokens_per_s(self, method: int, batch: int) -> float:
        """Returns the tokens per second of each of `batch` typical requests under a draft method."""

    def prefill_s(self, num_tokens: int) -> float:
        """Returns the seconds of a prefill of `num_tokens` tokens, for which the engine's other requests wait."""


class DecodeSpeedTable:
    """Decode speeds by draft method and batch size, in which old measurements decay. Owns all measurements.

    Methods are numbered as in `methods`. Speeds that rise with the batch size are evened out by weighted isotonic regression.
    Between measured batch sizes, log speed is interpolated over log size. A method without measurements gets the mean of the
    others. Without any measurement, only the ratios of the predictions are meaningful, and a prefill takes 0 s.

    Example: after `observe("any", 0, 1, 300, 2.0)`, `tokens_per_s(0, 1)` is 150 and `tokens_per_s(0, 4)` is a guess of 75.
    """

    def __init__(self, methods: Sequence[str]) -> None:
        self.methods = tuple(methods)
        self.prefill = _DecayedRate()
        """Prefilled tokens and their seconds."""
        self.rates: dict[tuple[str, int], _RatesByBatch] = defaultdict(_RatesByBatch)
        """Measurements by task and method."""
        self._curves: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def observe(self, task: str, method: int, batch: int, num_tokens: int, seconds: float) -> None:
        """Adds `num_tokens` tokens in `seconds`, both summed over requests of `task` in an engine with `batch` requests."""
        size = int(SIZES[np.argmin(np.abs(np.log(SIZES / batch)))])
        for name in {task, ANY_TASK}:
            self.rates[name, method][size].add(num_tokens, seconds)
        self._curves.clear()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Adds prefills of `num_tokens` tokens in `seconds`."""
        self.prefill.add(num_tokens, seconds)

    def tokens_per_s(self, method: int, batch: int) -> float:
        if not self.rates.get((ANY_TASK, method)):
            others = [m for m in range(len(self.methods)) if self.rates.get((ANY_TASK, m))]
            return float(np.mean([self.tokens_per_s(m, batch) for m in others])) if others else batch**-GUESSED_SLOPE
        if method not in self._curves:
            self._curves[method] = self.rates[ANY_TASK, method].curve()
        sizes, log_rates = self._curves[method]
        nearest = np.clip(batch, sizes[0], sizes[-1])
        rate = np.exp(np.interp(np.log(nearest), np.log(sizes), log_rates))
        return float(rate * (nearest / batch) ** GUESSED_SLOPE)

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill.ratio if self.prefill.seconds else 0.0

    def task_speed(self, task: str, method: int) -> float:
        """Returns the speed of a task's requests under `method` relative to typical requests, or 1 if it was not measured."""
        own, typical = (self.rates.get((name, method), _RatesByBatch()) for name in (task, ANY_TASK))
        shared = [(own[b].ratio, typical[b].ratio, own[b].seconds) for b in own if b in typical]
        weight = sum(s for _, _, s in shared)
        return float(np.exp(sum(s * np.log(a / b) for a, b, s in shared) / weight)) if weight else 1.0


@dataclass
class _DecayedRate:
    """Tokens per second over about the last `memory_s` seconds."""

    memory_s: float = MEMORY_S
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, num_tokens: float, seconds: float) -> None:
        keep = min(1.0, max(self.memory_s - seconds, 0.0) / self.seconds) if self.seconds else 0.0
        self.tokens = keep * self.tokens + num_tokens
        self.seconds = keep * self.seconds + seconds

    @property
    def ratio(self) -> float:
        return max(self.tokens, 1e-9) / self.seconds


class _RatesByBatch(dict[int, _DecayedRate]):
    """Rates of one method by batch size. The seconds of a rate are summed over the requests of the batch.

    So that each rate remembers `MEMORY_S` seconds of the engine, its memory is longer by the factor of the batch size.
    """

    def __missing__(self, batch: int) -> _DecayedRate:
        self[batch] = _DecayedRate(MEMORY_S * batch)
        return self[batch]

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the measured batch sizes in ascending order, and the logarithms of their tokens per second, both float64.

        The tokens per second are evened out so that they never rise with the batch size.
        """
        from scipy.optimize import isotonic_regression

        sizes = np.array(sorted(self), float)
        rates = np.array([self[int(b)].ratio for b in sizes])
        weights = np.array([self[int(b)].seconds / b for b in sizes])
        return sizes, np.log(isotonic_regression(rates, weights=weights, increasing=False).x)
