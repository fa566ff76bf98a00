# SPDX-License-Identifier: Apache-2.0
"""Estimates for how many engine steps a request runs, from requests that have ended. A step is an engine step here."""

from typing import ClassVar

import numpy as np

REMEMBERED = 1024
"""Approximate number of ended requests from which a life is estimated."""


class RequestLives:
    """Estimates how many steps a new request will take, and how many tokens a drafter with weights must read to follow it.

    Individual requests need not be tracked. By Little's law, the mean life of requests is the number of requests in each step,
    summed over steps, divided by the number of requests that have ended. Responses become longer or shorter as the policy
    learns, so old requests fade.

    Owns these sums. Example: 64 requests of 24 steps each give `life_steps` of 24. Before any request has ended it is
    infinite, because nothing indicates that requests are short.
    """

    LEARNED: ClassVar = ("_request_steps", "_num_ended", "_num_arrived", "_num_read")

    def __init__(self) -> None:
        self._request_steps = 0.0
        self._num_ended = 0.0
        self._num_arrived = 0.0
        self._num_read = 0.0
        self._num_running = 0

    def is_sound(self) -> bool:
        """Returns whether the content is valid, which it is if the sums can come from counts."""
        return min(self._request_steps, self._num_ended, self._num_arrived, self._num_read) >= 0.0

    def fade(self) -> None:
        """Reduces the weight of an earlier start's requests to a sixteenth of those that are remembered."""
        most = REMEMBERED / 16.0
        of_ended = most / max(self._num_ended, most)
        of_arrived = most / max(self._num_arrived, most)
        self._request_steps *= of_ended
        self._num_ended *= of_ended
        self._num_arrived *= of_arrived
        self._num_read *= of_arrived

    @property
    def life_steps(self) -> float:
        """Mean number of steps of a request from its first token to its last."""
        return self._request_steps / self._num_ended if self._num_ended else np.inf

    @property
    def tokens_read(self) -> float:
        """Mean number of tokens that a drafter with weights must read when a request arrives, in order to follow it."""
        return self._num_read / max(self._num_arrived, 1.0)

    def arrived(self, num_new: int, num_read: int) -> None:
        """Notes new requests, of which the engine has read `num_read` tokens."""
        kept = (1.0 - 1.0 / REMEMBERED) ** num_new
        self._num_arrived = kept * self._num_arrived + num_new
        self._num_read = kept * self._num_read + num_read
        self._num_running += num_new

    def stepped(self, num_requests: int) -> None:
        """Notes a step of `num_requests` requests. Those that are missing in it have ended."""
        num_ended = max(self._num_running - num_requests, 0)
        if num_ended:
            kept = (1.0 - 1.0 / REMEMBERED) ** num_ended
            self._request_steps *= kept
            self._num_ended = kept * self._num_ended + num_ended
        self._num_running = num_requests
        self._request_steps += num_requests
