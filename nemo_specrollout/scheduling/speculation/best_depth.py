# SPDX-License-Identifier: Apache-2.0
"""Compiled kernel of `draft_plan.AutoPlanner`: finds the draft depth of a model with the highest predicted tokens a second.

It weighs draft tokens by histograms of their survival. A planner that knows only the mean sees no gain if rows are expensive,
although the sure tokens alone would pay.

Shapes: B requests, P proposers (0: the text drafters, 1: the draft model), K draft positions, Q bins of survival, N requests.
Text drafts are "found", because they exist before the model drafts. The model's drafts are "forecast".
"""

import numpy as np
from numba import njit

from nemo_specrollout.scheduling.speculation.draft_time import drafting_s
from nemo_specrollout.scheduling.speculation.step_time import most_drafts, speculated_s

NUM_BINS = 128
"""Bins of survival between 0 and 1."""
DECAY = 0.98
"""Factor on the earlier counts of a histogram at each step with proposals."""


class SurvivalSpread:
    """A histogram of survival for each proposer and draft position. Owns the decayed counts."""

    def __init__(self, num_positions: int) -> None:
        self._count_PKQ = np.zeros((2, num_positions, NUM_BINS))

    def observe(self, survival_PNK: np.ndarray) -> None:
        """Adds the survival of the latest proposals, float64 [P, N, K]; 0 where nothing was proposed."""
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


@njit(cache=True)
def _summarize(share_KQ, row_price, mean_K, top_K, worth_K):  # type: ignore[no-untyped-def]
    """Writes for each position's histogram the mean, the centre of the highest bin, and the mean worth of a token."""
    for k in range(len(share_KQ)):
        for q in range(NUM_BINS):
            if share_KQ[k, q] > 0.0:
                top_K[k] = (q + 0.5) / NUM_BINS
                mean_K[k] += share_KQ[k, q] * top_K[k]
                worth_K[k] += share_KQ[k, q] * max(top_K[k] - row_price, 0.0)


@njit(cache=True, inline="always")
def _split(survival, mean, top):  # type: ignore[no-untyped-def]
    """Returns the weights of two kinds of tokens in a mixture of three kinds whose mean survival is `survival`.

    The first kind is distributed as the histogram, with the mean `mean`. The second survives with `top`, the centre of the
    highest bin. The third always fails; its weight is what the others leave, and above 0 only if `survival` is below `mean`.
    """
    if mean <= 0.0 or survival >= top:
        return 0.0, 1.0
    if survival <= mean:
        return survival / mean, 0.0
    share = (top - survival) / (top - mean)
    return share, 1.0 - share


@njit(cache=True)
def _worth(survival_K, depth, row_price, mean_K, top_K, worth_K):  # type: ignore[no-untyped-def]
    """Returns the sum over a proposal's tokens of survival less `row_price`, the price of verifying one, where positive."""
    worth = 0.0
    for k in range(depth):
        if survival_K[k] > 0.0:
            share, sure = _split(survival_K[k], mean_K[k], top_K[k])
            worth += share * worth_K[k] + sure * max(max(top_K[k], survival_K[k]) - row_price, 0.0)
    return worth


@njit(cache=True)
def _collect(  # type: ignore[no-untyped-def]
    found_BK, forecast_BK, found_worth_B, depth, share_PKQ, row_price, mean_PK, top_PK, worth_PK, counts, sums
):
    """Counts the draft tokens of a step in which the model drafts `depth` tokens, by bin of survival, and sums survival.

    Each request takes the model's drafts or the found ones, whichever are worth more. Returns whether any takes the model's.
    """
    num_positions = found_BK.shape[1]
    counts[:] = 0.0
    sums[:] = 0.0
    weight_PK = np.zeros((2, num_positions))
    is_asked = False
    for b in range(len(found_BK)):
        drafted = _worth(forecast_BK[b], depth, row_price, mean_PK[1], top_PK[1], worth_PK[1])
        p = 1 if drafted > found_worth_B[b] else 0
        is_asked |= p == 1
        for k in range(depth if p == 1 else num_positions):
            survival = forecast_BK[b, k] if p == 1 else found_BK[b, k]
            if survival <= 0.0:
                continue
            share, sure = _split(survival, mean_PK[p, k], top_PK[p, k])
            weight_PK[p, k] += share
            if sure > 0.0:
                highest = max(top_PK[p, k], survival)
                counts[bin_of(highest)] += sure
                sums[bin_of(highest)] += sure * highest
    for p in range(2):
        for k in range(num_positions):
            if weight_PK[p, k] > 0.0:
                for q in range(NUM_BINS):
                    counts[q] += weight_PK[p, k] * share_PKQ[p, k, q]
                    sums[q] += weight_PK[p, k] * share_PKQ[p, k, q] * (q + 0.5) / NUM_BINS
    return is_asked


@njit(cache=True, error_model="numpy")
def best_depth(found_BK, forecast_BK, share_PKQ, costs, draft, read_s, least_gain, row_price):  # type: ignore[no-untyped-def]
    """Returns the best depth, its tokens a second, and the tokens a second without the model.

    At depth 0 the model still reads the sampled tokens, which takes `read_s`. Without the model that time is saved. So four
    rates are compared, all in tokens a second at the best number of verified tokens:
    - `rate`: of the depth in question, with the time for drafting, or for reading at depth 0;
    - `rate_reading`: of depth 0. Another depth must exceed it by the factor `least_gain`;
    - `best_rate`: of the best depth so far;
    - `rate_without`: of text drafts alone, without the model. The planner computes from it what the model wins.
    Survival is binned because sorting all draft tokens takes longer.
    """
    num_requests, num_positions = found_BK.shape
    mean_PK, top_PK, worth_PK = np.zeros((3, 2, num_positions))
    for p in range(2):
        _summarize(share_PKQ[p], row_price, mean_PK[p], top_PK[p], worth_PK[p])
    found_worth_B = np.zeros(num_requests)
    for b in range(num_requests):
        found_worth_B[b] = _worth(found_BK[b], num_positions, row_price, mean_PK[0], top_PK[0], worth_PK[0])
    counts, sums = np.zeros((2, NUM_BINS))
    chosen, best_rate, rate_without, rate_reading = 0, 0.0, 0.0, 0.0
    for depth in range(num_positions + 1):
        is_asked = _collect(
            found_BK, forecast_BK, found_worth_B, depth, share_PKQ, row_price, mean_PK, top_PK, worth_PK, counts, sums
        )
        if depth > 0 and not is_asked:
            continue
        draft_s, read_row_s = read_s, 0.0
        if depth > 0:
            draft_s, read_row_s = drafting_s(draft, num_requests, num_requests, depth), draft.row_s
        tokens, drafts, plain_s = float(num_requests), 0.0, costs.plain_s[num_requests]
        rate, rate_alone = tokens / (plain_s + draft_s), tokens / plain_s
        for i in range(NUM_BINS - 1, -1, -1):
            drafts += counts[i]
            tokens += sums[i]
            num_drafts = round(drafts)
            if counts[i] == 0.0 or num_drafts > most_drafts(costs, num_requests):
                continue
            step_s = speculated_s(costs, num_requests, num_drafts)
            rate = max(rate, tokens / (step_s + draft_s + num_drafts * read_row_s))
            rate_alone = max(rate_alone, tokens / step_s)
        if depth == 0:
            best_rate, rate_reading, rate_without = rate, rate, rate_alone
        elif rate > best_rate and rate > least_gain * rate_reading:
            chosen, best_rate = depth, rate
    return chosen, best_rate, rate_without
