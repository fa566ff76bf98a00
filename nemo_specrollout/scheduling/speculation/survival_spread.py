# SPDX-License-Identifier: Apache-2.0
"""Histograms of the survival of draft tokens. Most tokens of a good drafter are nearly sure, and a few are not.

A planner that knows only the mean takes all draft tokens for equally likely. If rows are expensive it then sees no gain,
although the sure tokens alone would pay.

Shapes: N requests, P proposers, K draft positions, Q bins of survival.
"""

import numpy as np
from numba import njit

NUM_BINS = 128
"""Bins of survival between 0 and 1."""
DECAY = 0.98
"""Factor on the earlier counts at each step with proposals."""


class SurvivalSpread:
    """A histogram of survival for each proposer and draft position. Owns the decayed counts.

    Example: call `observe(latest_PNK)` in each step, with 0 where nothing was proposed. Then `share_PKQ` sums to 1 over Q
    wherever a draft was seen.
    """

    def __init__(self, num_proposers: int, num_positions: int) -> None:
        self._count_PKQ = np.zeros((num_proposers, num_positions, NUM_BINS))

    def observe(self, survival_PNK: np.ndarray) -> None:
        """Adds the survival of the latest proposals, float64 [P, N, K], to the histograms."""
        _count(self._count_PKQ, survival_PNK)

    def forget(self, proposer: int) -> None:
        """Drops the counts of a proposer whose model has changed."""
        self._count_PKQ[proposer] = 0.0

    @property
    def share_PKQ(self) -> np.ndarray:
        """Share of draft tokens whose survival lies in each bin, float64 [P, K, Q]; 0 where none was seen."""
        total_PK1 = self._count_PKQ.sum(axis=2, keepdims=True)
        return np.divide(self._count_PKQ, total_PK1, out=np.zeros_like(self._count_PKQ), where=total_PK1 > 0)


@njit(cache=True)
def bin_of(survival):  # type: ignore[no-untyped-def]
    """Returns the bin of a survival between 0 and 1."""
    return min(int(survival * NUM_BINS), NUM_BINS - 1)


@njit(cache=True)
def _count(count_PKQ, survival_PNK):  # type: ignore[no-untyped-def]
    for p in range(survival_PNK.shape[0]):
        for k in range(survival_PNK.shape[2]):
            is_faded = False
            for n in range(survival_PNK.shape[1]):
                if survival_PNK[p, n, k] <= 0.0:
                    continue
                if not is_faded:
                    count_PKQ[p, k] *= DECAY
                    is_faded = True
                count_PKQ[p, k, bin_of(survival_PNK[p, n, k])] += 1.0
