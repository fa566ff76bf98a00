# SPDX-License-Identifier: Apache-2.0
"""Measured cost of drafting with a model: seconds by the tokens that it reads and the depth that it drafts."""

from typing import NamedTuple

import numpy as np
from numba import njit

WARM_UP = 4
"""First samples that are ignored, because kernels compile then."""
ENOUGH = 12
"""Samples before the first prediction."""
REMEMBERED = 16
"""Latest samples kept for each batch size class, so that the tail of a rollout does not displace large batches."""
SIZES = 12
"""Batch size classes, by the bit length of the number of requests."""
AT_FIRST = 64
"""Samples up to which each sample updates the prediction."""
EVERY = 8
"""Samples between two later updates of the prediction."""
REWEIGHTINGS = 6
"""Rounds of iteratively reweighted least squares."""
SWEEPS = 25
"""Coordinate descent sweeps in each round."""
READING_DECAY = 0.9
"""Factor on the earlier estimate of the read share at each new sample."""


class DraftCosts(NamedTuple):
    """Cost model of one drafting: a first pass over the unread tokens, then a short pass for each further draft token.

    Each pass samples one token for each request.
    """

    fixed_s: float = 0.0
    """Seconds of the first pass without its rows."""
    row_s: float = 0.0
    """Seconds for each unread token in the first pass."""
    pass_s: float = 0.0
    """Seconds of each further pass."""
    token_s: float = 0.0
    """Seconds to sample one token of one request."""
    read_share: float = 1.0
    """Duration of a first pass that samples nothing, relative to one that samples."""

    def draft_s(self, num_rows: int, num_requests: int, depth: int) -> float:
        """Returns the seconds to read `num_rows` tokens and draft `depth` (at least one) tokens for each request."""
        return drafting_s(self, num_rows, num_requests, depth)

    def read_s(self, num_rows: int) -> float:
        """Returns the seconds to read `num_rows` tokens and draft none."""
        return self.read_share * self.draft_s(num_rows, 0, 1)


@njit(cache=True, inline="always")
def drafting_s(draft, num_rows, num_requests, depth):  # type: ignore[no-untyped-def]
    """Returns `DraftCosts.draft_s`, for use in compiled kernels."""
    return draft.fixed_s + num_rows * draft.row_s + (depth - 1) * draft.pass_s + depth * num_requests * draft.token_s


class DraftTimes:
    """Fits `DraftCosts` to the latest draftings by least absolute deviations with non-negative terms. Owns the samples.

    Outliers (a stall, or a kernel that had to compile) have no influence unless they are half of all samples.
    """

    def __init__(self) -> None:
        self._terms = np.zeros((SIZES * REMEMBERED, 4))
        self._seconds = np.zeros(SIZES * REMEMBERED)
        self._num_of_size = [0] * SIZES
        self._num_samples = -WARM_UP
        self._costs: DraftCosts | None = None
        self._read_share = 1.0

    def observe(self, num_rows: int, num_requests: int, depth: int, seconds: float) -> None:
        """Adds the measured duration of one drafting."""
        self._num_samples += 1
        n = self._num_samples
        if n <= 0:
            return
        size = min(num_requests.bit_length(), SIZES) - 1
        slot = size * REMEMBERED + self._num_of_size[size] % REMEMBERED
        self._num_of_size[size] += 1
        self._terms[slot] = 1.0, num_rows, depth - 1, depth * num_requests
        self._seconds[slot] = seconds
        if n >= ENOUGH and (n <= AT_FIRST or n % EVERY == 0):
            known = self._terms[:, 0] > 0.0
            fixed_s, row_s, pass_s, token_s = _least_deviations(self._terms[known], self._seconds[known]).tolist()
            self._costs = DraftCosts(fixed_s, row_s, pass_s, token_s, self._read_share)

    def observe_reading(self, num_rows: int, seconds: float) -> None:
        """Adds the measured duration of a pass that only read `num_rows` tokens."""
        whole_s = 0.0 if self._costs is None else self._costs.draft_s(num_rows, 0, 1)
        if self._costs is None or whole_s == 0.0:
            return
        self._read_share += (1.0 - READING_DECAY) * (min(seconds / whole_s, 1.0) - self._read_share)
        self._costs = self._costs._replace(read_share=self._read_share)

    def costs(self) -> DraftCosts | None:
        """Returns the fitted cost model, or None before enough samples."""
        return self._costs


@njit("float64[:](float64[:,::1], float64[::1])", cache=True)
def _least_deviations(terms, seconds):  # type: ignore[no-untyped-def]
    """Returns the x >= 0 that minimises sum |terms x - seconds|, by iteratively reweighted least squares.

    Coordinate descent and a slight regularisation give the earlier of two terms that the samples do not tell apart.
    """
    num_samples, num_terms = terms.shape
    x = np.zeros(num_terms)
    weights = np.ones(num_samples)
    least = 0.02 * np.median(seconds) + 1e-9
    for _ in range(REWEIGHTINGS):
        weighted = terms * weights.reshape(-1, 1)
        gram, moment = weighted.T @ terms, weighted.T @ seconds
        for _ in range(SWEEPS):
            for i in range(num_terms):
                rest = moment[i] - gram[i] @ x + gram[i, i] * x[i]
                x[i] = max(0.0, rest / (1.0001 * max(gram[i, i], 1e-12)))
        weights = 1.0 / np.maximum(np.abs(terms @ x - seconds), least)
    return x
