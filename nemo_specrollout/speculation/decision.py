# SPDX-License-Identifier: Apache-2.0
"""Chooses how deep the drafter with weights drafts in an engine step, and how many draft tokens are verified.

In this file a step is an engine step, and the model is the drafter with weights. Its depth is the number of tokens that it
drafts for each request. At depth 0 it only reads the tokens of the requests.

Each choice maximizes tokens per second, which are the expected tokens of a step divided by its seconds. What draft tokens are
worth is taken from a histogram of their survival. The mean of their survival would not do, because where rows are expensive it
may show no gain, although it would pay to verify only the surest tokens.

Shapes: B requests, K draft positions, F depths of drafting, Q bins of survival, N numbers of drafts.
"""

from typing import NamedTuple

import numpy as np

from nemo_specrollout.speculation.step_model import StepCosts

SAMPLED = 17
"""One of this many drafts is in the sample by which `_largest` bounds the survival of chosen drafts from below. The number is
not a power of two, so that the sample meets all requests and positions."""
SAMPLE_MARGIN = 2
"""The bound is set so low that about this many times as many drafts as are chosen should exceed it."""


class Steps(NamedTuple):
    """The predicted best step for each depth."""

    num_drafts_F: np.ndarray
    """Number of draft tokens to verify, int64."""
    tokens_F: np.ndarray
    """Expected tokens of the step, float64."""
    seconds_F: np.ndarray
    """Seconds of the step with its drafting, float64."""

    @property
    def rate_F(self) -> np.ndarray:
        """Tokens per second."""
        return self.tokens_F / self.seconds_F


def best_steps(
    count_FQ: np.ndarray,
    num_requests: int,
    costs: StepCosts,
    margin: float,
    draft_s_F: np.ndarray,
    read_row_s: float = 0.0,
) -> Steps:
    """Returns for each depth the step with the most tokens per second, over all numbers of draft tokens to verify.

    Only a few numbers of drafts must be compared. Drafts are verified in the order of their survival, so each further draft
    adds as many tokens as the one before until a bin is used up, and about as many seconds until a larger CUDA graph is
    needed. Where tokens and seconds both grow linearly, their ratio only rises or only falls. So the best number is one at
    which a bin is used up, one at which a CUDA graph is full, or one of `StepCosts.corners` beyond the graphs.

    Args:
        count_FQ: expected draft tokens of the batch, by depth from 0 on and by bin of survival, float64.
        num_requests: number of requests in the batch.
        costs: predicted seconds of steps.
        margin: share by which a step with drafts must exceed the tokens per second of a step without.
        draft_s_F: seconds of drafting to each depth, float64.
        read_row_s: seconds in which the model reads one more verified draft.
    """
    num_depths, num_bins = count_FQ.shape
    most_FQ, sum_FQ = np.zeros((2, num_depths, num_bins + 1))  # of drafts and accepted ones, from the best bin on
    falling_FQ = count_FQ[:, ::-1]
    falling_FQ.cumsum(axis=1, out=most_FQ[:, 1:])
    (falling_FQ * np.arange(2 * num_bins - 1, 0, -2) / (2 * num_bins)).cumsum(axis=1, out=sum_FQ[:, 1:])
    drafts_FN = np.floor(most_FQ + 1e-6)
    if len(costs.graph_sizes):
        ends = np.concatenate([costs.graph_sizes, costs.corners])
        filled_FN = np.minimum(ends - num_requests, drafts_FN[:, -1:])
        drafts_FN = np.concatenate([drafts_FN, filled_FN], axis=1)
    drafts_FN = np.minimum(np.maximum(drafts_FN, 0.0), costs.most_drafts(num_requests))
    apart_F1 = (most_FQ[:, -1].max() + 1.0) * np.arange(num_depths)[:, None]  # one interpolation serves all depths
    tokens_FN = np.interp(drafts_FN + apart_F1, (most_FQ + apart_F1).ravel(), sum_FQ.ravel())
    seconds_FN = costs.seconds(num_requests, drafts_FN) + drafts_FN * read_row_s + draft_s_F[:, None]
    rate_FN = (num_requests + tokens_FN) / seconds_FN
    rows = np.arange(num_depths)
    best_F = rate_FN.argmax(axis=1)
    best_F *= rate_FN[rows, best_F] > (1.0 + margin) * rate_FN[:, 0]
    return Steps(
        drafts_FN[rows, best_F].astype(np.int64), num_requests + tokens_FN[rows, best_F], seconds_FN[rows, best_F]
    )


class Choice(NamedTuple):
    """The best depth for a step."""

    depth: int
    """Draft tokens for each request, or 0 if the model only reads."""
    won_s: float
    """Seconds by which the step's tokens come sooner than without the model. It is negative if the model only reads, because
    reading takes time and wins nothing in this step."""


def best_depth(count_FQ: np.ndarray, num_requests: int, costs: StepCosts, margin: float) -> Choice:
    """Returns the depth with the most tokens per second. It is above 0 only if that beats depth 0 by the share `margin`.

    `count_FQ` are the expected draft tokens of the batch, by depth from 0 on and by bin of survival, float64. `costs.drafting`
    must be known.
    """
    drafting = costs.drafting
    assert drafting is not None
    draft_s_F = np.array([drafting.seconds(num_requests, depth) for depth in range(len(count_FQ))])
    steps = best_steps(count_FQ, num_requests, costs, margin, draft_s_F, drafting.row_s)
    rate_F = steps.rate_F
    depth = int(rate_F.argmax()) if rate_F.max() > (1.0 + margin) * rate_F[0] else 0
    alone_s = float(steps.seconds_F[0]) - float(draft_s_F[0]) - float(steps.num_drafts_F[0]) * drafting.row_s
    won_s = float(steps.tokens_F[depth]) * alone_s / float(steps.tokens_F[0]) - float(steps.seconds_F[depth])
    return Choice(depth, won_s)


def survival_of(rates_BK: np.ndarray) -> np.ndarray:
    """Returns the survival of each draft, which is the product of the acceptance rates up to it, [B, K].

    `rates_BK` has for each draft the probability that it is accepted if all before it are. The product is computed position
    by position, because NumPy's own product along a row takes twice as long.
    """
    survival_KB = rates_BK.T.copy()
    for k in range(1, len(survival_KB)):
        survival_KB[k] *= survival_KB[k - 1]
    return survival_KB.T


def likeliest(survival_BK: np.ndarray, caps_B: np.ndarray, most: int) -> np.ndarray:
    """Returns how many of each request's drafts are among the `most` likeliest of the batch, int64 [B].

    `caps_B` is the most drafts of each request. Survival must not rise along a request. A draft of survival 0 is never chosen,
    and no draft at all if `most` is not above 0. Of drafts with the same survival, those at earlier positions come first.

    The drafts are not sorted, because that takes ten times as long. It is enough to find the smallest survival that is chosen.
    """
    num_requests, num_positions = survival_BK.shape
    if most <= 0:
        return np.zeros(num_requests, np.int64)
    if (caps_B < num_positions).any():
        survival_BK = np.where(np.arange(num_positions) < caps_B[:, None], survival_BK, 0.0)
    flat = survival_BK.T.ravel()
    least = _largest(flat, most) if most < len(flat) else 0.0
    counts_B = np.count_nonzero(survival_BK > least, axis=1)
    left = most - int(counts_B.sum())
    if least > 0.0 and left:
        equal = np.flatnonzero(flat == least)[:left]
        counts_B += np.bincount(equal % num_requests, minlength=num_requests)
    return counts_B


def _largest(values: np.ndarray, rank: int) -> float:
    """Returns the value of this rank, where the largest value has rank 1.

    A sample of the values bounds the result from below, so that few values are left to compare. If too few are left, all
    values are compared.
    """
    sample = values[::SAMPLED]
    bound = SAMPLE_MARGIN * rank // SAMPLED + SAMPLED
    if bound < len(sample):
        above = values[values > np.partition(sample, len(sample) - bound)[len(sample) - bound]]
        if len(above) >= rank:
            values = above
    return float(np.partition(values, len(values) - rank)[len(values) - rank])
