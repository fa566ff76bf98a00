# SPDX-License-Identifier: Apache-2.0
"""What a step costs: seconds by the number of requests and draft rows, learned while running.

A step with n draft rows costs about what a plain step of as many rows does, plus a constant for handling drafts, and more
or less a draft row: it needs no request of its own to be scheduled, but is accepted or rejected (measured,
docs/benchmarks.md). Samples are clipped and decayed, for clocks are noisy and contexts grow.
"""

from dataclasses import dataclass

import numpy as np

# Buckets: the rate of their means, the factor that a sample may be off in a known and in a new one, and the weights of a
# sample that had drafts and of one that had a size for the first time.
DECAY = 0.05
CLIP, CLIP_OF_NEW, CLIP_FROM_WEIGHT = 2.0, 1.5, 3.0
BORROWED_WEIGHT, COLD_WEIGHT = 0.25, 0.05
# The blend of buckets and line: the most that a bucket weighs, its decay by step, the line's weight.
MAX_WEIGHT, FORGET, LINE_WEIGHT = 20.0, 0.995, 1.0
# Beyond all that was seen a row is believed to take such a share of the line's: what is tried is corrected, what is not never.
OPTIMISM = 0.5
# The surcharge of drafts: decay by sample and by step without drafts, samples' worth of zero, limit as a share of a step.
SURCHARGE_DECAY, SURCHARGE_FORGET, ZERO_WEIGHT, MAX_SURCHARGE = 0.98, 0.99, 4.0, 0.5
REFRESH = 32
"""Samples after which predictions are made again."""


@dataclass(frozen=True)
class StepCosts:
    """Predicted seconds of a step: `plain_s[r]` without drafts, of r requests; with n draft rows for b requests it is
    `plain_s[b + n] + overhead_s - n * discount_s`, and never less than without."""

    plain_s: np.ndarray
    overhead_s: float = 0.0
    discount_s: float = 0.0

    def step_s(self, num_requests: int, num_drafts: int) -> float:
        """Seconds of one step."""
        plain_s = float(self.plain_s[num_requests])
        if num_drafts == 0:
            return plain_s
        speculated_s = float(self.plain_s[num_requests + num_drafts]) + self.overhead_s - num_drafts * self.discount_s
        return max(plain_s, speculated_s)

    def row_s(self, num_requests: int, num_drafts: int) -> float:
        """Seconds that a draft row adds, on average over `num_drafts`; over one for each request where there are none."""
        num_drafts = min(num_drafts or num_requests, len(self.plain_s) - 1 - num_requests)
        if num_drafts <= 0:
            return 0.0
        return (self.step_s(num_requests, num_drafts) - self.step_s(num_requests, 0)) / num_drafts


class DraftSurcharge:
    """What a step with n draft rows costs beyond a plain one of as many rows, as overhead - n * discount.

    Decayed least squares, leaning on zero while few samples are fresh: a stall in the first step with drafts must not
    scare off for good, for nothing would ever correct it. The overhead is never negative. The discount is negative where
    a draft row costs more than a request's row.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, n, n^2, seconds, n * seconds

    def observe(self, num_drafts: int, seconds: float) -> None:
        """A step with that many draft rows took `seconds` more than a plain one of as many rows."""
        terms = (1.0, num_drafts, num_drafts * num_drafts, seconds, num_drafts * seconds)
        self._sums = [SURCHARGE_DECAY * s + t for s, t in zip(self._sums, terms, strict=True)]

    def age(self) -> None:
        """A step without drafts went by."""
        self._sums = [SURCHARGE_FORGET * s for s in self._sums]

    def of(self, num_drafts: int) -> float:
        """Seconds, possibly negative."""
        overhead_s, discount_s = self.fitted()
        return overhead_s - num_drafts * discount_s

    def fitted(self) -> tuple[float, float]:
        """Seconds of overhead, and of discount for each draft row."""
        one, n, nn, r, nr = self._sums
        if nn <= 0.0:
            return 0.0, 0.0
        mean = n / one  # zeros at no drafts, and one where the samples are: a single stall is believed by half
        one, n, nn = one + ZERO_WEIGHT + 1.0, n + mean, nn + mean * mean
        variance = nn * one - n * n
        slope = (nr * one - n * r) / variance if variance > 1e-6 * nn * one else 0.0
        intercept = (r - slope * n) / one
        if intercept < 0.0:
            intercept, slope = 0.0, nr / nn
        return intercept, -slope


class StepTimeTable:
    """Decayed mean plain-step times in buckets of rows, a quarter octave wide; owns the surcharge of drafts.

    Buckets lean on a line through all of them, the more the less was seen of them lately.

    Invariant: `plain_s` never falls as rows grow. Example: `observe(8, 8, 0.004)`, then `costs().plain_s[8]`.
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
        self._last_sample = [0] * len(edges)
        self._sizes_drafted: set[int] = set()
        self._num_samples = 0
        self._surcharge = DraftSurcharge()
        self._cached: StepCosts | None = None
        self._changes = 0

    def observe(self, num_requests: int, num_rows: int, seconds: float, rows_before: int) -> None:
        """One pure decode step took `seconds`; its rows beyond `num_requests` were drafts; the step before had
        `rows_before`.

        A step without drafts counts only if it repeats the size of the one before, as plain decoding nearly always does:
        caches and kernels are warm then. With drafts sizes vary: the first step of each counts for little.
        """
        rows, num_drafts = min(num_rows, self._max_rows), num_rows - num_requests
        is_warm = rows in self._sizes_drafted if num_drafts else num_rows == rows_before
        if num_drafts:
            self._sizes_drafted.add(rows)
        bucket = self._bucket_of_row[rows]
        if not is_warm:
            if num_drafts and self._num_samples and not self._num_plain[bucket]:
                self._learn(bucket, num_rows, seconds - self._surcharge.of(num_drafts), COLD_WEIGHT)
                self._changes += 1
            return
        if num_drafts and self._num_plain[bucket]:
            plain_s = self._seconds[bucket]
            self._surcharge.observe(num_drafts, min(seconds - plain_s, MAX_SURCHARGE * plain_s))
        elif num_drafts:
            self._learn(bucket, num_rows, seconds - self._surcharge.of(num_drafts), BORROWED_WEIGHT)
        else:
            if self._num_plain[bucket] == 0:
                self._weight[bucket] = 0.0  # forget what was borrowed from steps with drafts
            self._learn(bucket, num_rows, seconds, 1.0)
            self._num_plain[bucket] += 1
            self._surcharge.age()
        self._changes += 1
        self._num_samples += 1

    def costs(self) -> StepCosts | None:
        """Predictions for 0 to max_rows rows; None before the first observation. Old by 32 samples at most."""
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
        """`seconds`, within a factor of what is known of the bucket; in a new one, not far above what is expected."""
        if self._weight[bucket] >= CLIP_FROM_WEIGHT:
            return min(max(seconds, self._seconds[bucket] / CLIP), self._seconds[bucket] * CLIP)
        costs = self.costs()
        if costs is None:
            return max(seconds, 0.0)
        return min(max(seconds, 0.0), CLIP_OF_NEW * float(costs.plain_s[min(num_rows, self._max_rows)]))

    def _predict(self) -> StepCosts | None:
        weights = self._fresh_weights()
        known = weights > 0
        if not known.any():
            return None
        rows, seconds, weights = np.array(self._rows)[known], np.array(self._seconds)[known], weights[known]
        fixed_s, row_s = _line(rows, seconds, weights)
        blended = (weights * seconds + LINE_WEIGHT * (fixed_s + row_s * rows)) / (weights + LINE_WEIGHT)
        pooled = non_decreasing(blended, weights + LINE_WEIGHT)
        grid = np.arange(self._max_rows + 1)
        plain = np.interp(grid, rows, pooled)
        beyond = grid > rows[-1]
        overhead_s, discount_s = self._surcharge.fitted()
        discount_s = min(discount_s, row_s)
        plain[beyond] += (grid[beyond] - rows[-1]) * max(OPTIMISM * row_s, discount_s)
        return StepCosts(plain, overhead_s, discount_s)

    def _fresh_weights(self) -> np.ndarray:
        """Weights of the buckets, less where a bucket was not seen for long: one slow sample must not scare off for good."""
        ages = self._num_samples - np.array(self._last_sample)
        return np.minimum(self._weight, MAX_WEIGHT) * FORGET**ages


def _line(rows: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """The line (seconds at no rows, seconds a row) through the buckets; half of the time is fixed if there is but one."""
    mean_rows, mean_s = np.average(rows, weights=weights), np.average(seconds, weights=weights)
    variance = np.average((rows - mean_rows) ** 2, weights=weights)
    if variance < 0.05 * mean_rows**2:
        return 0.5 * float(mean_s), 0.5 * float(mean_s / mean_rows)
    covariance = np.average((rows - mean_rows) * (seconds - mean_s), weights=weights)
    row_s = max(0.0, float(covariance / variance))
    return float(mean_s) - row_s * float(mean_rows), row_s


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
