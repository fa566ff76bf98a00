# SPDX-License-Identifier: Apache-2.0
"""Functions that choose how many tokens a drafter with weights drafts, and how many draft tokens an engine step verifies.

In this file a step is an engine step. The drafting depth of a step is the number of tokens that the drafter with weights
drafts for each request. At depth 0 this drafter drafts nothing, and only reads the tokens of the requests.

The functions choose what gives the most tokens per second, which is the expected number of tokens of a step divided by its
seconds. The expected number of tokens is computed from a histogram of the drafts' survival. The mean survival would not be
enough. Where rows are expensive, drafts of mean survival may cost more time than they save, although the surest drafts save
time.

Shapes: B requests, K draft positions, F drafting depths, Q bins of survival, N draft counts.
"""

from typing import NamedTuple

import numpy as np

from nemo_specrollout.speculation.step_model import StepCosts

SAMPLED = 17
"""Distance of the values in the sample that `_largest` takes. With 17 it takes every seventeenth value.

The number is not a power of two, so that the sample has values of all requests and positions."""
SAMPLE_MARGIN = 2
"""Approximate number of values above the lower bound of `_largest`, divided by the number that is needed."""


class Steps(NamedTuple):
    """For each drafting depth, the engine step that is predicted to give the most tokens per second."""

    num_drafts_F: np.ndarray
    """Number of draft tokens that the step verifies, int64."""
    tokens_F: np.ndarray
    """Expected number of tokens by which all requests together grow in the step, float64."""
    seconds_F: np.ndarray
    """Predicted seconds of the step, including the time of drafting, float64."""

    @property
    def rate_F(self) -> np.ndarray:
        """Expected tokens per second of each step."""
        return self.tokens_F / self.seconds_F


def best_steps(
    count_FQ: np.ndarray,
    num_requests: int,
    costs: StepCosts,
    margin: float,
    draft_s_F: np.ndarray,
    read_row_s: float = 0.0,
) -> Steps:
    """Returns for each drafting depth the engine step with the most tokens per second.

    The steps that are compared differ in how many drafts they verify. Only a few numbers of drafts have to be tried. The best
    number uses up a bin of survival, or fills a CUDA graph, or reaches one of `StepCosts.corners`. The reason is as follows.
    The drafts with the highest survival are verified first. Within a bin of survival each further draft adds the same number
    of tokens. Within a CUDA graph each further draft adds about the same number of seconds. As long as tokens and seconds both
    grow linearly, their ratio only rises or only falls.

    Args:
        count_FQ: expected draft tokens of the batch, by drafting depth from 0 on and by bin of survival, float64.
        num_requests: number of requests in the batch.
        costs: predicted seconds of engine steps.
        margin: share by which a step with drafts must exceed the tokens per second of a step without drafts.
        draft_s_F: seconds that the drafter with weights takes to draft, for each depth, float64.
        read_row_s: seconds that the drafter with weights takes to read one more verified draft.
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
    """The drafting depth that `best_depth` has chosen for an engine step, and the seconds that it should save."""

    depth: int
    """Number of draft tokens for each request, or 0 if the drafter with weights should only read."""
    won_s: float
    """Seconds that the drafter with weights saves in the step, compared with the time that the same number of tokens takes
    without it. At depth 0 this is negative, because then the drafter takes time to read and drafts nothing."""


def best_depth(count_FQ: np.ndarray, num_requests: int, costs: StepCosts, margin: float) -> Choice:
    """Returns the drafting depth with the most tokens per second, and the seconds that the drafter with weights saves with it.

    The depth is 0 unless another depth has more than 1 + `margin` times the tokens per second of depth 0. `count_FQ` has the
    expected draft tokens of the batch, by depth from 0 on and by bin of survival, float64. `costs.drafting` must not be None.
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
    """Returns the survival of each draft, which is the product of the acceptance rates up to this draft, [B, K].

    `rates_BK` has for each draft the probability that it is accepted if all drafts before it are accepted. The products are
    computed position by position, because `numpy.cumprod` takes twice as long.
    """
    survival_KB = rates_BK.T.copy()
    for k in range(1, len(survival_KB)):
        survival_KB[k] *= survival_KB[k - 1]
    return survival_KB.T


def likeliest(survival_BK: np.ndarray, caps_B: np.ndarray, most: int) -> np.ndarray:
    """Returns how many of each request's drafts are among the `most` drafts of the batch with the highest survival, int64 [B].

    `caps_B` is the largest number of drafts that each request may have. Within a request, the survival must not rise from one
    draft to the next. Drafts with survival 0 are never chosen. Among drafts of equal survival, those at earlier positions are
    chosen first. The result is all zeros if `most` is 0 or negative.

    Sorting the drafts would take ten times as long, so the function only finds the smallest survival that is still chosen.
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
    """Returns the `rank`-th largest of the values, where rank 1 is the largest.

    To be fast, it first computes a lower bound from a sample of the values, and then compares only the values above this
    bound. If fewer than `rank` values are above the bound, it compares all values.
    """
    sample = values[::SAMPLED]
    bound = SAMPLE_MARGIN * rank // SAMPLED + SAMPLED
    if bound < len(sample):
        above = values[values > np.partition(sample, len(sample) - bound)[len(sample) - bound]]
        if len(above) >= rank:
            values = above
    return float(np.partition(values, len(values) - rank)[len(values) - rank])
