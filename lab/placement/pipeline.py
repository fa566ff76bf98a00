# SPDX-License-Identifier: Apache-2.0
"""Models of draft pipelines, which give the tokens of a verifier step with coupled drafting or with a streaming drafter.

Symbols: p is P(a draft token is right), equal and independent for all tokens. k is the maximum number of draft tokens
submitted for a request in a step. w is the window, the maximum number of draft tokens ahead of the committed text. m is
the number of draft tokens made for a request during one verifier step.

In the streamed pipeline, a step submits up to k tokens of a request's draft buffer while the drafter extends the
buffer. A wrong draft empties the buffer, and the next step is plain for that request. If all drafts were right, or none
was submitted, the step samples one more position. The rest of the buffer survives if the drafter has made the same token
there, which also has probability p. The drafter learns the outcome of a step at its end, at no cost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_ALMOST_SURE = 1.0 - 1e-9
"""Maximum p. At p = 1 the longest buffer would depend on the initial state."""
_MAX_ROUNDS = 500
"""Maximum iterations towards the fixed point of drafts and step time."""
_CLOSE = 1e-7
"""Change of the submitted drafts at which the iteration ends."""


@dataclass(frozen=True)
class StreamedRates:
    """Long-run rates of the streamed pipeline, for each request and verifier step."""

    num_tokens: float
    """Emitted tokens."""
    num_submitted: float
    """Submitted draft tokens."""
    occupancy: float
    """Share of steps that had a draft in time."""


@dataclass(frozen=True)
class SteadyState:
    """Steady state of a verifier and its drafter."""

    step_s: float
    """Seconds of a verifier step."""
    rates: StreamedRates

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of each request."""
        return self.rates.num_tokens / self.step_s


def coupled_tokens(p: float, k: int) -> float:
    """Returns a request's tokens in a step that verifies k drafts, with the verifier's own, which is the sum of p^0 to p^k.

    Source: Leviathan et al. 2023, equation 1.
    """
    return float(np.sum(p ** np.arange(k + 1)))


def streamed_rates(p: float, k: int, window: int, drafts_per_step: float) -> StreamedRates:
    """Returns the rates of the streamed pipeline if the drafter makes m = `drafts_per_step` tokens in a verifier step.

    The result is exact for the Markov chain of the buffer's length at the start of a step. A fractional m means
    floor(m) or one more token, drawn again in each step, because clocks jitter. Without jitter there are up to 4 % more
    tokens (`test_placement.py`).
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
    """Returns the steady state of a verifier of `num_requests` requests and its drafter.

    The drafter makes one token for all requests in `draft_s` seconds. A verifier step takes `step_s(rows)` seconds.
    Drafts make a step longer, and a longer step brings more drafts. Iterating from no drafts leads to the least fixed
    point.
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
    """Returns P(buffer length at the next step | at this step), float64 [L, L]."""
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
    """Returns the stationary distribution of the chain, float64 [L]."""
    equations_LL = chances_LL.T - np.eye(len(chances_LL))
    equations_LL[-1] = 1.0
    share_L = np.linalg.solve(equations_LL, np.eye(len(chances_LL))[-1])
    share_L = np.maximum(share_L, 0.0)  # Rounding makes some shares slightly negative.
    return share_L / share_L.sum()
