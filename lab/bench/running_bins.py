# SPDX-License-Identifier: Apache-2.0
"""Measures a rollout's speed by the number of running requests, in the same way for any engine and at almost no cost.

Shapes: N bins of the number of running requests.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.local.engine import RolloutEngine
from lab.local.statistics import RolloutStats
from lab.local.step_rollout import MeasuredRollout
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

# The largest number of running requests of each bin except the last, which is unbounded.
MAX_RUNNING = (1, 2, 4, 8, 16, 32, 64)
LABELS = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "more")


def bin_of(num_running: int) -> int:
    """Returns the index of the bin for `num_running` running requests."""
    return bisect_left(MAX_RUNNING, num_running)


@dataclass(frozen=True)
class BinnedStats:
    """A measured rollout, with its seconds and its tokens in each bin of running requests, float64 [N]."""

    rollouts: list[Rollout]
    stats: RolloutStats
    seconds_N: np.ndarray
    tokens_N: np.ndarray
    num_request_steps: int
    """Number of unfinished requests, summed over engine steps. vLLM's own worker does not report this number."""


class BinnedRollout:
    """Runs a rollout, and measures its seconds and tokens in each bin of running requests.

    It reads the clock and counts tokens only at the end of an engine step in which the bin changes, so other steps cost
    nothing. For example, three requests are in bin "3-4". When one of them has ended, the others are in bin "2", and the last
    one is in "1".
    """

    def __init__(self, engine: RolloutEngine, requests: Sequence[RolloutRequest], at_a_time: int | None = None) -> None:
        self._engine = engine
        self._num_requests = len(requests)
        self._most_running = min(engine.max_num_seqs, at_a_time or engine.max_num_seqs)
        self._seconds_N, self._tokens_N = np.zeros((2, len(LABELS)))
        self._num_running = self._running(0)
        self._num_steps = engine.num_steps
        self._num_request_steps = 0
        self._rollout = MeasuredRollout(engine, requests, self._finished, at_a_time)

    @property
    def is_done(self) -> bool:
        """Returns whether all requests have ended."""
        return self._rollout.is_done

    def advance(self, seconds: float) -> None:
        """Runs the rollout for about `seconds`."""
        self._rollout.advance(seconds)

    def result(self) -> BinnedStats:
        """Returns the rollout with its seconds and tokens in each bin. All requests must have ended before the call."""
        rollouts, stats = self._rollout.result()
        return BinnedStats(rollouts, stats, self._seconds_N, self._tokens_N, self._num_request_steps)

    def _running(self, num_done: int) -> int:
        return min(self._num_requests - num_done, self._most_running)

    def _finished(self, num_done: int) -> None:
        """Notes that `num_done` requests have ended so far. This engine step belongs to the bin in which it began."""
        self._num_request_steps += (self._engine.num_steps - self._num_steps) * self._num_running
        self._num_steps = self._engine.num_steps
        before = bin_of(self._num_running)
        self._num_running = self._running(num_done)
        if bin_of(self._num_running) != before or num_done == self._num_requests:
            self._seconds_N[before] += self._rollout.seconds - self._seconds_N.sum()
            self._tokens_N[before] += self._rollout.num_tokens - self._tokens_N.sum()
