# SPDX-License-Identifier: Apache-2.0
"""Verification budgets: pure policies that decide how many draft tokens of each request are verified.

Shapes: B requests, K draft positions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numba import njit

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.speculation.step_time import StepCosts


@dataclass(frozen=True)
class BudgetObservation:
    """Drafts of one engine step, and the cost of verifying them."""

    survival_BK: np.ndarray
    """P(drafts 0..k of a request are all accepted), float64. Non-increasing in k; 0 where there is no draft."""

    caps_B: np.ndarray
    """Maximum number of drafts of each request (its remaining length), int64."""

    costs: StepCosts | None
    """Predicted step times; None before the first measurement."""


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
    def allocate(self, observed: BudgetObservation) -> BudgetDecision:
        """Returns the number of draft tokens of each request."""


class AutoBudget(BudgetPolicy):
    """Verifies the likeliest draft tokens of the batch, as many as give the most tokens a second.

    A step of B requests that verifies the n likeliest tokens yields B + (sum of their survival) tokens. `StepCosts` predicts
    its duration. The best n must beat a step without drafts by the share `margin`. Ties with the last token are included.
    """

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def allocate(self, observed: BudgetObservation) -> BudgetDecision:
        counts_B, costs = np.zeros(len(observed.caps_B), np.int64), observed.costs
        if costs is None:
            return BudgetDecision(counts_B)
        least_survival, tokens_per_s = _hand_out(
            observed.survival_BK, observed.caps_B, costs.plain_s, costs.overhead_s, costs.discount_s,
            1.0 + self.margin, counts_B,
        )  # fmt: skip
        row_price = tokens_per_s * costs.row_s(len(counts_B), int(counts_B.sum()))
        return BudgetDecision(counts_B, least_survival, row_price)


class FixedBudget(BudgetPolicy):
    """Always verifies up to `k` draft tokens of each request, like a fixed `num_speculative_tokens`."""

    def __init__(self, k: int) -> None:
        self.k = k

    def allocate(self, observed: BudgetObservation) -> BudgetDecision:
        available_B = np.count_nonzero(observed.survival_BK, axis=1)
        return BudgetDecision(np.minimum(np.minimum(available_B, self.k), observed.caps_B))


class RandomBudget(BudgetPolicy):
    """Verifies a random number of draft tokens. Tests use it to show that outputs do not depend on budgets."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def allocate(self, observed: BudgetObservation) -> BudgetDecision:
        available_B = np.minimum(np.count_nonzero(observed.survival_BK, axis=1), observed.caps_B)
        return BudgetDecision(self._rng.integers(0, available_B + 1))


def build_budget(config: BudgetConfig) -> BudgetPolicy:
    """Returns the policy that `config.policy` names."""
    if config.policy == "auto":
        return AutoBudget(config.margin)
    if config.policy == "fixed":
        return FixedBudget(config.k)
    if config.policy == "random":
        return RandomBudget()
    raise ValueError(f"no budget policy for {config.policy!r}")


@njit(
    "Tuple((float64, float64))(float64[:,:], int64[:], float64[:], float64, float64, float64, int64[:])",
    cache=True,
    error_model="numpy",
)
def _hand_out(survival_BK, caps_B, plain_s, overhead_s, discount_s, least_gain, counts_B):  # type: ignore[no-untyped-def]
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
    most_tokens_per_s = least_gain * num_requests / plain_s[num_requests]
    threshold = np.inf
    for i in range(min(num_gains, len(plain_s) - 1 - num_requests)):
        tokens += gains[i]
        speculated_s = plain_s[num_requests + 1 + i] + overhead_s - (i + 1) * discount_s
        tokens_per_s = tokens / max(speculated_s, plain_s[num_requests])
        if tokens_per_s >= most_tokens_per_s:
            most_tokens_per_s = tokens_per_s
            threshold = gains[i]
    for b in range(num_requests):
        for k in range(min(num_positions, caps_B[b])):
            counts_B[b] += survival_BK[b, k] >= threshold
    return (0.0 if threshold == np.inf else threshold), most_tokens_per_s
