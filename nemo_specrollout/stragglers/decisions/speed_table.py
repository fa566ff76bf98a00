# SPDX-License-Identifier: Apache-2.0
"""Measured decode speeds of each draft method, by task and by the number of requests in the engine.

SpecActor (arXiv 2511.16193), Algorithm 3, instead ranks methods by their acceptance rate alone, in a "draft ladder".
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nemo_specrollout.config.block import SpecrolloutConfig

ANY_TASK = "any"
"""Name under which the measurements of all tasks are counted together."""
PLAIN = "plain"
"""Name of the draft method without drafts."""
MEMORY_S = 20.0
"""Seconds of an engine's decoding that a measurement remembers. Older samples decay."""
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024])
"""Batch sizes that have measurements of their own. A batch of another size counts for the nearest of these."""
GUESSED_SLOPE = 0.5
"""Beyond the measured batch sizes, the speed of a request is assumed to be proportional to batch ** -GUESSED_SLOPE."""


def draft_method(block: SpecrolloutConfig) -> str:
    """Returns the name of an engine's draft method, which is made of the types of all drafters in the engine's block."""
    return "+".join(d.type for d in block.drafters) or PLAIN


class SpeedModel(Protocol):
    """Decode and prefill speeds of engines, measured or simulated."""

    def tokens_per_s(self, method: int, batch: int) -> float:
        """Returns the tokens per second of each request in a batch of `batch` typical requests, with this draft method."""

    def prefill_s(self, num_tokens: int) -> float:
        """Returns the seconds of a prefill of `num_tokens` tokens, during which the engine's other requests wait."""


class DecodeSpeedTable:
    """Decode speeds by draft method and batch size. Owns all measurements, of which old ones decay.

    A method's number is its index in `methods`. Where measured speeds rise with the batch size, a weighted isotonic regression
    makes them equal. Between measured batch sizes, the logarithm of the speed is interpolated over the logarithm of the size.
    A method without measurements gets the mean speed of the others. If nothing was measured, speeds are in an arbitrary unit,
    so only their ratios have a meaning, and a prefill takes 0 s.

    For example, after `observe("any", 0, 1, 300, 2.0)`, `tokens_per_s(0, 1)` is 150 and `tokens_per_s(0, 4)` is a guess of 75.
    """

    def __init__(self, methods: Sequence[str]) -> None:
        self.methods = tuple(methods)
        self.prefill = _DecayedRate()
        """Number of prefilled tokens and the seconds that they took."""
        self.rates: dict[tuple[str, int], _RatesByBatch] = defaultdict(_RatesByBatch)
        """Measured decode speeds of each pair of a task and a method, by batch size."""
        self._curves: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def observe(self, task: str, method: int, batch: int, num_tokens: int, seconds: float) -> None:
        """Adds a measurement of requests of `task` in an engine that had `batch` requests.

        The requests have generated `num_tokens` tokens in `seconds` seconds. Both are sums over the requests.
        """
        size = int(SIZES[np.argmin(np.abs(np.log(SIZES / batch)))])
        for name in {task, ANY_TASK}:
            self.rates[name, method][size].add(num_tokens, seconds)
        self._curves.clear()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Adds a measurement of prefills, which took `seconds` for `num_tokens` tokens."""
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
    """Measured tokens per second of one request, by batch size. Seconds are summed over the requests of a batch.

    Because of this sum, the memory of each rate is `MEMORY_S` multiplied by the batch size. So each rate remembers `MEMORY_S`
    seconds of the engine's time.
    """

    def __missing__(self, batch: int) -> _DecayedRate:
        self[batch] = _DecayedRate(MEMORY_S * batch)
        return self[batch]

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the measured batch sizes in ascending order, and the logarithms of their tokens per second, both float64.

        Speeds are averaged where they would rise with the batch size, so that they never do.
        """
        from scipy.optimize import isotonic_regression

        sizes = np.array(sorted(self), float)
        rates = np.array([self[int(b)].ratio for b in sizes])
        weights = np.array([self[int(b)].seconds / b for b in sizes])
        return sizes, np.log(isotonic_regression(rates, weights=weights, increasing=False).x)
