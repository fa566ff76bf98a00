# SPDX-License-Identifier: Apache-2.0
"""Models that predict the tokens of a verifier's engine step, with coupled drafting or with a streaming drafter.

A coupled drafter drafts in the verifier's own engine step. A streaming drafter drafts in an engine of its own at the same
time.

Symbols: p is the probability that a draft token is right, which is equal and independent for all tokens. k is the largest
number of draft tokens that a verifier's step verifies for a request. w is the window, which is the largest number of draft
tokens ahead of the committed text. m is the number of draft tokens that are made for a request during one verifier's step.

In the streamed pipeline, a step submits up to k tokens from the front of a request's draft buffer, while the drafter extends
the buffer at its end. A wrong draft empties the buffer, and the next step is plain for that request. If all submitted drafts
were right, or none was submitted, the step samples one more token. The rest of the buffer stays valid if the drafter has
drafted the same token at that position, which also has probability p. The drafter learns the outcome of a step when the step
ends, at no cost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_ALMOST_SURE = 1.0 - 1e-9
"""Largest value of p. With p = 1 the mean length of the buffer would depend on its first length."""
_MAX_ROUNDS = 500
"""Largest number of iterations in the search for the steady state of drafts and step time."""
_CLOSE = 1e-7
"""The search for the steady state ends when the number of submitted drafts changes by less than this."""


@dataclass(frozen=True)
class StreamedRates:
    """Long-run means of the streamed pipeline, for one request and one engine step of the verifier."""

    num_tokens: float
    """Number of tokens that the request gains."""
    num_submitted: float
    """Number of draft tokens that are submitted for verification."""
    occupancy: float
    """Share of the verifier's engine steps for which a draft was ready in time."""


@dataclass(frozen=True)
class SteadyState:
    """The steady state of a verifier and its drafter."""

    step_s: float
    """Seconds of an engine step of the verifier."""
    rates: StreamedRates

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of each request."""
        return self.rates.num_tokens / self.step_s


def coupled_tokens(p: float, k: int) -> float:
    """Returns the expected tokens that a request gains in an engine step with k drafts, which is the sum of p^0 to p^k.

    Source: Leviathan et al. 2023, equation 1.
    """
    return float(np.sum(p ** np.arange(k + 1)))


def streamed_rates(p: float, k: int, window: int, drafts_per_step: float) -> StreamedRates:
    """Returns the rates of the streamed pipeline if the drafter makes m = `drafts_per_step` tokens in a verifier's step.

    The length of the buffer at the start of each step is a Markov chain, and the result is exact for it. If m is not a whole
    number, each step gets floor(m) tokens or one more at random, because clocks jitter. Without jitter there would be up to 4
    % more tokens (`test_placement.py`).
    """
    p = min(p, _ALMOST_SURE)
    lengths_L = np.arange(window + 1)
    submitted_L = np.minimum(lengths_L, k)
    share_L = _stationary(_transitions(p, submitted_L, window, drafts_per_step))
    gained_L = (1 - p ** (submitted_L + 1)) / (1 - p) - 1
    return StreamedRates(1 + float(share_L @ gained_L), float(share_L @ submitted_L), float(1 - share_L[0]))


def steady_state(
    p: float, k: int, window: int, draft_s: float, step_s: Callable[[float], float], num_requests: int
) -> SteadyState:
    """Returns the steady state of a verifier of `num_requests` requests and its streaming drafter.

    The drafter makes one token for all requests in `draft_s` seconds. An engine step of the verifier takes `step_s(rows)`
    seconds. Drafts make a step longer, and a longer step leaves time for more drafts. The search begins without drafts and
    repeats both effects until they agree.
    """
    rates = StreamedRates(1.0, 0.0, 0.0)
    seconds = step_s(num_requests)
    for _ in range(_MAX_ROUNDS):
        before = rates.num_submitted
        rates = streamed_rates(p, k, window, seconds / draft_s)
        seconds = step_s(num_requests * (1 + rates.num_submitted))
        if abs(rates.num_submitted - before) < _CLOSE:
            break
    return SteadyState(seconds, rates)


def _transitions(p: float, submitted_L: np.ndarray, window: int, drafts_per_step: float) -> np.ndarray:
    """Returns the probability of each length of the buffer at the next step, given its length at this step, float64 [L, L]."""
    whole = int(min(drafts_per_step, window))
    more = min(drafts_per_step, window) - whole
    chances_LL = np.zeros((window + 1, window + 1))
    lengths_L = np.arange(window + 1)
    for num_drafted, chance in ((whole, 1 - more), (whole + 1, more)):
        grown_L = np.minimum(lengths_L + num_drafted, window)
        stands_L = np.where(grown_L > submitted_L, p ** (submitted_L + 1), 0.0)
        chances_LL[lengths_L, np.maximum(grown_L - submitted_L - 1, 0)] += chance * stands_L
        chances_LL[:, 0] += chance * (1 - stands_L)
    return chances_LL


def _stationary(chances_LL: np.ndarray) -> np.ndarray:
    """Returns the stationary distribution of a Markov chain with transition probabilities `chances_LL`, float64 [L]."""
    equations_LL = chances_LL.T - np.eye(len(chances_LL))
    equations_LL[-1] = 1.0
    share_L = np.linalg.solve(equations_LL, np.eye(len(chances_LL))[-1])
    share_L = np.maximum(share_L, 0.0)  # Rounding makes some shares slightly negative.
    return share_L / share_L.sum()
