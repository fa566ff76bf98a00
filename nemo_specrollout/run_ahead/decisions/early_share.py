# SPDX-License-Identifier: Apache-2.0
"""Decides how many requests of coming steps an engine decodes beside its own, so that they save more time than they cost.

In this file an early request is one of a coming step. A "step" is an engine step unless it is called a coming step.

While an early request runs, it makes the steps of the engine longer. After each weight update, its tokens are verified, and
each token takes a row. The time that it saves depends on how long its text gets. In plain decoding, a step costs more per
token if fewer responses share it. At the beginning all responses of a full engine share each step. So the first tokens of a
text replace cheap tokens and save little. Only long responses are left later. So the late tokens of a text come in steps with
few responses, and save much.

A phase is the time between two updates. A text for a coming step that is several updates away continues in each phase until
then. It could also begin in the next phase, and would then only be shorter in the end. So the gain of the present phase is
this difference in the final length. Take a text of K tokens that has k phases left, with P tokens in each phase. It gets to
K + k P tokens, and without this phase to K + (k - 1) P. Most responses end before that. So a text for a farther coming step
saves less, because short responses will be ready in time anyway.

Shapes: R possible counts of requests in a step, which are 0, 1, 2 and so on. E early requests, best first. L responses. J
positions at which the number of running responses changes, which are 0 and all lengths.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

Array = np.ndarray[Any, Any]


UNCERTAIN = 0.05
"""Share of the best rate by which another rate may be lower and still count as equal, because step times are measured. A rate
is in right tokens per second. Of equal rates, the one with the most early requests is chosen, because a rollout takes as long
as its slowest request."""


MOST_OWN = 8
"""`early_worth` reports how much time early requests can save in an engine that has up to this number of other requests. This
matters only when few of the engine's own requests are left."""


class Worth(NamedTuple):
    """What decides how much time a token of an early request can save. An early request is one of a coming step."""

    probability: float
    """Probability that the weights of the request's step will sample the same token."""
    verified: float
    """Expected number of times that the token will be verified. It is verified after each weight update as long as it is
    right."""
    steps_ahead: int = 1
    """Number of phases that are left to make the text. It equals the number of weight updates until the request's step."""
    num_known: int = 0
    """Number of tokens of the text so far."""


class PlainRollout:
    """The time that a rollout takes by plain decoding, as a function of how far its responses have got.

    All responses start together. If there are more responses than slots, they take turns.
    """

    def __init__(self, seconds_R: Array, length_L: Sequence[int] | Array) -> None:
        """`length_L` has the lengths of all responses of the rollout, in tokens.

        `seconds_R` has the seconds of an engine step without drafts, by its number of requests.
        """
        lengths = np.sort(np.asarray(length_L, np.float64))
        running_L = np.arange(len(lengths), 0, -1)
        most = max(len(seconds_R) - 1, 1)
        step_L = np.asarray(seconds_R)[np.minimum(running_L, most)] * np.maximum(running_L / most, 1.0)
        positions_L = np.diff(lengths, prepend=0.0)
        self.longest = float(lengths[-1]) if len(lengths) else 0.0
        self._last_s = float(seconds_R[min(1, len(seconds_R) - 1)])
        self._length_J = np.append(0.0, lengths)
        self._seconds_J = np.append(0.0, (positions_L * step_L).cumsum())
        self._tokens_J = np.append(0.0, (positions_L * running_L).cumsum())

    @property
    def token_s(self) -> float:
        """Mean seconds of a token, or 0 if the responses have no tokens."""
        return float(self._seconds_J[-1]) / max(float(self._tokens_J[-1]), 1.0)

    def spared_s(self, phase: float, known_E: Array, steps_ahead_E: Array) -> Array:
        """Returns the seconds that a token of each text saves if it is made before the next update, in the current phase.

        Args:
            phase: Number of tokens by which a text grows in a phase.
            known_E: Number of tokens of each text so far.
            steps_ahead_E: Number of phases that are left for each text, including the current one.
        """
        now_E = known_E + phase
        end_E = np.maximum(self.longest, now_E)
        with_E = np.minimum(known_E + phase * steps_ahead_E, end_E)
        without_E = np.minimum(with_E, known_E + phase * (steps_ahead_E - 1))
        tokens_E = self._tokens(now_E) - self._tokens(known_E)
        return (self._seconds(with_E) - self._seconds(without_E)) / np.maximum(tokens_E, 1e-9)

    def missing(self, known_E: Array) -> Array:
        """Returns for each text how many tokens it still lacks, as the mean over all responses that are longer than the text.

        This is 0 if no response is longer.
        """
        first_E = np.searchsorted(self._length_J, known_E, side="right")
        sums_J = self._length_J[::-1].cumsum()[::-1]
        num_E = len(self._length_J) - first_E
        sum_E = np.append(sums_J, 0.0)[first_E]
        missing_E: Array = np.where(num_E > 0, sum_E / np.maximum(num_E, 1) - known_E, 0.0)
        return missing_E

    def _seconds(self, position_E: Array) -> Array:
        """Returns the seconds until every response has reached each position or has ended before it, float64 [E].

        For positions beyond the longest response, it is assumed that one response goes on.
        """
        beyond_E = np.maximum(position_E - self.longest, 0.0)
        return np.interp(position_E, self._length_J, self._seconds_J) + beyond_E * self._last_s

    def _tokens(self, position_E: Array) -> Array:
        """Returns the number of tokens that all responses have up to each position, float64 [E].

        For positions beyond the longest response, it is assumed that one response goes on.
        """
        beyond_E = np.maximum(position_E - self.longest, 0.0)
        return np.interp(position_E, self._length_J, self._tokens_J) + beyond_E


class EarlyPrices(NamedTuple):
    """Measured times of an engine in seconds, from which the cost and the gain of early requests are computed."""

    seconds_R: Array
    """Predicted seconds of an engine step without drafts, by its number of requests. The last number also stands for steps
    with more requests."""
    verify_row_s: float
    """Seconds by which a verified row makes an engine step of a full engine longer."""
    plain: PlainRollout
    """The time that the last rollout would have taken by plain decoding."""
    num_steps: int = 1
    """Number of coming steps for which texts are made."""

    @property
    def phase(self) -> float:
        """Number of tokens by which a text grows between two weight updates.

        The longest response takes `num_steps` + 1 such phases.
        """
        return self.plain.longest / (self.num_steps + 1)

    def gain_E(self, worths: Sequence[Worth]) -> Array:
        """Returns the seconds that a token of each early request saves, minus the seconds of its verification, float64 [E]."""
        numbers = np.fromiter(chain.from_iterable(worths), np.float64)  # faster than np.array of tuples
        probability_E, verified_E, steps_ahead_E, known_E = numbers.reshape(-1, len(Worth._fields)).T
        spared_E = self.plain.spared_s(self.phase, known_E, steps_ahead_E)
        gain_E: Array = probability_E * spared_E - verified_E * self.verify_row_s
        return gain_E

    def step_s(self, num_requests: int) -> float:
        """Returns the seconds of an engine step of `num_requests` requests without drafts."""
        return float(self.seconds_R[min(num_requests, len(self.seconds_R) - 1)])

    def steps_beside(self, num_own: int, number: int) -> Array:
        """Returns the seconds of engine steps with 1, 2, ..., `number` early requests beside `num_own` others, float64 [E]."""
        steps_E: Array = self.seconds_R[np.minimum(num_own + 1 + np.arange(number), len(self.seconds_R) - 1)]
        return steps_E

    def delay_s(self, num_own: int, num_early: int) -> float:
        """Returns the seconds by which `num_early` early requests make an engine step of `num_own` other requests longer."""
        return self.step_s(num_own + num_early) - self.step_s(num_own)


def num_early(prices: EarlyPrices, num_own: int, worths: Sequence[Worth]) -> int:
    """Returns how many early requests, those of coming steps, should run in the engine's next step so that it gains the most.

    Args:
        prices: Measured times of the engine.
        num_own: Number of running requests of the current step. If it is 0, nobody waits for the engine. Then the result is
            the number of early requests that makes the most right tokens per second.
        worths: For each early request that runs or could start, what decides how much time a token of it can save. The best
            request comes first.
    """
    if not worths:
        return 0
    if num_own == 0:
        step_E = prices.steps_beside(0, len(worths))
        rate_E = np.array([worth.probability for worth in worths]).cumsum() / np.maximum(step_E, 1e-9)
        return int(np.flatnonzero(rate_E >= (1.0 - UNCERTAIN) * rate_E.max())[-1]) + 1
    return _number_beside(prices, num_own, prices.gain_E(worths).cumsum())


def _number_beside(prices: EarlyPrices, num_own: int, gain_E: Array) -> int:
    """Returns how many early requests should run beside `num_own` requests of the engine's own, which may be 0.

    `gain_E` has the seconds gained by the tokens of the first 1, 2, ... early requests.
    """
    cost_E = prices.steps_beside(num_own, len(gain_E)) - prices.step_s(num_own)
    best = int((gain_E - cost_E).argmax())
    return best + 1 if gain_E[best] > cost_E[best] else 0


def early_worth(prices: EarlyPrices, worths: Sequence[Worth]) -> EarlyWorth:
    """Returns how much time early requests, which are those of coming steps, can save later.

    The result has a rate for each number of the engine's own requests, from 0 to `MOST_OWN`. The rate is the time that early
    requests save later for each second in which they run. The time by which they delay the engine's own requests is
    subtracted. It is assumed that as many early requests run as `num_early` returns.

    The result also has the seconds that all early requests together can save. It is assumed that each text becomes as long as
    the mean of the responses that are longer than it is now. `worths` has all early requests that run or could start, best
    first.
    """
    if not worths:
        return EarlyWorth()
    gain_E = prices.gain_E(worths)
    summed_E = gain_E.cumsum()
    rates = []
    for num_own in range(MOST_OWN + 1):
        number = _number_beside(prices, num_own, summed_E) if num_own else num_early(prices, 0, worths)
        spared_s = float(summed_E[number - 1]) if number else 0.0
        delay_s = prices.delay_s(num_own, number) if num_own else 0.0
        rates.append(max(spared_s - delay_s, 0.0) / max(prices.step_s(num_own + number), 1e-9))
    missing_E = prices.plain.missing(np.array([worth.num_known for worth in worths], np.float64))
    return EarlyWorth(tuple(rates), float((np.maximum(gain_E, 0.0) * missing_E).sum()))
