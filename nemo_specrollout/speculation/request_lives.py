# SPDX-License-Identifier: Apache-2.0
"""How long the requests of an engine live, in steps, as far as those that have ended tell it."""

from typing import ClassVar

import numpy as np

REMEMBERED = 1024
"""Ended requests from which a life is estimated, approximately."""


class RequestLives:
    """Estimates how many steps a new request will take, and how many tokens a model must read before it can follow one.

    No request is told apart. By Little's law the mean life of requests is the number of requests in each step, summed over
    steps, divided by the number of requests that have ended. Responses of a run become longer or shorter as its policy
    learns, so old requests fade.

    Owns these sums. Example: 64 requests of 24 steps each give `life_steps` of 24. Before any request has ended it is
    infinite, because nothing tells that requests are short.
    """

    LEARNED: ClassVar = ("_request_steps", "_num_ended", "_num_arrived", "_num_read")

    def __init__(self) -> None:
        self._request_steps = 0.0
        self._num_ended = 0.0
        self._num_arrived = 0.0
        self._num_read = 0.0
        self._num_running = 0

    def is_sound(self) -> bool:
        """Returns whether the sums are sums of counts."""
        return min(self._request_steps, self._num_ended, self._num_arrived, self._num_read) >= 0.0

    def fade(self) -> None:
        """Lets the requests of an earlier start count for a sixteenth of those that are remembered."""
        most = REMEMBERED / 16.0
        of_ended = most / max(self._num_ended, most)
        of_arrived = most / max(self._num_arrived, most)
        self._request_steps *= of_ended
        self._num_ended *= of_ended
        self._num_arrived *= of_arrived
        self._num_read *= of_arrived

    @property
    def life_steps(self) -> float:
        """Steps that a request takes from its first token to its last."""
        return self._request_steps / self._num_ended if self._num_ended else np.inf

    @property
    def tokens_read(self) -> float:
        """Tokens that a model reads when a request arrives, if it is to follow the request."""
        return self._num_read / max(self._num_arrived, 1.0)

    def arrived(self, num_new: int, num_read: int) -> None:
        """Takes note of new requests, which the engine has read in `num_read` tokens."""
        kept = (1.0 - 1.0 / REMEMBERED) ** num_new
        self._num_arrived = kept * self._num_arrived + num_new
        self._num_read = kept * self._num_read + num_read
        self._num_running += num_new

    def stepped(self, num_requests: int) -> None:
        """Takes note of a step of `num_requests` requests. Those that are missing in it have ended."""
        num_ended = max(self._num_running - num_requests, 0)
        if num_ended:
            kept = (1.0 - 1.0 / REMEMBERED) ** num_ended
            self._request_steps *= kept
            self._num_ended = kept * self._num_ended + num_ended
        self._num_running = num_requests
        self._request_steps += num_requests
