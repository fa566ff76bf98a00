# SPDX-License-Identifier: Apache-2.0
"""Decode speed of each request relative to a typical request, under each draft method, and its uncertainty.

Shapes: R requests, M draft methods, K attempts.
"""

from collections.abc import Sequence

import numpy as np

SPREAD = 0.35
"""Prior standard deviation of the logarithm of a request's relative speed."""
HALF_TOKENS = 48.0
"""Typical tokens after which a request's own measurement weighs half."""
SHARED_SPEED = 0.5
"""Share of a request's deviation under one method that is expected under another method."""
ALL = slice(None)


class RequestSpeeds:
    """Estimates relative speeds from the tokens of each request. Owns these counts, and the expected ones of
    a typical request.

    The logarithm of the ratio of both counts is shrunk towards the logarithm of the task's relative speed. It is shrunk the
    more, the fewer tokens a request has. Rows of forgotten requests are reused.
    """

    def __init__(self, task_speed_RM: np.ndarray) -> None:
        """Row i is request i; `task_speed_RM` is the relative speed of its task, float64."""
        self._task_log_RM = np.log(task_speed_RM)
        self._made_RM = np.zeros(task_speed_RM.shape)
        self._typical_RM = np.zeros(task_speed_RM.shape)
        self._free: list[int] = []

    def begin(self, num_requests: int, task_speed_M: np.ndarray) -> list[int]:
        """Returns the rows of `num_requests` more requests of one task."""
        self._grow_for(num_requests)
        rows = [self._free.pop() for _ in range(num_requests)]
        self._task_log_RM[rows] = np.log(task_speed_M)
        self._made_RM[rows] = self._typical_RM[rows] = 0.0
        return rows

    def forget(self, rows: Sequence[int]) -> None:
        """Releases the rows of requests that have ended."""
        self._free += rows

    def _grow_for(self, num_requests: int) -> None:
        """Grows at least to twice the size, so that each row is copied once or twice."""
        size, missing = len(self._made_RM), num_requests - len(self._free)
        if missing > 0:
            num_new = max(missing, size)
            self._free += range(size + num_new - 1, size - 1, -1)
            self._task_log_RM, self._made_RM, self._typical_RM = (
                np.pad(x, ((0, num_new), (0, 0))) for x in (self._task_log_RM, self._made_RM, self._typical_RM)
            )

    def observe(self, requests_K: np.ndarray, method: int, made_K: np.ndarray, typical: float | np.ndarray) -> None:
        """Adds attempts by `method` that made `made_K` tokens in the time of `typical` tokens of a typical request."""
        self._made_RM[requests_K, method] += made_K
        self._typical_RM[requests_K, method] += typical

    def speeds(self, rows: np.ndarray | slice = ALL) -> np.ndarray:
        """Returns the estimated speeds of requests relative to a typical one, float64 [R, M]."""
        made_RM, typical_RM, task_RM = (x[rows] for x in (self._made_RM, self._typical_RM, self._task_log_RM))
        belief_RM = _belief(typical_RM)
        own_RM = (np.log((made_RM + 1.0) / (typical_RM + 1.0)) - task_RM) * belief_RM
        elsewhere_RM = (own_RM.sum(1, keepdims=True) - own_RM) * SHARED_SPEED
        return np.exp(task_RM + own_RM + elsewhere_RM * (1.0 - belief_RM))

    def doubts(self, rows: np.ndarray | slice = ALL) -> np.ndarray:
        """Returns the standard deviations of the logarithm of `speeds`, float64 [R, M]."""
        return SPREAD * np.sqrt(1.0 - _belief(self._typical_RM[rows]))


def _belief(typical_RM: np.ndarray) -> np.ndarray:
    return typical_RM / (typical_RM + HALF_TOKENS)
