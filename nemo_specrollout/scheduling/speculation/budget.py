# SPDX-License-Identifier: Apache-2.0
"""Verification budgets: pure policies that decide how many draft tokens of each request are verified, and in which steps.

Shapes: B requests, K draft positions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numba import njit

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.speculation.step_time import StepCosts, most_drafts, speculated_s

PATIENCE = 4
"""Budgets without drafts in a row before the first pause."""
LOOKS = 2
"""Budgets without drafts in a row before each later pause. The first of them still uses numbers from the pause."""
SIZES = 16
"""Batch size classes, by the bit length of the number of requests."""
FIRST_PAUSE = 2
"""Steps of the shortest pause."""
PAUSE_SHARE = 1 / 8
"""Steps of a longer pause, as a share of the steps since drafts last paid. Drafts that begin to pay are found that soon."""


@dataclass(frozen=True)
class BudgetDecision:
    """Draft tokens to verify."""

    counts_B: np.ndarray
    """Number of draft tokens of each request, int64."""
    least_survival: float = 0.0
    """Survival of the least likely token that is verified; 0 if there is none or the policy ignores survival."""
    row_price: float = 0.0
    """Tokens that the engine produces in the time of one more row; 0 if the policy ignores costs."""


class BudgetPolicy(ABC):
    """Decides the number of draft tokens of each request, never above its cap."""

    @abstractmethod
    def allocate(self, survival_BK: np.ndarray, caps_B: np.ndarray, costs: StepCosts | None) -> BudgetDecision:
        """Returns the number of draft tokens of each request.

        `survival_BK` is P(drafts 0..k of a request are all accepted), float64, non-increasing in k, and 0 where there is no
        draft. `caps_B` is each request's remaining length, int64. `costs` is None before the first measurement.
        """


class AutoBudget(BudgetPolicy):
    """Verifies the likeliest draft tokens of the batch. Their number maximizes the predicted tokens a second.

    A step of B requests that verifies the n likeliest tokens yields B + (sum of their survival) tokens. `StepCosts` predicts
    its duration. The best n must beat a step without drafts by the share `margin`.
    """

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def allocate(self, survival_BK: np.ndarray, caps_B: np.ndarray, costs: StepCosts | None) -> BudgetDecision:
        counts_B = np.zeros(len(caps_B), np.int64)
        if costs is None:
            return BudgetDecision(counts_B)
        least_survival, tokens_per_s = _hand_out(survival_BK, caps_B, costs, 1.0 + self.margin, counts_B)
        return BudgetDecision(counts_B, least_survival, tokens_per_s * costs.row_s(len(counts_B), int(counts_B.sum())))


class FixedBudget(BudgetPolicy):
    """Always verifies up to `k` draft tokens of each request, like a fixed `num_speculative_tokens`."""

    def __init__(self, k: int) -> None:
        self.k = k

    def allocate(self, survival_BK: np.ndarray, caps_B: np.ndarray, costs: StepCosts | None) -> BudgetDecision:
        available_B = np.count_nonzero(survival_BK, axis=1)
        return BudgetDecision(np.minimum(np.minimum(available_B, self.k), caps_B))


def build_budget(config: BudgetConfig) -> BudgetPolicy:
    """Returns the policy that `config.policy` names."""
    return AutoBudget(config.margin) if config.policy == "auto" else FixedBudget(config.k)


@njit(cache=True, error_model="numpy")
def _hand_out(survival_BK, caps_B, costs, least_gain, counts_B):  # type: ignore[no-untyped-def]
    """Writes the number of draft tokens of each request that pay.

    Returns the survival of the least likely of them (0 if there is none) and the tokens a second.
    """
    num_requests, num_positions = survival_BK.shape
    gains = np.zeros(num_requests * num_positions)
    num_gains = 0
    for b in range(num_requests):
        for k in range(min(num_positions, caps_B[b])):
            if survival_BK[b, k] > 0.0:
                gains[num_gains] = survival_BK[b, k]
                num_gains += 1
    gains = np.sort(gains[:num_gains])[::-1]
    tokens = float(num_requests)
    most_tokens_per_s = least_gain * num_requests / costs.plain_s[num_requests]
    num_chosen = 0
    for i in range(min(num_gains, most_drafts(costs, num_requests))):
        tokens += gains[i]
        tokens_per_s = tokens / speculated_s(costs, num_requests, i + 1)
        if tokens_per_s >= most_tokens_per_s:
            most_tokens_per_s = tokens_per_s
            num_chosen = i + 1
    if num_chosen == 0:
        return 0.0, most_tokens_per_s
    threshold = gains[num_chosen - 1]
    num_equal = np.sum(gains[:num_chosen] == threshold)
    for b in range(num_requests):
        for k in range(min(num_positions, caps_B[b])):
            is_equal = survival_BK[b, k] == threshold and num_equal > 0
            num_equal -= is_equal
            counts_B[b] += is_equal or survival_BK[b, k] > threshold
    return threshold, most_tokens_per_s


class DraftingPause:
    """Never pauses drafting: the policy for budgets that ignore the value of drafts. Base of the other policies."""

    def drafts_decided(self, num_drafts: int) -> None:
        """Takes note that the budget gave the batch `num_drafts` draft tokens."""

    def requests_arrived(self, num_requests: int) -> None:
        """Takes note of new requests."""

    def count_step(self, num_requests: int) -> bool:
        """Counts a step of `num_requests` requests. Returns whether to leave out its drafts."""
        return False


class AutoPause(DraftingPause):
    """Pauses after some steps whose drafts did not pay. The longer they have not paid, the longer a pause lasts.

    Two states: drafting, and paused with some steps left.
    - Drafting becomes paused when budgets in a row have refused all drafts: `PATIENCE` before the first pause, `LOOKS` later.
    - Paused becomes drafting when no step is left. The steps since drafts last paid count on.
    - Drafts that pay lead to drafting from either state, and reset that count.
    - So do another batch size class, and a batch with at least half new requests. But each class keeps its count.

    Example: call `drafts_decided(0)` after each budget, then `count_step(8)` for the next step.
    """

    def __init__(self) -> None:
        self._num_idle = [0] * SIZES
        """Steps since drafts last paid, for each batch size class."""
        self._size = self._num_refused = self._num_left = self._num_new = 0

    def drafts_decided(self, num_drafts: int) -> None:
        if num_drafts:
            self._num_idle[self._size] = self._num_refused = self._num_left = 0
        elif not self._num_left:
            self._num_refused += 1

    def requests_arrived(self, num_requests: int) -> None:
        self._num_new += num_requests

    def count_step(self, num_requests: int) -> bool:
        size = min(num_requests.bit_length(), SIZES - 1)
        if size != self._size or 2 * self._num_new >= num_requests:
            self._size, self._num_refused, self._num_left, self._num_new = size, 0, 0, 0
        self._num_idle[size] += 1
        if self._num_left:
            self._num_left -= 1
            return self._num_left > 0
        num_idle = self._num_idle[size]
        if self._num_refused < (PATIENCE if num_idle <= PATIENCE else LOOKS):
            return False
        self._num_left = max(FIRST_PAUSE, int(num_idle * PAUSE_SHARE))
        self._num_refused = 0
        return True


def build_pause(config: BudgetConfig) -> DraftingPause:
    """Returns the pause policy that goes with the budget policy `config.policy`."""
    return AutoPause() if config.policy == "auto" else DraftingPause()
