# SPDX-License-Identifier: Apache-2.0
"""What a step costs: seconds by the number of rows in the verify batch, learned while running.

A step's time is close to a function of its rows alone, whoever they belong to (measured, docs/benchmarks.md), plus a
constant for handling drafts. Samples are clipped and decayed, for clocks are noisy and contexts grow.
"""

from dataclasses import dataclass

import numpy as np

DECAY = 0.05
CLIP = 2.0
CLIP_FROM_WEIGHT = 3.0
BORROWED_WEIGHT = 0.25


@dataclass(frozen=True)
class StepCosts:
    """Predicted seconds of a step with r rows, without drafts (`plain_s[r]`) and with (`speculated_s[r]`)."""

    plain_s: np.ndarray
    speculated_s: np.ndarray


class StepTimeTable:
    """Decayed mean step times in buckets of rows, a quarter octave wide; owns the overhead of a step with drafts.

    Invariant: both predictions never fall as rows grow. Example: `observe(8, False, 0.004)`, then `costs().plain_s[8]`.
    """

    def __init__(self, max_rows: int) -> None:
        edges = np.unique(np.round(2.0 ** np.arange(0, np.log2(max_rows) + 0.26, 0.25)).astype(int))
        buckets = np.clip(np.searchsorted(edges, np.arange(max_rows + 1), "right") - 1, 0, None)
        self._bucket_of_row: list[int] = buckets.tolist()
        self._max_rows = max_rows
        # Lists, not arrays: they are touched one element a step, where an array costs ten times as much.
        self._seconds = [0.0] * len(edges)
        self._rows = [0.0] * len(edges)
        self._weight = [0.0] * len(edges)
        self._num_plain = [0] * len(edges)
        self._overhead_s = 0.0
        self._num_overhead = 0
        self._cached: StepCosts | None = None
        self._changes = 0

    @property
    def overhead_s(self) -> float:
        """Seconds that a step takes longer because it has any drafts."""
        return self._overhead_s

    def observe(self, num_rows: int, speculated: bool, seconds: float) -> None:
        """One pure decode step of `num_rows` rows took `seconds`."""
        bucket = self._bucket_of_row[min(num_rows, self._max_rows)]
        if speculated and self._num_plain[bucket]:
            self._learn_overhead(seconds - self._plain_s(num_rows))
        elif speculated:
            self._learn(bucket, num_rows, seconds - self._overhead_s, BORROWED_WEIGHT)
        else:
            if self._num_plain[bucket] == 0:
                self._weight[bucket] = 0.0  # forget what was borrowed from steps with drafts
            self._learn(bucket, num_rows, seconds, 1.0)
            self._num_plain[bucket] += 1
        self._changes += 1

    def num_plain_samples(self, num_rows: int) -> int:
        """How many steps without drafts were seen near `num_rows`."""
        return self._num_plain[self._bucket_of_row[min(num_rows, self._max_rows)]]

    def costs(self) -> StepCosts | None:
        """Predictions for 0 to max_rows rows; None before the first observation. Refreshed every eight samples."""
        if self._cached is None or self._changes >= 8:
            self._cached, self._changes = self._predict(), 0
        return self._cached

    def _plain_s(self, num_rows: int) -> float:
        costs = self.costs()
        assert costs is not None
        return float(costs.plain_s[min(num_rows, self._max_rows)])

    def _learn(self, bucket: int, num_rows: int, seconds: float, weight: float) -> None:
        known = self._weight[bucket]
        if known >= CLIP_FROM_WEIGHT:
            seconds = min(max(seconds, self._seconds[bucket] / CLIP), self._seconds[bucket] * CLIP)
        rate = max(weight / (known + weight), DECAY * weight)
        self._seconds[bucket] += rate * (max(seconds, 0.0) - self._seconds[bucket])
        self._rows[bucket] += rate * (num_rows - self._rows[bucket])
        self._weight[bucket] = known + weight

    def _learn_overhead(self, seconds: float) -> None:
        self._num_overhead += 1
        limit = min(s for s, w in zip(self._seconds, self._weight, strict=True) if w > 0)
        rate = max(1.0 / self._num_overhead, DECAY)
        clipped = min(max(seconds, -limit), limit)
        self._overhead_s = max(0.0, self._overhead_s + rate * (clipped - self._overhead_s))

    def _predict(self) -> StepCosts | None:
        known = np.array(self._weight) > 0
        if not known.any():
            return None
        rows = np.array(self._rows)[known]
        seconds = non_decreasing(np.array(self._seconds)[known], np.array(self._weight)[known])
        grid = np.arange(self._max_rows + 1)
        plain = np.interp(grid, rows, seconds)
        beyond = grid > rows[-1]
        plain[beyond] += (grid[beyond] - rows[-1]) * self._slope(rows, seconds)
        return StepCosts(plain, plain + self._overhead_s)

    @staticmethod
    def _slope(rows: np.ndarray, seconds: np.ndarray) -> float:
        """Seconds a row beyond the last bucket: as between the first and last, or half-proportional when alone."""
        if len(rows) > 1 and rows[-1] >= 1.5 * rows[0]:
            return float((seconds[-1] - seconds[0]) / (rows[-1] - rows[0]))
        return 0.5 * float(seconds[-1] / rows[-1])


def non_decreasing(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The non-decreasing sequence nearest to `values` in weighted squares, by pooling adjacent violators.

    A running maximum would instead let one slow sample raise every larger batch. Source: Barlow et al. 1972.
    """
    pools: list[list[float]] = []  # mean, weight, count
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, total, count = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + mean * total) / (last[1] + total)
            last[1] += total
            last[2] += count
    return np.repeat([p[0] for p in pools], [int(p[2]) for p in pools])
