# SPDX-License-Identifier: Apache-2.0
"""Estimates of the tokens that each request still needs, and of its decode speed relative to a typical request.

The siblings of a request are other samples of the same prompt, in this training step or an earlier one.

Shapes: R requests, N remembered lengths, M draft methods, K attempts.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

NUM_REMEMBERED = 4096
"""Number of latest response lengths that are remembered over all requests."""
NUM_GROUPS = 8192
"""Number of prompts for which the response lengths of siblings are remembered."""
NUM_OF_GROUP = 32
"""Number of latest response lengths that are remembered for each prompt."""
SIBLING_WEIGHT = 0.5
"""Weight of the length of one sibling, which is another sample of the same prompt, in the estimate of a response's length. All
remembered lengths of any prompt together have the weight 1."""


class LengthEstimator:
    """Estimates how many tokens of a response are left, from the lengths of earlier responses. Owns these lengths.

    The estimate is the mean of (length - current length) over the earlier responses that were longer than this one is now. If
    none was longer, the response is expected to double its length, up to `max_length` tokens.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._recent = np.zeros(NUM_REMEMBERED, np.int64)
        self._num_seen = 0
        self._sorted: np.ndarray | None = None
        self._groups: OrderedDict[int, list[int]] = OrderedDict()

    def finished(self, group: int, length: int) -> None:
        """Notes that a response to the prompt with the number `group` has ended with `length` tokens."""
        self._recent[self._num_seen % NUM_REMEMBERED] = length
        self._num_seen += 1
        self._sorted = None
        siblings = self._groups.setdefault(group, [])
        siblings.append(length)
        del siblings[:-NUM_OF_GROUP]
        self._groups.move_to_end(group)
        if len(self._groups) > NUM_GROUPS:
            self._groups.popitem(last=False)

    def remaining(
        self, groups_R: Sequence[int], lengths_R: np.ndarray, known_R: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the expected remaining tokens (at least 1) of responses with `lengths_R` tokens so far, float64 [R].

        `groups_R` has the number of each response's prompt. `known_R` has the number of tokens of the text that was made ahead
        for the response (`run_ahead`), or 0 if there is no such text. A response is assumed to become longer than its text. So
        with texts made ahead, the long responses are known before the rollout begins.
        """
        if known_R is not None and (known_R > lengths_R).any():
            sure_R = np.maximum(lengths_R, known_R)
            most_R = np.maximum(self.max_length - lengths_R, 1)
            return np.minimum(sure_R - lengths_R + self.remaining(groups_R, sure_R), most_R)
        if self._sorted is None:
            self._sorted = np.sort(self._recent[: self._num_seen])
        beyond_N = np.append(np.cumsum(self._sorted[::-1])[::-1], 0)
        first_R = np.searchsorted(self._sorted, lengths_R, "right")
        num_longer_R = len(self._sorted) - first_R
        weights_R = (num_longer_R > 0).astype(float)
        totals_R = weights_R * (beyond_N[first_R] / np.maximum(num_longer_R, 1) - lengths_R)
        for r, group in enumerate(groups_R):
            longer = [n for n in self._groups.get(group, ()) if n > lengths_R[r]]
            totals_R[r] += SIBLING_WEIGHT * sum(n - lengths_R[r] for n in longer)
            weights_R[r] += SIBLING_WEIGHT * len(longer)
        guess_R = np.maximum(lengths_R, 1)
        mean_R = np.divide(totals_R, weights_R, out=guess_R.astype(float), where=weights_R > 0)
        return np.clip(mean_R, 1.0, np.maximum(self.max_length - lengths_R, 1))


SPREAD = 0.35
"""Standard deviation that is assumed for the logarithm of a request's relative speed before it was measured."""
HALF_TOKENS = 48.0
"""A request's own measurement counts half if it took as long as a typical request needs for this number of tokens. The
relative speed of its task counts for the other half."""
SHARED_SPEED = 0.5
"""Share of a request's deviation from its expected speed that carries over to other draft methods. If the request is faster
than expected under one method, the others are expected to be faster by this share of the difference (as a logarithm)."""
ALL = slice(None)


class RequestSpeeds:
    """Estimates how fast each request decodes under each draft method, relative to a typical request.

    Owns two numbers of tokens for each request and method. One is how many tokens the request has made, and the other is how
    many a typical request makes in the same time. The estimate lies between their ratio and the relative speed of the
    request's task. The more tokens were measured, the closer it is to the ratio.
    """

    def __init__(self, task_speed_RM: np.ndarray) -> None:
        """Row i of `task_speed_RM` has the relative speed of the task of request i, float64."""
        self._task_log_RM = np.log(task_speed_RM)
        self._made_RM = np.zeros(task_speed_RM.shape)
        self._typical_RM = np.zeros(task_speed_RM.shape)
        self._free: list[int] = []

    def begin(self, num_requests: int, task_speed_M: np.ndarray) -> list[int]:
        """Adds `num_requests` requests of one task. Returns for each of them its row number in the estimates.

        `task_speed_M` has the speed of the task's requests under each draft method, relative to a typical request.
        """
        size = len(self._made_RM)
        missing = num_requests - len(self._free)
        if missing > 0:
            num_new = max(missing, size)  # At least twice the size, so that each row is copied once or twice.
            self._free += range(size + num_new - 1, size - 1, -1)
            self._task_log_RM, self._made_RM, self._typical_RM = (
                np.pad(x, ((0, num_new), (0, 0))) for x in (self._task_log_RM, self._made_RM, self._typical_RM)
            )
        rows = [self._free.pop() for _ in range(num_requests)]
        self._task_log_RM[rows] = np.log(task_speed_M)
        self._made_RM[rows] = self._typical_RM[rows] = 0.0
        return rows

    def forget(self, rows: Sequence[int]) -> None:
        self._free += rows

    def observe(self, requests_K: np.ndarray, method: int, made_K: np.ndarray, typical: float | np.ndarray) -> None:
        """Adds a measurement for each of several requests under one draft method.

        `requests_K` has the row numbers of the requests. Each has made `made_K` tokens, in the time in which a typical request
        makes `typical` tokens.
        """
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
        """Returns the standard deviations of the logarithms of what `speeds` returns, float64 [R, M]."""
        return SPREAD * np.sqrt(1.0 - _belief(self._typical_RM[rows]))


def _belief(typical_RM: np.ndarray) -> np.ndarray:
    """Returns the weight of a request's own measurement, from 0 for no tokens to 1 for very many, float64 [R, M]."""
    return typical_RM / (typical_RM + HALF_TOKENS)
