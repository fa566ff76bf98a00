# SPDX-License-Identifier: Apache-2.0
"""How many requests of coming steps an engine decodes beside its own: as many as spare more time later than they cost now.

A token that is made early spares one later, if the update leaves it as it is. What it spares is the mean time of a token in a
rollout. It costs the seconds by which its row makes the present step longer, and a row of verification after each update.

Shapes: R numbers of requests from 0 on, E early requests, best first, L lengths of responses.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


UNCERTAIN = 0.05
"""Share by which two rates must differ to be told apart by measured step times. Of equal rates the one of more texts is taken,
because a rollout takes as long as its slowest request."""


class Worth(NamedTuple):
    """What a token of an early request may spare."""

    probability: float
    """Probability that the weights of the request's step sample it as well."""
    verified: float
    """Expected number of times that it is verified: once after each update, as long as it is right."""


class EarlyPrices(NamedTuple):
    """Measured times of an engine, in seconds."""

    seconds_R: Array
    """Predicted seconds of a plain step by its number of requests. More requests than these take no longer."""
    verify_row_s: float
    """Seconds by which a verified row makes a full step longer."""
    token_s: float
    """Mean seconds of a token of a rollout without early requests (`mean_token_s`)."""


def mean_token_s(seconds_R: Array, length_L: Array) -> float:
    """Returns the mean seconds of a token in a rollout by plain decoding whose responses have these lengths.

    All responses begin together. More of them than `seconds_R` has numbers for take turns. Returns 0 without any token.
    """
    lengths = np.sort(np.asarray(length_L, np.float64))[::-1]
    total = float(lengths.sum())
    if total <= 0:
        return 0.0
    steps_of_n = lengths - np.append(lengths[1:], 0.0)  # steps in which the n longest responses are under way
    running = np.arange(1, len(lengths) + 1)
    most = max(len(seconds_R) - 1, 1)
    rounds = np.maximum(running / most, 1.0)
    seconds = np.asarray(seconds_R)[np.minimum(running, most)]
    return float((steps_of_n * rounds * seconds).sum()) / total


def num_early(prices: EarlyPrices, num_own: int, worths: Sequence[Worth]) -> int:
    """Returns the number of early requests with which the engine's next step gains the most.

    Args:
        prices: What rows cost.
        num_own: Requests of the present step that are under way. Without any, nobody waits for the engine, so the number is
            the one that makes the most right tokens a second.
        worths: Worth of a token of each early request that runs or could begin, best first.
    """
    if not worths:
        return 0
    most = len(prices.seconds_R) - 1
    probability_E, verified_E = np.fromiter(chain.from_iterable(worths), np.float64).reshape(-1, 2).T
    step_E = prices.seconds_R[np.minimum(num_own + 1 + np.arange(len(worths)), most)]
    if num_own == 0:
        rate_E = probability_E.cumsum() / np.maximum(step_E, 1e-9)
        return int(np.flatnonzero(rate_E >= (1.0 - UNCERTAIN) * rate_E.max())[-1]) + 1
    gain_E = (probability_E * prices.token_s - verified_E * prices.verify_row_s).cumsum()
    cost_E = step_E - prices.seconds_R[min(num_own, most)]
    best = int((gain_E - cost_E).argmax())
    return best + 1 if gain_E[best] > cost_E[best] else 0
