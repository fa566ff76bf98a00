# SPDX-License-Identifier: Apache-2.0
"""How many tokens a verifier step yields: coupled, decoupled in lock-step as SpecActor's paper has it, and streamed as here.

Symbols: p, P(a draft token is right), the same for each and independent; k, most draft tokens submitted for a request in a
step; w, the window, most draft tokens ahead of the committed text; m, draft tokens made for a request while a step runs.

The streamed pipeline: a step submits up to k tokens of a request's tail while the drafter goes on with it. A wrong draft
leaves no tail, and the next step is plain for that request. Where all were right, or nothing was submitted, the step samples
one more position, and the tail beyond stands if the drafter had got there and made the same token of it: again p. What the
drafter learns of a step's outcome it learns at its end, at no cost, and it then drafts on from there at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# At p = 1 the longest tail that is reached would depend on where one begins.
_ALMOST_SURE = 1.0 - 1e-9
# The fixed point of drafts and step time: they drive each other up, so the way to it is a rising one.
_MOST_ROUNDS, _CLOSE = 500, 1e-7


@dataclass(frozen=True)
class StreamedRates:
    """Of the streamed pipeline, per request and verifier step in the long run: `num_tokens` emitted, `num_submitted` draft
    tokens, and `occupancy`, the share of the steps that had a draft at hand."""

    num_tokens: float
    num_submitted: float
    occupancy: float


@dataclass(frozen=True)
class SettledStep:
    """A pipeline that has found its pace: `step_s`, seconds of a verifier step, and what it yields."""

    step_s: float
    rates: StreamedRates


def coupled_tokens(p: float, k: int) -> float:
    """Tokens that a request emits in a step that verifies k drafts, the verifier's own one included: the sum of p^0 .. p^k.

    Source: Leviathan et al. 2023, equation 1.
    """
    return float(np.sum(p ** np.arange(k + 1)))


def lockstep_tokens_as_transcribed(p: float, w: int) -> float:
    """Tokens of an iteration of lock-step decoupled decoding with windows of w, as study notes transcribe the paper's tau.

    It averages ratios and so promises too much; `lockstep_tokens` does not. Source: SpecActor, arXiv 2511.16193, cost model.
    """
    a_W = np.arange(w)
    return float(np.sum(p**a_W * (1 - p) * (a_W + 1) / 2) + w * p**w)


def lockstep_tokens(p: float, w: int) -> float:
    """Tokens of an iteration of lock-step decoupled decoding with windows of w, in the long run.

    A window that is all right emits w tokens in one iteration; one that is wrong at draft a emits a + 1 and makes the next
    iteration useless. Source: renewal theorem, on the pipeline of SpecActor, arXiv 2511.16193; no bonus token there.
    """
    a_W = np.arange(w)
    num_tokens = np.sum(p**a_W * (1 - p) * (a_W + 1)) + w * p**w
    return float(num_tokens / (p**w + 2 * (1 - p**w)))


def streamed_rates(p: float, k: int, window: int, drafts_per_step: float) -> StreamedRates:
    """What the streamed pipeline yields; `drafts_per_step` is m, seconds of a verifier step by those of a draft token.

    Exact for the Markov chain of the tail's length at the start of a step. A broken m is floor(m) or one more, drawn again in
    each step: clocks jitter. If they beat evenly it is up to 4 % more tokens (`test_placement.py`).
    """
    p = min(p, _ALMOST_SURE)
    lengths_L = np.arange(window + 1)
    submitted_L = np.minimum(lengths_L, k)
    share_L = _stationary(_transitions(p, submitted_L, window, drafts_per_step))
    gained_L = (1 - p ** (submitted_L + 1)) / (1 - p) - 1
    return StreamedRates(1 + float(share_L @ gained_L), float(share_L @ submitted_L), float(1 - share_L[0]))


def settle(
    p: float, k: int, window: int, draft_s: float, step_s: Callable[[float], float], num_requests: int
) -> SettledStep:
    """The pace at which a verifier of `num_requests` requests and its drafter run together.

    `draft_s`: seconds in which the drafter makes one token for all requests; `step_s(rows)`: seconds of a verifier step.
    Drafts make a step longer, a longer step brings more drafts: iterated from none, which leads to the least fixed point.
    """
    rates = StreamedRates(1.0, 0.0, 0.0)
    seconds = step_s(num_requests)
    for _ in range(_MOST_ROUNDS):
        before = rates.num_submitted
        rates = streamed_rates(p, k, window, seconds / draft_s)
        seconds = step_s(num_requests * (1 + rates.num_submitted))
        if abs(rates.num_submitted - before) < _CLOSE:
            break
    return SettledStep(seconds, rates)


def _transitions(p: float, submitted_L: np.ndarray, window: int, drafts_per_step: float) -> np.ndarray:
    """P(tail length at the next step | at this one), float64 [L, L]."""
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
    """The share of the steps that each state gets in the long run, float64 [L]."""
    equations_LL = chances_LL.T - np.eye(len(chances_LL))
    equations_LL[-1] = 1.0
    share_L = np.linalg.solve(equations_LL, np.eye(len(chances_LL))[-1])
    share_L = np.maximum(share_L, 0.0)  # rounding makes some less than none
    return share_L / share_L.sum()
