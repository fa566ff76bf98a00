# SPDX-License-Identifier: Apache-2.0
"""A batch that drains to its last token, recorded step by step in the same way for every engine, vLLM's own included.

Shapes: S steps, N bands of running requests, K draft positions.
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
"""Labels of the bands of running requests, and the largest number of requests in each band but the last."""
MOST_DEPTHS = 8
"""Draft positions whose acceptance is shown."""


@dataclass(frozen=True)
class Drained:
    """The records of a batch. A step's seconds are those between two returns of the engine, as its caller sees them."""

    rollouts: list[Rollout]
    seconds_S: np.ndarray
    running_S: np.ndarray
    """Unfinished requests before the step."""
    tokens_S: np.ndarray
    """New tokens of the step."""
    num_with: np.ndarray
    """Request-steps that made at least 1, 2, ... tokens, int64 [K + 1]. Steps that read a prompt are not among them."""

    @property
    def seconds(self) -> float:
        """Seconds to the last token."""
        return float(self.seconds_S.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return int(self.tokens_S.sum())

    def bands(self) -> dict[str, tuple[float, int]]:
        """Returns seconds and tokens by band of running requests."""
        band_S = np.array([bisect_left(MAX_RUNNING, int(n)) for n in self.running_S])
        found = {}
        for band, label in enumerate(LABELS):
            of_band = band_S == band
            if of_band.any():
                found[label] = float(self.seconds_S[of_band].sum()), int(self.tokens_S[of_band].sum())
        return found

    def step_ms(self, least: int, most: int) -> float | None:
        """Returns the median milliseconds of a step with this many running requests, or None if there was no such step."""
        of_size = (self.running_S >= least) & (self.running_S <= most) & (self.tokens_S > 0)
        return 1e3 * float(np.median(self.seconds_S[of_size])) if of_size.any() else None


def acceptance(batches: Sequence[Drained]) -> list[float]:
    """Returns the share of request-steps whose first 1, 2, ... drafts were all accepted. Counts steps without drafts too."""
    num_with = np.sum([drained.num_with for drained in batches], axis=0)
    return [float(n) / max(int(num_with[0]), 1) for n in num_with[1:]]


def drain(engine: RolloutEngine, requests: Sequence[RolloutRequest], max_tokens: int) -> Drained:
    """Runs the requests to their end. It counts new tokens after each step, which takes some 20 us in every engine."""
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
    """Counts the new tokens of running requests. Owns the last count of each."""

    def __init__(self, engine: RolloutEngine, generation: Generation) -> None:
        outputs = engine._llm.llm_engine.output_processor
        self._generation = generation
        self._states = {i: outputs.request_states[outputs.external_req_ids[i][0]] for i in generation._ids}
        self._num = dict.fromkeys(self._states, 0)
        self.num_with = np.zeros(MOST_DEPTHS + 1, np.int64)

    def take(self) -> int:
        """Returns the tokens since the last call."""
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
