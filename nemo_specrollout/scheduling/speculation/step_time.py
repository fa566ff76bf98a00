# SPDX-License-Identifier: Apache-2.0
"""Measured step times: seconds of an engine step by its number of requests and draft rows.

A step with n draft rows takes about as long as a plain step of as many rows, plus a constant for handling drafts. A draft row
costs more or less than a request's row: it needs no scheduling, but it is accepted or rejected.
Samples are clipped and decayed, because clocks are noisy and contexts grow.

The constants were set by hand so that one stall has no lasting effect and drafts are tried again soon.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from scipy.optimize import isotonic_regression

DECAY = 0.05
"""Learning rate of a bucket's mean."""
CLIP = 2.0
"""Factor by which a sample may differ from the mean of a known bucket."""
CLIP_OF_NEW = 1.5
"""Factor by which the samples of a new bucket may exceed the prediction."""
CLIP_FROM_WEIGHT = 3.0
"""Weight from which a bucket counts as known."""
BORROWED_WEIGHT = 0.25
"""Weight of a sample with drafts in a bucket without plain steps."""
COLD_WEIGHT = 0.05
"""Weight of the first sample with drafts of a size."""
MAX_WEIGHT = 20.0
"""Maximum weight of a bucket in the blend of buckets and line."""
FORGET = 0.995
"""Factor on a bucket's weight for each sample elsewhere."""
LINE_WEIGHT = 1.0
"""Weight of the line in the blend."""
OPTIMISM = 0.5
"""Cost of a row beyond all measured sizes, as a share of the line's slope. A low guess is tried and corrected; a high one
never is."""
SURCHARGE_DECAY = 0.98
"""Factor on the surcharge's sums for each step with drafts."""
SURCHARGE_FORGET = 0.99
"""Factor on the surcharge's sums for each step without drafts."""
ZERO_WEIGHT = 4.0
"""Weight of the prior that the surcharge is zero, in samples."""
MAX_SURCHARGE = 0.5
"""Maximum surcharge of a sample, as a share of the plain step."""
REFRESH = 32
"""Maximum number of samples between two predictions."""


class StepCosts(NamedTuple):
    """Predicted step times. A step of b requests and n > 0 draft rows takes `plain_s[b + n] + overhead_s - n * discount_s`
    seconds, and never less than `plain_s[b]`."""

    plain_s: np.ndarray
    """Seconds of a step without drafts by the number of requests, float64."""
    overhead_s: float = 0.0
    """Constant seconds of a step with drafts."""
    discount_s: float = 0.0
    """Seconds by which a draft row is cheaper than a request's row; negative if it is more expensive."""
    graph_rows: int = 0
    """Rows of the largest CUDA graph; 0 if there is none. Drafts never make a step larger: its time would double at once."""

    def step_s(self, num_requests: int, num_drafts: int) -> float:
        """Returns the predicted seconds of one step."""
        return speculated_s(self, num_requests, num_drafts) if num_drafts else float(self.plain_s[num_requests])

    def row_s(self, num_requests: int, num_drafts: int) -> float:
        """Returns the mean seconds that each of `num_drafts` draft rows adds. If there are none, assumes one a request."""
        num_drafts = min(num_drafts or num_requests, most_drafts(self, num_requests))
        if num_drafts <= 0:
            return 0.0
        return (self.step_s(num_requests, num_drafts) - self.step_s(num_requests, 0)) / num_drafts


@njit(cache=True, inline="always")
def speculated_s(costs, num_requests, num_drafts):  # type: ignore[no-untyped-def]
    """Returns `StepCosts.step_s` of a step with drafts, for use in compiled kernels."""
    plain_s = costs.plain_s
    seconds = plain_s[num_requests + num_drafts] + costs.overhead_s - num_drafts * costs.discount_s
    return max(seconds, plain_s[num_requests])


@njit(cache=True, inline="always")
def most_drafts(costs, num_requests):  # type: ignore[no-untyped-def]
    """Returns the largest number of draft rows for which a step's time is known, and which keeps it in its CUDA graph."""
    rows = len(costs.plain_s) - 1
    return (min(rows, costs.graph_rows) if num_requests <= costs.graph_rows else rows) - num_requests


class DraftSurcharge:
    """Surcharge of a step with n draft rows over a plain step of as many rows: overhead - n * discount.

    Fits decayed least squares with a prior of zero. Without the prior, a stall in the first step with drafts would stop
    drafting for good. The overhead is never negative.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        """Decayed sums of 1, n, n^2, seconds, n * seconds."""

    def observe(self, num_drafts: int, seconds: float) -> None:
        """Adds a step with `num_drafts` draft rows that took `seconds` more than a plain step of as many rows."""
        terms = (1.0, num_drafts, num_drafts * num_drafts, seconds, num_drafts * seconds)
        self._sums = [SURCHARGE_DECAY * s + t for s, t in zip(self._sums, terms, strict=True)]

    def age(self) -> None:
        """Reduces the weight of the samples after a step without drafts."""
        self._sums = [SURCHARGE_FORGET * s for s in self._sums]

    def seconds(self, num_drafts: int) -> float:
        """Returns the surcharge, which may be negative."""
        overhead_s, discount_s = self.fit()
        return overhead_s - num_drafts * discount_s

    def fit(self) -> tuple[float, float]:
        """Returns the seconds of overhead, and the seconds of discount for each draft row."""
        one, n, nn, r, nr = self._sums
        if nn <= 0.0:
            return 0.0, 0.0
        mean = n / one
        # One zero of the prior lies at the mean, so that a single stall counts only by half.
        one, n, nn = one + ZERO_WEIGHT + 1.0, n + mean, nn + mean * mean
        variance = nn * one - n * n
        slope = (nr * one - n * r) / variance if variance > 1e-6 * nn * one else 0.0
        intercept = (r - slope * n) / one
        if intercept < 0.0:
            intercept, slope = 0.0, nr / nn
        return intercept, -slope


class StepTimeTable:
    """Decayed mean times of plain steps in buckets of rows, a quarter octave wide. Owns the surcharge of drafts.

    A prediction blends each bucket with a line through all buckets. Invariant: `plain_s` never falls as rows grow.
    """

    def __init__(self, max_rows: int, graph_rows: int = 0) -> None:
        """`graph_rows` is the number of rows of the largest CUDA graph; 0 if there is none."""
        self._graph_rows = graph_rows
        edges = np.unique(np.round(2.0 ** np.arange(0, np.log2(max_rows) + 0.26, 0.25)).astype(int))
        buckets = np.clip(np.searchsorted(edges, np.arange(max_rows + 1), "right") - 1, 0, None)
        self._bucket_of_row: list[int] = buckets.tolist()
        self._max_rows = max_rows
        # Lists, because access to single elements of an array takes ten times as long.
        self._seconds = [0.0] * len(edges)
        self._rows = [0.0] * len(edges)
        self._weight = [0.0] * len(edges)
        self._num_plain = [0] * len(edges)
        self._last_sample = [0] * len(edges)
        self._sizes_drafted: set[int] = set()
        self._num_samples = 0
        self._surcharge = DraftSurcharge()
        self._cached: StepCosts | None = None
        self._changes = 0

    def observe(self, num_requests: int, num_rows: int, seconds: float, rows_before: int) -> None:
        """Adds the duration of a pure decode step; its rows beyond `num_requests` are drafts.

        A step without drafts counts only if it has the `rows_before` of the step before: then caches and kernels are warm.
        Steps with drafts vary in size, so the first step of each size counts for little.
        """
        rows, num_drafts = min(num_rows, self._max_rows), num_rows - num_requests
        is_warm = rows in self._sizes_drafted if num_drafts else num_rows == rows_before
        if num_drafts:
            self._sizes_drafted.add(rows)
        bucket = self._bucket_of_row[rows]
        if not is_warm:
            if num_drafts and self._num_samples and not self._num_plain[bucket]:
                self._learn(bucket, num_rows, seconds - self._surcharge.seconds(num_drafts), COLD_WEIGHT)
                self._changes += 1
            return
        if num_drafts and self._num_plain[bucket]:
            plain_s = self._seconds[bucket]
            self._surcharge.observe(num_drafts, min(seconds - plain_s, MAX_SURCHARGE * plain_s))
        elif num_drafts:
            self._learn(bucket, num_rows, seconds - self._surcharge.seconds(num_drafts), BORROWED_WEIGHT)
        else:
            if self._num_plain[bucket] == 0:
                self._weight[bucket] = 0.0  # A plain step replaces samples of steps with drafts.
            self._learn(bucket, num_rows, seconds, 1.0)
            self._num_plain[bucket] += 1
            self._surcharge.age()
        self._changes += 1
        self._num_samples += 1

    def costs(self) -> StepCosts | None:
        """Returns predictions for 0 to max_rows rows, at most 32 samples old. None before the first sample."""
        if self._cached is None or self._changes >= min(REFRESH, self._num_samples / 8):
            self._cached, self._changes = self._predict(), 0
        return self._cached

    def _learn(self, bucket: int, num_rows: int, seconds: float, weight: float) -> None:
        known = self._weight[bucket]
        seconds = self._clip(bucket, num_rows, seconds)
        rate = max(weight / (known + weight), DECAY * weight)
        self._seconds[bucket] += rate * (seconds - self._seconds[bucket])
        self._rows[bucket] += rate * (num_rows - self._rows[bucket])
        self._weight[bucket] = known + weight
        self._last_sample[bucket] = self._num_samples

    def _clip(self, bucket: int, num_rows: int, seconds: float) -> float:
        """Returns `seconds`, limited by the mean of a known bucket, or by the prediction for a new one."""
        if self._weight[bucket] >= CLIP_FROM_WEIGHT:
            return min(max(seconds, self._seconds[bucket] / CLIP), self._seconds[bucket] * CLIP)
        costs = self.costs()
        if costs is None:
            return max(seconds, 0.0)
        return min(max(seconds, 0.0), CLIP_OF_NEW * float(costs.plain_s[min(num_rows, self._max_rows)]))

    def _predict(self) -> StepCosts | None:
        # Weights decay since the last sample of a bucket: one slow sample must not count for good.
        ages = self._num_samples - np.array(self._last_sample)
        weights = np.minimum(self._weight, MAX_WEIGHT) * FORGET**ages
        known = weights > 0
        if not known.any():
            return None
        rows, seconds, weights = np.array(self._rows)[known], np.array(self._seconds)[known], weights[known]
        fixed_s, row_s = _line(rows, seconds, weights)
        blended = (weights * seconds + LINE_WEIGHT * (fixed_s + row_s * rows)) / (weights + LINE_WEIGHT)
        # A running maximum would instead let one slow sample raise every larger batch.
        pooled = isotonic_regression(blended, weights=weights + LINE_WEIGHT).x
        grid = np.arange(self._max_rows + 1)
        plain = np.interp(grid, rows, pooled)
        beyond = grid > rows[-1]
        overhead_s, discount_s = self._surcharge.fit()
        discount_s = min(discount_s, row_s)
        plain[beyond] += (grid[beyond] - rows[-1]) * max(OPTIMISM * row_s, discount_s)
        return StepCosts(plain, overhead_s, discount_s, self._graph_rows)


def _line(rows: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Returns the line through the buckets (seconds at no rows, seconds a row). One bucket alone is taken as half fixed."""
    mean_rows, mean_s = np.average(rows, weights=weights), np.average(seconds, weights=weights)
    variance = np.average((rows - mean_rows) ** 2, weights=weights)
    if variance < 0.05 * mean_rows**2:
        return 0.5 * float(mean_s), 0.5 * float(mean_s / mean_rows)
    covariance = np.average((rows - mean_rows) * (seconds - mean_s), weights=weights)
    row_s = max(0.0, float(covariance / variance))
    return float(mean_s) - row_s * float(mean_rows), row_s
