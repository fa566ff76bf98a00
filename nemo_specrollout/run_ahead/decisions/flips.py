# SPDX-License-Identifier: Apache-2.0
"""How probable it is that an update of the weights changes a token, by the gap between the two best tokens.

Noise depends on seed and position alone, so a token changes only if the update moves the runner-up's score past the best
one's. Both scores are known while a text is made ahead, and so is their gap.

Shapes: P positions, G bins of gaps.
"""

from typing import Any, ClassVar

import numpy as np

Array = np.ndarray[Any, Any]
_SMALLEST, _LARGEST = 1e-6, 16.0
"""Bounds of gaps and scales, in nats. A smaller gap counts as a tie, and beyond the larger one no update reaches."""
_EDGES_G = np.geomspace(_SMALLEST, _LARGEST, 240)
_CENTRES_G = np.concatenate([[_SMALLEST], np.sqrt(_EDGES_G[1:] * _EDGES_G[:-1]), [_LARGEST]])
_UNSEEN_FLIPS = 0.5
"""Flips that are added to what was counted, so that a run without any still knows that there may be some (Jeffreys)."""
_KEPT = 0.5
"""Weight of earlier updates' evidence after each further one, because updates become smaller or larger in a run."""


def counts_of_gaps(gap_P: Array) -> Array:
    """Returns how many of the gaps, in nats, fall in each of the model's bins, float64 [G]."""
    return np.bincount(np.searchsorted(_EDGES_G, gap_P), minlength=len(_CENTRES_G)).astype(np.float64)


class FlipModel:
    """Learns from updates how far they move the difference of two scores, which is one number, the scale.

    The change of the difference is taken to be logistic with that scale. So a gap of no width flips in one of two cases, and
    a gap of many scales never. Counts of gaps are kept in bins, so the cost does not depend on the number of tokens.
    """

    LEARNED: ClassVar = ("scale", "_gaps_G", "_num_flips")

    def __init__(self, scale: float = 1e-3) -> None:
        """`scale`, in nats, is what is assumed before the first update."""
        self.scale = scale
        self._gaps_G = np.zeros(len(_CENTRES_G))
        self._num_flips = 0.0

    def is_sound(self) -> bool:
        """Returns whether the scale is one, and counts are counts."""
        is_scale = _SMALLEST / 2 <= self.scale <= 2 * _LARGEST
        return is_scale and self._num_flips >= 0.0 and bool((self._gaps_G >= 0.0).all())

    def fade(self) -> None:
        """Lets what an earlier start has seen count like an update that is long past."""
        self._gaps_G = _KEPT * self._gaps_G
        self._num_flips = _KEPT * self._num_flips

    def probability(self, gap_P: Array) -> Array:
        """Returns the probability of a flip for each gap in nats, float64."""
        flips_P: Array = 1.0 / (1.0 + np.exp(np.minimum(np.asarray(gap_P, np.float64) / self.scale, 700.0)))
        return flips_P

    def observe(self, gap_P: Array, num_flips: int) -> None:
        """Learns from one update.

        Args:
            gap_P: gaps of the positions whose token is known under both weights, up to the first flip of each text.
            num_flips: texts that parted at one of these positions.
        """
        self.observe_counts(counts_of_gaps(gap_P), num_flips)

    def observe_counts(self, counts_G: Array, num_flips: int, *, is_same_update: bool = False) -> None:
        """Learns from one update, of whose gaps `counts_of_gaps` has made counts. Counts of several engines may be added.

        Further texts that the same update has met may follow with `is_same_update`.
        """
        weight = 1.0 if is_same_update else _KEPT
        self._gaps_G = weight * self._gaps_G + counts_G
        self._num_flips = weight * self._num_flips + num_flips
        if self._gaps_G.any():
            self.scale = self._fitted()

    def _fitted(self) -> float:
        """Returns the scale with which the gaps that were seen flip as often as they did, by bisection of its logarithm."""
        wanted = self._num_flips + _UNSEEN_FLIPS
        low, high = np.log(_SMALLEST), np.log(_LARGEST)
        for _ in range(40):
            middle = (low + high) / 2
            expected = self._gaps_G @ (1.0 / (1.0 + np.exp(np.minimum(_CENTRES_G / np.exp(middle), 700.0))))
            low, high = (middle, high) if expected < wanted else (low, middle)
        return float(np.exp((low + high) / 2))
