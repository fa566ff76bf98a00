# SPDX-License-Identifier: Apache-2.0
"""Simulates how engines draft. The production code decides how much is drafted, with seconds from a cost model.

Shapes: B requests of an engine, K draft positions.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from lab.placement.pipeline import SteadyState, coupled_tokens, steady_state
from lab.simulation.costs import Costs
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.speculation.decision import best_depth, best_steps
from nemo_specrollout.speculation.step_model import DraftCosts, StepCosts

_EXACT_BATCH = 8
"""Batch size up to which each size has its own cached decision."""
_BATCH_STEP = 1.1
"""Batch sizes above `_EXACT_BATCH` that differ by less than this factor may share a cached decision."""
_CONTEXT_STEP = 1.25
"""Context lengths that differ by less than this factor may share a cached decision."""
_ACCEPTANCE_STEP = 0.02
"""Mean acceptances that differ by less than this may share a cached decision."""
_NUM_BINS = 1024
"""Number of bins of survival. Decisions take the survival of a draft to be the centre of its bin."""
_KS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of drafts of a request that are tried for a verifier with a separate drafter. The fastest number is used."""


@dataclass(frozen=True)
class DecodeStep:
    """The expected tokens and rows of one engine step."""

    tokens_B: np.ndarray
    """Expected number of tokens by which each request grows, float64."""
    num_rows: float
    """Number of rows that the verifier computes."""
    depth: float = 0.0
    """Number of draft tokens that the engine itself makes for each request before the step."""


class Speculation(ABC):
    """How an engine drafts, and how long its engine steps take."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    @abstractmethod
    def decode_step(self, p_B: np.ndarray, context: float) -> DecodeStep:
        """Returns the engine step for requests with acceptances `p_B` and a mean length of `context` tokens."""

    def step_s(self, step: DecodeStep, num_requests: float, context: float) -> float:
        """Returns the seconds of an engine step, including those of drafting in the engine."""
        seconds = float(self.costs.step_s(num_requests, step.num_rows, context))
        return seconds + step.depth * self.costs.draft_s(num_requests, context) if step.depth else seconds

    def tokens_per_s(self, p_B: np.ndarray, context: float) -> float:
        """Returns the tokens per second of a request, as a mean over the requests."""
        step = self.decode_step(p_B, context)
        return float(step.tokens_B.mean()) / self.step_s(step, len(p_B), context)


class NoSpeculation(Speculation):
    """Plain decoding, where each request gets one token in an engine step."""

    def decode_step(self, p_B: np.ndarray, context: float) -> DecodeStep:
        return DecodeStep(np.ones(len(p_B)), float(len(p_B)))


class CoupledSpeculation(Speculation):
    """Drafting in the policy's own engine, with a model or from texts.

    Under a fixed budget each request has the same number of drafts. Under `auto` the production code decides how many tokens
    ahead a draft model drafts, and how many drafts are verified.
    """

    def __init__(self, costs: Costs, budget: BudgetConfig, max_k: int, has_weights: bool) -> None:
        super().__init__(costs)
        self.config = budget
        self.max_k = max_k
        self.has_weights = has_weights
        self._known: dict[tuple[int, int, int], tuple[int, float]] = {}

    def decode_step(self, p_B: np.ndarray, context: float) -> DecodeStep:
        key = _key(p_B, context)
        if key not in self._known:
            self._known[key] = self._decide(p_B, context)
        depth, least_survival = self._known[key]
        counts_B = _counts(p_B, depth, least_survival)
        if not counts_B.any():
            return DecodeStep(np.ones(len(p_B)), float(len(p_B)))
        tokens_B = (1.0 - p_B ** (counts_B + 1)) / (1.0 - p_B)
        return DecodeStep(tokens_B, float(len(p_B) + counts_B.sum()), float(depth) if self.has_weights else 0.0)

    def _decide(self, p_B: np.ndarray, context: float) -> tuple[int, float]:
        """Returns how many tokens ahead the engine drafts, and the survival below which a draft token is not verified."""
        if self.config.policy == "fixed":
            return self.config.k, 0.0
        num_requests = len(p_B)
        costs = self._step_costs(len(p_B), context)
        survival_BK = p_B[:, None] ** np.arange(1, self.max_k + 1)
        count_KQ = np.stack([spread(survival_BK[:, :depth]) for depth in range(self.max_k + 1)])
        if not self.has_weights:
            steps = best_steps(count_KQ[-1:], num_requests, costs, self.config.margin, np.zeros(1))
            return self.max_k, _least_survival(survival_BK, int(steps.num_drafts_F[0]))
        depth = best_depth(count_KQ, num_requests, costs, self.config.margin).depth
        steps = best_steps(count_KQ[depth : depth + 1], num_requests, costs, self.config.margin, np.zeros(1))
        return depth, _least_survival(survival_BK[:, :depth], int(steps.num_drafts_F[0]))

    def _step_costs(self, num_requests: int, context: float) -> StepCosts:
        rows = np.arange(num_requests * (self.max_k + 1) + 1, dtype=float)
        seconds = np.asarray(self.costs.step_s(num_requests, np.maximum(rows, num_requests), context), float)
        drafting = self._draft_costs(num_requests, context) if self.has_weights else None
        return StepCosts(np.maximum.accumulate(seconds), np.zeros(0), drafting=drafting)

    def _draft_costs(self, num_requests: int, context: float) -> DraftCosts:
        """Returns costs of drafting that are linear in the number of requests.

        They agree with the cost model at this number of requests and at twice this number. A drafter that does not pay is
        dormant, so it reads no tokens.
        """
        once_s, twice_s = (self.costs.draft_s(n, context) for n in (num_requests, 2 * num_requests))
        token_s = max(0.0, min(twice_s - once_s, once_s)) / num_requests
        pass_s = once_s - num_requests * token_s
        return DraftCosts(fixed_s=pass_s, pass_s=pass_s, token_s=token_s, unsampled_s=pass_s)


class DecoupledSpeculation(Speculation):
    """Drafting on separate GPUs, where the drafter works ahead of the verifier in a steady state.

    The number of drafts is the one with the highest speed. If no number is faster than plain decoding, there are no drafts.
    The steady state is computed for the batch's mean acceptance. A request with another acceptance gains more or fewer tokens,
    by the factor that its acceptance would make if the policy's own engine drafted as much.
    """

    def __init__(self, costs: Costs, drafter: Costs, max_k: int) -> None:
        super().__init__(costs)
        self.drafter = drafter
        self.ks = tuple(k for k in _KS if k <= max_k)
        self._known: dict[tuple[int, int, int], tuple[int, SteadyState]] = {}

    def decode_step(self, p_B: np.ndarray, context: float) -> DecodeStep:
        key = _key(p_B, context)
        if key not in self._known:
            self._known[key] = self._find_steady(float(p_B.mean()), len(p_B), context)
        k, steady = self._known[key]
        if k == 0:
            return DecodeStep(np.ones(len(p_B)), float(len(p_B)))
        gain_B = (1.0 - p_B ** (k + 1)) / (1.0 - p_B)
        tokens_B = steady.rates.num_tokens * gain_B / coupled_tokens(float(p_B.mean()), k)
        return DecodeStep(np.maximum(tokens_B, 1.0), len(p_B) * (1.0 + steady.rates.num_submitted))

    def _find_steady(self, p: float, num_requests: int, context: float) -> tuple[int, SteadyState]:
        def step_s(num_rows: float) -> float:
            return float(self.costs.step_s(num_requests, num_rows, context))

        # A drafter step has one row for each request and makes one token for it.
        draft_s = float(self.drafter.step_s(num_requests, float(num_requests), context))
        # While k drafts and the token after them are verified, k more are drafted.
        options = [(k, steady_state(p, k, 2 * k + 1, draft_s, step_s, num_requests)) for k in self.ks]
        best = max(options, key=lambda option: option[1].tokens_per_s)
        gains = best[1].tokens_per_s > 1.0 / step_s(num_requests)
        return best if gains else (0, best[1])


def spread(survival: np.ndarray, num_bins: int = _NUM_BINS) -> np.ndarray:
    """Returns how many draft tokens have a survival in each of `num_bins` equal bins from 0 to 1, float64."""
    bins = np.minimum((survival.ravel() * num_bins).astype(np.int64), num_bins - 1)
    return np.bincount(bins, minlength=num_bins).astype(np.float64)


def _least_survival(survival_BK: np.ndarray, num_drafts: int) -> float:
    """Returns the survival of the least likely of the `num_drafts` most likely drafts, or infinity if there is none."""
    return float(np.sort(survival_BK, axis=None)[-num_drafts]) if num_drafts else math.inf


def _counts(p_B: np.ndarray, depth: int, least_survival: float) -> np.ndarray:
    """Returns how many draft tokens of each request have a survival of at least `least_survival`, int64, at most `depth`."""
    if depth == 0 or least_survival <= 0.0:
        return np.full(len(p_B), depth, np.int64)
    most_B = np.log(least_survival) / np.log(np.clip(p_B, 1e-12, 1 - 1e-12))
    return np.clip(np.floor(most_B + 1e-9), 0, depth).astype(np.int64)


def _key(p_B: np.ndarray, context: float) -> tuple[int, int, int]:
    batch = len(p_B)
    size = batch if batch <= _EXACT_BATCH else round(_EXACT_BATCH + math.log(batch / _EXACT_BATCH, _BATCH_STEP))
    return size, round(math.log(max(context, 1.0), _CONTEXT_STEP)), round(float(p_B.mean()) / _ACCEPTANCE_STEP)
