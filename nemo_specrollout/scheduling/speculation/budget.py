# SPDX-License-Identifier: Apache-2.0
"""How many draft tokens each request gets: pure policies, observation in, decision out.

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
    """`survival_BK`: P(drafts 0..k of a request are all accepted), non-increasing in k, 0 where there is no draft.

    `caps_B`: the most drafts a request may have (its remaining length). `costs` is None while nothing was measured.
    """

    survival_BK: np.ndarray
    caps_B: np.ndarray
    costs: StepCosts | None


@dataclass(frozen=True)
class BudgetDecision:
    """`counts_B`: draft tokens of every request, int64. `least_survival`: a token less likely than that was not worth
    its row; 0 if the policy does not weigh, or nothing was. `row_price`: tokens that the engine makes in the time of one
    more row; 0 if the policy does not weigh."""

    counts_B: np.ndarray
    least_survival: float = 0.0
    row_price: float = 0.0


class BudgetPolicy(ABC):
    """Decides the number of draft tokens of every request, never above its cap."""

    @abstractmethod
    def allocate(self, observed: BudgetObservation) -> BudgetDecision: ...


class AutoBudget(BudgetPolicy):
    """Hands out draft tokens one by one where the next is likeliest to be accepted, while that pays.

    The n likeliest tokens make a step of B requests yield B + (sum of their survival) tokens in the time that the table
    tells (`StepCosts`); the n with the most tokens a second wins, if it beats no drafts by `margin`. Tokens as likely as
    the last of them get in too.
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
    """Up to `k` draft tokens for every request, always: what a fixed `num_speculative_tokens` does."""

    def __init__(self, k: int) -> None:
        self.k = k

    def allocate(self, observed: BudgetObservation) -> BudgetDecision:
        available_B = np.count_nonzero(observed.survival_BK, axis=1)
        return BudgetDecision(np.minimum(np.minimum(available_B, self.k), observed.caps_B))


class RandomBudget(BudgetPolicy):
    """A random number of draft tokens for every request: for tests that outputs do not depend on budgets."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def allocate(self, observed: BudgetObservation) -> BudgetDecision:
        available_B = np.minimum(np.count_nonzero(observed.survival_BK, axis=1), observed.caps_B)
        return BudgetDecision(self._rng.integers(0, available_B + 1))


def build_budget(config: BudgetConfig) -> BudgetPolicy:
    """The policy that `config.policy` names."""
    if config.policy == "auto":
        return AutoBudget(config.margin)
    if config.policy == "fixed":
        return FixedBudget(config.k)
    if config.policy == "random":
        return RandomBudget()
    raise ValueError(f"unknown budget policy {config.policy!r}")


@njit(
    "Tuple((float64, float64))(float64[:,:], int64[:], float64[:], float64, float64, float64, int64[:])",
    cache=True,
    error_model="numpy",
)
def _hand_out(survival_BK, caps_B, plain_s, overhead_s, discount_s, least_gain, counts_B):  # type: ignore[no-untyped-def]
    """Writes the number of each request's draft tokens that pay. Returns the survival of the least likely of them, 0 if there
    is none, and tokens a second. A kernel, because it runs in every step."""
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
