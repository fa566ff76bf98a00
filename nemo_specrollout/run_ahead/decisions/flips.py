# SPDX-License-Identifier: Apache-2.0
"""Estimates how likely a weight update is to change a token, given the gap between the scores of the best two tokens.

Noise depends only on the seed, the position and the token. So a sampled token changes only if the update moves the score of
the runner-up past the best score. Both scores are known while a text is made ahead, and so is the gap between them.

Shapes: P positions, G bins of gaps.
"""

from typing import Any, ClassVar

import numpy as np

Array = np.ndarray[Any, Any]
_SMALLEST, _LARGEST = 1e-6, 16.0
"""Bounds of gaps and scales in nats. A gap below the smaller bound counts as a tie. If a gap is above the larger one, no
weight update changes the token."""
_EDGES_G = np.geomspace(_SMALLEST, _LARGEST, 240)
_CENTRES_G = np.concatenate([[_SMALLEST], np.sqrt(_EDGES_G[1:] * _EDGES_G[:-1]), [_LARGEST]])
_UNSEEN_FLIPS = 0.5
"""Number of flips that is added to the count, so that the estimate is not zero before the first flip (Jeffreys prior)."""
_KEPT = 0.5
"""Factor by which each weight update reduces the weight of what earlier ones have shown, because updates change in size."""


def counts_of_gaps(gap_P: Array) -> Array:
    """Returns how many of the gaps between the best two scores, in nats, fall into each bin of `FlipModel`, float64 [G]."""
    return np.bincount(np.searchsorted(_EDGES_G, gap_P), minlength=len(_CENTRES_G)).astype(np.float64)


class FlipModel:
    """Learns how far weight updates move the difference between the scores of two tokens.

    One number describes this, the scale.

    The change of the difference is assumed to have a logistic distribution with this scale. So a token changes in half of the
    cases if the gap between the best two scores is zero, and hardly ever if the gap is many times the scale. Gaps are counted
    in bins, so the time of an estimate does not depend on the number of tokens.
    """

    LEARNED: ClassVar = ("scale", "_gaps_G", "_num_flips")

    def __init__(self, scale: float = 1e-3) -> None:
        """`scale` is the scale in nats that is assumed before the first weight update."""
        self.scale = scale
        self._gaps_G = np.zeros(len(_CENTRES_G))
        self._num_flips = 0.0

    def is_sound(self) -> bool:
        """Returns whether fields that were loaded from a file are valid.

        Then the scale is within its bounds, and no count is negative.
        """
        is_scale = _SMALLEST / 2 <= self.scale <= 2 * _LARGEST
        return is_scale and self._num_flips >= 0.0 and bool((self._gaps_G >= 0.0).all())

    def fade(self) -> None:
        """Reduces the weight of what an earlier start has learned, as if another weight update had followed."""
        self._gaps_G = _KEPT * self._gaps_G
        self._num_flips = _KEPT * self._num_flips

    def probability(self, gap_P: Array) -> Array:
        """Returns the probability that a weight update changes a token, float64 [P].

        `gap_P` has for each token the gap between the best two scores, in nats.
        """
        flips_P: Array = 1.0 / (1.0 + np.exp(np.minimum(np.asarray(gap_P, np.float64) / self.scale, 700.0)))
        return flips_P

    def observe(self, gap_P: Array, num_flips: int) -> None:
        """Learns from one weight update.

        Args:
            gap_P: Gaps between the best two scores, at the positions whose tokens are known under the old and the new
                weights, up to the first changed token of each text.
            num_flips: Number of texts in which the new weights sampled another token at one of these positions.
        """
        self.observe_counts(counts_of_gaps(gap_P), num_flips)

    def observe_counts(self, counts_G: Array, num_flips: int, *, is_same_update: bool = False) -> None:
        """Learns from one weight update like `observe`, but from gaps that `counts_of_gaps` has counted.

        The counts may be sums over several engines. With `is_same_update`, they are further counts for the update of the last
        call.
        """
        weight = 1.0 if is_same_update else _KEPT
        self._gaps_G = weight * self._gaps_G + counts_G
        self._num_flips = weight * self._num_flips + num_flips
        if self._gaps_G.any():
            self.scale = self._fitted()

    def _fitted(self) -> float:
        """Returns the scale that explains the observed number of flips. It is found by bisection of its logarithm."""
        wanted = self._num_flips + _UNSEEN_FLIPS
        low, high = np.log(_SMALLEST), np.log(_LARGEST)
        for _ in range(40):
            middle = (low + high) / 2
            expected = self._gaps_G @ (1.0 / (1.0 + np.exp(np.minimum(_CENTRES_G / np.exp(middle), 700.0))))
            low, high = (middle, high) if expected < wanted else (low, middle)
        return float(np.exp((low + high) / 2))
