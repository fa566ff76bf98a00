# SPDX-License-Identifier: Apache-2.0
"""The spread of the survival of draft tokens. Most tokens of a good drafter are nearly sure, and a few are not.

A planner that knows the mean alone believes that each draft token is as likely as the next. It then sees no gain where rows
are dear, though the sure tokens alone would pay.

Shapes: N requests, P proposers, K draft positions, Q bins of survival.
"""

import numpy as np
from numba import njit

NUM_BINS = 128
DECAY = 0.98
"""The weight that a step's proposals leave to those before."""


class SurvivalSpread:
    """A histogram of survival for each proposer and draft position. Owns the decayed counts.

    Example: `observe(latest_PNK)` in each step, where 0 means that nothing was proposed there; then `share_PKQ` sums to 1
    over Q wherever a draft was seen.
    """

    def __init__(self, num_proposers: int, num_positions: int) -> None:
        self._count_PKQ = np.zeros((num_proposers, num_positions, NUM_BINS))

    def observe(self, survival_PNK: np.ndarray) -> None:
        """Learns from the survival of the latest proposals, float64."""
        _count(self._count_PKQ, survival_PNK)

    def forget(self, proposer: int) -> None:
        """The proposer is another one from now on."""
        self._count_PKQ[proposer] = 0.0

    @property
    def share_PKQ(self) -> np.ndarray:
        """The share of draft tokens whose survival lies in each bin, [P, K, Q]; 0 where none was seen."""
        total_PK1 = self._count_PKQ.sum(axis=2, keepdims=True)
        return np.divide(self._count_PKQ, total_PK1, out=np.zeros_like(self._count_PKQ), where=total_PK1 > 0)


@njit(cache=True)
def bin_of(survival):  # type: ignore[no-untyped-def]
    """Returns the bin that a survival of 0 to 1 lies in."""
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
