# SPDX-License-Identifier: Apache-2.0
"""How much faster than a typical request each request is under each draft method, and how sure that is.

Shapes: R requests, M draft methods.
"""

from collections.abc import Sequence

import numpy as np

# Standard deviation, in logarithms, of requests' paces around the typical one; and the tokens after which half of what is seen
# of a request is believed.
SPREAD, HALF_TOKENS = 0.35, 48.0
# The share of a request's ease under one method that it is expected to have under another.
SHARED_EASE = 0.5
ALL = slice(None)


class RunSpeeds:
    """Tokens that each request made under each method, and those that a typical one would have made in that time; owns both.

    The logarithm of their ratio is shrunk towards that of the request's task, the more the fewer the tokens. Rows of requests
    that were forgotten are given to new ones.
    """

    def __init__(self, task_ease_RM: np.ndarray) -> None:
        """Row i is request i."""
        self._task_log_RM = np.log(task_ease_RM)
        self._made_RM = np.zeros(task_ease_RM.shape)
        self._typical_RM = np.zeros(task_ease_RM.shape)
        self._free: list[int] = []

    def begin(self, num_requests: int, task_ease_M: np.ndarray) -> list[int]:
        """The rows of `num_requests` more requests of one task."""
        self._make_room(num_requests)
        rows = [self._free.pop() for _ in range(num_requests)]
        self._task_log_RM[rows] = np.log(task_ease_M)
        self._made_RM[rows] = self._typical_RM[rows] = 0.0
        return rows

    def forget(self, rows: Sequence[int]) -> None:
        """Those requests are over."""
        self._free += rows

    def _make_room(self, num_requests: int) -> None:
        """Grows to twice the size at least: a row is copied once or twice in its life."""
        size, missing = len(self._made_RM), num_requests - len(self._free)
        if missing > 0:
            num_new = max(missing, size)
            self._free += range(size + num_new - 1, size - 1, -1)
            self._task_log_RM, self._made_RM, self._typical_RM = (
                np.pad(x, ((0, num_new), (0, 0))) for x in (self._task_log_RM, self._made_RM, self._typical_RM)
            )

    def observe(self, requests_K: np.ndarray, method: int, made_K: np.ndarray, typical: float | np.ndarray) -> None:
        """Runs by `method` made `made_K` tokens, where typical requests would have made `typical`."""
        self._made_RM[requests_K, method] += made_K
        self._typical_RM[requests_K, method] += typical

    def speeds(self, rows: np.ndarray | slice = ALL) -> np.ndarray:
        """Pace over a typical request's of those requests, float64 [R, M]."""
        made_RM, typical_RM, task_RM = (x[rows] for x in (self._made_RM, self._typical_RM, self._task_log_RM))
        belief_RM = _belief(typical_RM)
        own_RM = (np.log((made_RM + 1.0) / (typical_RM + 1.0)) - task_RM) * belief_RM
        elsewhere_RM = (own_RM.sum(1, keepdims=True) - own_RM) * SHARED_EASE
        return np.exp(task_RM + own_RM + elsewhere_RM * (1.0 - belief_RM))

    def doubts(self, rows: np.ndarray | slice = ALL) -> np.ndarray:
        """Standard deviation of the logarithm of that, float64 [R, M]."""
        return SPREAD * np.sqrt(1.0 - _belief(self._typical_RM[rows]))


def _belief(typical_RM: np.ndarray) -> np.ndarray:
    return typical_RM / (typical_RM + HALF_TOKENS)
