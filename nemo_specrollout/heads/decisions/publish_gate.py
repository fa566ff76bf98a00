# SPDX-License-Identifier: Apache-2.0
"""The publish gate, which decides by a paired test on held-out sequences whether a trained head replaces the current one.

Shapes: N sequences. The acceptance length is the mean number of tokens by which a request grows in an engine step, which is 1
without drafts.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit  # the quantile of Student's t

MIN_FIRST_GAIN = 0.1
"""Gain in acceptance length over decoding without drafts that a run's first head needs to be published."""
MIN_SAMPLES = 8
"""Minimum number of held-out prompts with which a candidate can be judged."""
SKEWNESS_WEIGHT = 2.0
"""Factor on the skewness of the sample. It is above 1, because a sample usually has less skewness than its distribution."""


@dataclass(frozen=True)
class GateDecision:
    """The publish gate's decision about a candidate. `difference` and `bound` are NaN if nothing could be compared."""

    published: bool
    difference: float
    """Mean acceptance length of the candidate minus that of the head in service, weighted by the tokens of each sequence."""
    bound: float
    """Lower confidence bound of the difference."""
    num_samples: int
    """Number of independent samples, which are the different prompts."""
    reason: str
    """Sentence that says whether the candidate is published or refused, and why."""


class PublishGate:
    """Decides that a candidate is published if its acceptance length is at most `tolerance` below that of the head in service.

    This must hold at the confidence level `confidence`, which is at least 0.5 and below 1. The test is a one-sided paired
    t-test of the weighted mean difference. Sequences of one prompt are not independent, so they count as one sample. If no
    head is in service, the candidate must reach the acceptance length 1 + `MIN_FIRST_GAIN`. Without drafts, the acceptance
    length is 1.
    """

    def __init__(self, confidence: float = 0.95, tolerance: float = 0.0) -> None:
        self.confidence = confidence
        self.tolerance = tolerance

    def decide(
        self,
        candidate_N: np.ndarray,
        current_N: np.ndarray | None,
        weights_N: np.ndarray,
        groups_N: np.ndarray | None = None,
    ) -> GateDecision:
        """Returns the decision, from the acceptance lengths of the candidate and of the head in service, float [N] each.

        `current_N` is None if no head is in service. `weights_N` has the number of tokens of each sequence. `groups_N` has the
        number of each sequence's prompt, or is None if all prompts differ. Raises ValueError if the arrays differ in length or
        a weight is not positive.
        """
        is_first = current_N is None
        reference_N = np.full(len(candidate_N), 1.0 + MIN_FIRST_GAIN) if current_N is None else current_N
        groups_N = np.arange(len(candidate_N)) if groups_N is None else groups_N
        if not len(candidate_N) == len(reference_N) == len(weights_N) == len(groups_N):
            raise ValueError("candidate, current, weights and groups must be of the same sequences")
        if not (np.isfinite(weights_N) & (weights_N > 0)).all():
            raise ValueError("weights must be positive: the number of tokens of each sequence")
        num_samples = len(np.unique(groups_N))
        num_broken = int((~np.isfinite(candidate_N)).sum())
        if num_broken:
            return self._refused(num_samples, f"{num_broken} of the candidate's acceptance lengths are not numbers")
        if not np.isfinite(reference_N).all():
            return self._refused(num_samples, "the acceptance lengths of the head in service are not all numbers")
        if num_samples < MIN_SAMPLES:
            return self._refused(
                num_samples, f"{num_samples} held-out prompts are too few to judge by, {MIN_SAMPLES} needed"
            )
        difference, bound = lower_bound(candidate_N - reference_N, weights_N, groups_N, self.confidence)
        published = bound >= -self.tolerance
        against = "drafting nothing" if is_first else "the head in service"
        candidate = float(np.average(candidate_N, weights=weights_N))
        reference = float(np.average(reference_N, weights=weights_N))
        required = f" (1 plus the required gain of {MIN_FIRST_GAIN})" if is_first else ""
        reason = (
            f"{'published' if published else 'refused'}: held-out acceptance length {candidate:.3f}, {against} "
            f"{reference:.3f}{required}; the difference is at least {bound:+.3f} at confidence {self.confidence} "
            f"over {num_samples} prompts, {0.0 - self.tolerance:+.3f} needed"
        )
        return GateDecision(published, difference, bound, num_samples, reason)

    def _refused(self, num_samples: int, why: str) -> GateDecision:
        return GateDecision(False, math.nan, math.nan, num_samples, f"refused: {why}")


def lower_bound(
    differences_N: np.ndarray, weights_N: np.ndarray, groups_N: np.ndarray, confidence: float
) -> tuple[float, float]:
    """Returns the weighted mean of the differences and its one-sided lower confidence bound.

    `groups_N` has the number of the group of each difference, and there must be at least two groups. Differences of one group
    are not independent of each other, so the standard error is that of the jackknife over groups. If the differences are
    skewed towards losses, Student's quantile is too small. Then it is increased as in Hall, "On the removal of skewness by
    transformation" (JRSS B, 1992), with twice the skewness of the sample. Losses that are so rare that the sample has none
    cannot be detected.
    """
    _, group_N = np.unique(groups_N, return_inverse=True)
    shares_N = weights_N / weights_N.sum()
    mean = float((shares_N * differences_N).sum())
    shares_G = np.bincount(group_N, shares_N)
    influence_G = np.bincount(group_N, shares_N * (differences_N - mean)) / (1.0 - shares_G)
    squares = float((influence_G**2).sum())
    if squares == 0.0:
        return mean, mean
    # A few long sequences may carry nearly all the weight.
    num_effective = 1.0 / float((shares_G**2).sum())
    quantile = float(stdtrit(max(1, math.floor(num_effective - 1.0)), confidence))
    skewness = SKEWNESS_WEIGHT * float((influence_G**3).sum()) / squares**1.5
    if skewness < 0.0:
        inner = 1.0 + skewness * (quantile - skewness / 6.0)
        quantile = max(quantile, 3.0 / skewness * (math.copysign(abs(inner) ** (1 / 3), inner) - 1.0))
    return mean, mean - quantile * math.sqrt((1.0 - 1.0 / len(shares_G)) * squares)
