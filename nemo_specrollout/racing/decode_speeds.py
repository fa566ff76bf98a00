# SPDX-License-Identifier: Apache-2.0
"""Decode speeds learned from turns: of each draft method, and of each request relative to a typical one.

Shapes: K requests that made tokens in a turn, R requests under way, M draft methods.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_specrollout.racing.turns import Work
from nemo_specrollout.scheduling.racing.draft_ladder import ANY_TASK, Ladder
from nemo_specrollout.scheduling.racing.request_estimates import RequestSpeeds


class DecodeSpeeds:
    """Feeds a draft ladder and the speeds of requests. Owns the speeds; the ladder belongs to the caller."""

    def __init__(self, ladder: Ladder) -> None:
        self.ladder = ladder
        self._speeds = RequestSpeeds(np.ones((0, len(ladder.methods))))
        self._rows: dict[int, int] = {}
        self._tasks: dict[int, str] = {}

    def begin(self, keys: Sequence[int], task: str) -> None:
        """Adds requests of a task."""
        task_speed_M = np.array([self.ladder.task_speed(task, m) for m in range(len(self.ladder.methods))])
        self._rows |= zip(keys, self._speeds.begin(len(keys), task_speed_M), strict=True)
        self._tasks |= dict.fromkeys(keys, task)

    def forget(self, keys: Sequence[int]) -> None:
        """Removes requests."""
        self._speeds.forget([self._rows.pop(key) for key in keys])
        for key in keys:
            del self._tasks[key]

    def learn(self, method: int, work: Work, num_made: Mapping[int, int], steady: Sequence[int]) -> None:
        """Learns from a turn of an engine that drafts by `method`.

        `num_made` is the number of new tokens by request. `steady` are the requests that took part in the whole turn.
        """
        if work.num_prefilled:
            self.ladder.observe_prefill(work.num_prefilled, work.prefill_s)
        if not work.num_tokens or not num_made:
            return
        batch = max(1, round(work.mean_batch))
        typical = self.ladder.tokens_per_s(method, batch) * work.decode_s
        tasks = {self._tasks[key] for key in num_made}
        self.ladder.observe(
            tasks.pop() if len(tasks) == 1 else ANY_TASK, method, batch, work.num_tokens, work.request_s
        )
        made_K = np.array([num_made.get(key, 0) for key in steady], float)
        self._speeds.observe(self._rows_of(steady), method, made_K, typical)

    def of(self, keys: Sequence[int]) -> np.ndarray:
        """Returns the speed of requests over a typical request's, float64 [R, M]."""
        return self._speeds.speeds(self._rows_of(keys))

    def doubts(self, keys: Sequence[int]) -> np.ndarray:
        """Returns the standard deviation of the logarithm of the speeds, float64 [R, M]."""
        return self._speeds.doubts(self._rows_of(keys))

    def _rows_of(self, keys: Sequence[int]) -> np.ndarray:
        return np.array([self._rows[key] for key in keys], np.int64)
