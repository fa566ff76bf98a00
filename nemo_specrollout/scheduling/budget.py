# SPDX-License-Identifier: Apache-2.0
"""How many draft tokens each request gets: pure policies, observation in, decision out.

Shapes: B requests, K draft positions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.scheduling.step_time import StepCosts


@dataclass(frozen=True)
class BudgetObservation:
    """`survival_BK`: P(drafts 0..k of a request are all accepted), non-increasing in k, 0 where there is no draft.

    `caps_B`: the most drafts a request may have (its remaining length). `costs` is None while nothing was measured.
    """

    survival_BK: np.ndarray
    caps_B: np.ndarray
    costs: StepCosts | None


class BudgetPolicy(ABC):
    """Decides the number of draft tokens of every request, int64 [B], never above its cap."""

    needs_estimates = True

    @abstractmethod
    def allocate(self, observed: BudgetObservation) -> np.ndarray: ...


class AutoBudget(BudgetPolicy):
    """Hands out draft tokens one by one where the next is likeliest to be accepted, while that pays.

    The n likeliest tokens make a step of B requests yield B + (sum of their survival) tokens in the time that the table
    tells for B + n rows; the n with the most tokens a second wins, if it beats no drafts by `margin`. Tokens as likely as
    the last of them get in too.
    """

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def allocate(self, observed: BudgetObservation) -> np.ndarray:
        num_requests, num_positions = observed.survival_BK.shape
        if observed.costs is None:
            return np.zeros(num_requests, np.int64)
        allowed_BK = np.arange(num_positions) < observed.caps_B[:, None]
        survival_BK = observed.survival_BK * allowed_BK
        gains = np.sort(survival_BK, axis=None)[::-1]
        threshold = self._least_worthy(gains, num_requests, observed.costs)
        return np.count_nonzero(survival_BK >= threshold, axis=1)

    def _least_worthy(self, gains: np.ndarray, num_requests: int, costs: StepCosts) -> float:
        """The survival of the last draft token that pays, given all of them, likeliest first; above 1 if none does."""
        gains = gains[: min(np.count_nonzero(gains), len(costs.speculated_s) - 1 - num_requests)]
        if len(gains) == 0:
            return np.inf
        seconds = costs.speculated_s[num_requests + 1 : num_requests + 1 + len(gains)]
        rates = (num_requests + np.cumsum(gains)) / seconds
        best = int(np.argmax(rates))
        pays = rates[best] * costs.plain_s[num_requests] >= num_requests * (1.0 + self.margin)
        return float(gains[best]) if pays else np.inf


class FixedBudget(BudgetPolicy):
    """Up to `k` draft tokens for every request, always: what a fixed `num_speculative_tokens` does."""

    def __init__(self, k: int) -> None:
        self.k = k

    def allocate(self, observed: BudgetObservation) -> np.ndarray:
        available_B = np.count_nonzero(observed.survival_BK, axis=1)
        return np.minimum(np.minimum(available_B, self.k), observed.caps_B)


class RandomBudget(BudgetPolicy):
    """A random number of draft tokens for every request: for tests that outputs do not depend on budgets."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def allocate(self, observed: BudgetObservation) -> np.ndarray:
        available_B = np.minimum(np.count_nonzero(observed.survival_BK, axis=1), observed.caps_B)
        return self._rng.integers(0, available_B + 1)


def build_budget(config: BudgetConfig) -> BudgetPolicy:
    """The policy that `config.policy` names."""
    if config.policy == "auto":
        return AutoBudget(config.margin)
    if config.policy == "fixed":
        return FixedBudget(config.k)
    if config.policy == "random":
        return RandomBudget()
    raise ValueError(f"unknown budget policy {config.policy!r}")
