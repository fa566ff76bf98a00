# SPDX-License-Identifier: Apache-2.0
"""Runs a batch until its last request has ended, and records its engine steps in the same way for every engine.

vLLM's own engine is recorded like ours. Shapes: S engine steps, N bands of running requests, K draft positions.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.local.engine import Generation, RolloutEngine
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

MAX_RUNNING = (1, 2, 4, 8, 16, 32, 64)
LABELS = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "more")
"""Labels of the bands of running requests. `MAX_RUNNING` has the largest number of requests in each band but the last."""
MOST_DEPTHS = 8
"""Number of draft positions whose acceptance is shown."""


@dataclass(frozen=True)
class Drained:
    """The records of a batch that has drained.

    An engine step is timed from the end of the step before it, or from the start of the batch. So its seconds include the time
    that the caller takes between two steps.
    """

    rollouts: list[Rollout]
    seconds_S: np.ndarray
    running_S: np.ndarray
    """Number of unfinished requests before the engine step."""
    tokens_S: np.ndarray
    """Number of new tokens in the engine step."""
    num_with: np.ndarray
    """How many times a request gained at least 1, 2, ... tokens in an engine step, int64 [K + 1]. The step in which a request
    gets its first token is left out."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of the batch to its last token."""
        return float(self.seconds_S.sum())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all responses."""
        return int(self.tokens_S.sum())

    def bands(self) -> dict[str, tuple[float, int]]:
        """Returns the seconds and the number of tokens in each band of running requests, by the band's label (`LABELS`)."""
        band_S = np.array([bisect_left(MAX_RUNNING, int(n)) for n in self.running_S])
        found = {}
        for band, label in enumerate(LABELS):
            of_band = band_S == band
            if of_band.any():
                found[label] = float(self.seconds_S[of_band].sum()), int(self.tokens_S[of_band].sum())
        return found

    def step_ms(self, least: int, most: int) -> float | None:
        """Returns the median milliseconds of an engine step with `least` to `most` running requests, or None without one."""
        of_size = (self.running_S >= least) & (self.running_S <= most) & (self.tokens_S > 0)
        return 1e3 * float(np.median(self.seconds_S[of_size])) if of_size.any() else None


def acceptance(batches: Sequence[Drained]) -> list[float]:
    """Returns the share of a request's engine steps in which its first 1, 2, ... draft tokens were all accepted.

    Engine steps without drafts count too.
    """
    num_with = np.sum([drained.num_with for drained in batches], axis=0)
    return [float(n) / max(int(num_with[0]), 1) for n in num_with[1:]]


def drain(engine: RolloutEngine, requests: Sequence[RolloutRequest], max_tokens: int) -> Drained:
    """Runs the requests to their end, and returns the records.

    New tokens are counted after each engine step, which takes some 20 us in every engine.
    """
    started = time.perf_counter()
    generation = Generation(engine, requests, sampling={"max_tokens": max_tokens})
    counter = _TokenCounter(engine, generation)
    seconds = []
    running = []
    tokens = []
    while not generation.is_done:
        running.append(len(requests) - generation.num_done)
        generation.advance(0.0)
        tokens.append(counter.take())
        now = time.perf_counter()
        seconds.append(now - started)
        started = now
    return Drained(generation.rollouts, np.array(seconds), np.array(running), np.array(tokens), counter.num_with)


class _TokenCounter:
    """Counts the new tokens of running requests. Owns the number of tokens that each of them had at the last count."""

    def __init__(self, engine: RolloutEngine, generation: Generation) -> None:
        outputs = engine._llm.llm_engine.output_processor
        self._generation = generation
        self._states = {i: outputs.request_states[outputs.external_req_ids[i][0]] for i in generation._ids}
        self._num = dict.fromkeys(self._states, 0)
        self.num_with = np.zeros(MOST_DEPTHS + 1, np.int64)

    def take(self) -> int:
        """Returns the number of new tokens since the last call."""
        total = 0
        for request_id, state in list(self._states.items()):
            finished = self._generation._done.get(request_id)
            num = len(finished.token_ids) if finished else state.detokenizer.num_output_tokens()
            new = num - self._num[request_id]
            if self._num[request_id] and new:
                self.num_with[:new] += 1
            self._num[request_id] = num
            total += new
            if finished:
                del self._states[request_id]
        return total
