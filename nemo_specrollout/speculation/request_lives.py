# SPDX-License-Identifier: Apache-2.0
"""Estimates how many engine steps a request takes, from requests that have ended. In this file a step is an engine step."""

from typing import ClassVar

import numpy as np

REMEMBERED = 1024
"""Approximate number of ended requests from which the mean number of engine steps of a request is estimated."""


class RequestLives:
    """Estimates how many engine steps a new request takes, and how many tokens a drafter with weights must read to follow it.

    It does not track individual requests. It adds up the number of running requests over all engine steps, and divides the sum
    by the number of requests that have ended. By Little's law this is the mean number of steps of a request. Responses become
    longer or shorter while the policy learns, so old requests fade.

    Owns these sums. For example, if 64 requests took 24 engine steps each, `life_steps` is 24. Before any request has ended,
    `life_steps` is infinite, because nothing indicates yet that requests are short.
    """

    LEARNED: ClassVar = ("_request_steps", "_num_ended", "_num_arrived", "_num_read")

    def __init__(self) -> None:
        self._request_steps = 0.0
        self._num_ended = 0.0
        self._num_arrived = 0.0
        self._num_read = 0.0
        self._num_running = 0

    def is_sound(self) -> bool:
        """Returns whether sums that were loaded from a file are valid, which means that none is negative."""
        return min(self._request_steps, self._num_ended, self._num_arrived, self._num_read) >= 0.0

    def fade(self) -> None:
        """Lowers the weight of an earlier start's requests to that of `REMEMBERED` / 16 requests."""
        most = REMEMBERED / 16.0
        of_ended = most / max(self._num_ended, most)
        of_arrived = most / max(self._num_arrived, most)
        self._request_steps *= of_ended
        self._num_ended *= of_ended
        self._num_arrived *= of_arrived
        self._num_read *= of_arrived

    @property
    def life_steps(self) -> float:
        """Mean number of engine steps of a request from its first token to its last."""
        return self._request_steps / self._num_ended if self._num_ended else np.inf

    @property
    def tokens_read(self) -> float:
        """Mean number of tokens that a drafter with weights must read when a request arrives, so that it can draft for it."""
        return self._num_read / max(self._num_arrived, 1.0)

    def arrived(self, num_new: int, num_read: int) -> None:
        """Notes `num_new` new requests, of which the engine has read `num_read` tokens in total."""
        kept = (1.0 - 1.0 / REMEMBERED) ** num_new
        self._num_arrived = kept * self._num_arrived + num_new
        self._num_read = kept * self._num_read + num_read
        self._num_running += num_new

    def stepped(self, num_requests: int) -> None:
        """Notes an engine step of `num_requests` requests. Running requests that are missing in it are counted as ended."""
        num_ended = max(self._num_running - num_requests, 0)
        if num_ended:
            kept = (1.0 - 1.0 / REMEMBERED) ** num_ended
            self._request_steps *= kept
            self._num_ended = kept * self._num_ended + num_ended
        self._num_running = num_requests
        self._request_steps += num_requests
