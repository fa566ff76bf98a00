# SPDX-License-Identifier: Apache-2.0
"""What drafting with a model costs: seconds by how much it must read and how deep it drafts, learned while running."""

from dataclasses import dataclass

import numpy as np
from numba import njit

WARM_UP = 4
"""Draftings that are not learned from: kernels compile."""
ENOUGH = 12
"""Draftings after which the prediction is believed."""
REMEMBERED = 64
"""The latest draftings, which the prediction is made of: after each one at first, then after every eighth."""
EVERY = 8
REWEIGHTINGS, SWEEPS = 6, 25


@dataclass(frozen=True)
class DraftCosts:
    """Seconds of one drafting: a first pass over what the model has not read yet, then a short pass a further token."""

    fixed_s: float = 0.0
    row_s: float = 0.0
    pass_s: float = 0.0
    pass_request_s: float = 0.0

    def draft_s(self, num_rows: int, num_requests: int, depth: int) -> float:
        """Seconds to read `num_rows` tokens and draft `depth` (at least one) tokens of each request."""
        return self.fixed_s + num_rows * self.row_s + (depth - 1) * (self.pass_s + num_requests * self.pass_request_s)


class DraftTimes:
    """Least absolute deviations, with non-negative terms, over what the latest draftings took: those that met a kernel to be
    compiled, or a stall, have no say unless they are half of all.

    Example: `observe(num_rows=8, num_requests=8, depth=3, seconds=0.002)`, then `costs().draft_s(8, 8, 5)`.
    """

    def __init__(self) -> None:
        self._terms = np.zeros((REMEMBERED, 4))
        self._seconds = np.zeros(REMEMBERED)
        self._num_samples = -WARM_UP
        self._costs: DraftCosts | None = None

    def observe(self, num_rows: int, num_requests: int, depth: int, seconds: float) -> None:
        """One drafting took so long."""
        self._num_samples += 1
        n = self._num_samples
        if n <= 0:
            return
        slot = (n - 1) % REMEMBERED
        self._terms[slot] = 1.0, num_rows, depth - 1, (depth - 1) * num_requests
        self._seconds[slot] = seconds
        if n >= ENOUGH and (n <= REMEMBERED or n % EVERY == 0):
            self._costs = DraftCosts(*_least_deviations(self._terms[:n], self._seconds[:n]).tolist())

    def costs(self) -> DraftCosts | None:
        """The prediction; None until enough was measured."""
        return self._costs


@njit("float64[:](float64[:,:], float64[:])", cache=True)
def _least_deviations(terms, seconds):  # type: ignore[no-untyped-def]
    """The x >= 0 that minimises sum |terms x - seconds|, by least squares reweighted; it leans on zero where samples do not
    tell."""
    num_samples, num_terms = terms.shape
    x = np.zeros(num_terms)
    weights = np.ones(num_samples)
    least = 0.02 * np.median(seconds) + 1e-9
    for _ in range(REWEIGHTINGS):
        gram = np.zeros((num_terms, num_terms))
        moment = np.zeros(num_terms)
        for n in range(num_samples):
            for i in range(num_terms):
                moment[i] += weights[n] * terms[n, i] * seconds[n]
                for j in range(num_terms):
                    gram[i, j] += weights[n] * terms[n, i] * terms[n, j]
        scale = np.sqrt(np.maximum(np.diag(gram), 1e-12))
        for _ in range(SWEEPS):
            for i in range(num_terms):
                rest = moment[i]
                for j in range(num_terms):
                    if j != i:
                        rest -= gram[i, j] * x[j]
                x[i] = max(0.0, rest / (1.0001 * scale[i] * scale[i]))
        for n in range(num_samples):
            weights[n] = 1.0 / max(abs((terms[n] * x).sum() - seconds[n]), least)
    return x
