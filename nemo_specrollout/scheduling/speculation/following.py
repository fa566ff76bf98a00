# SPDX-License-Identifier: Apache-2.0
"""Decides whether a draft model follows new requests. Following costs some time in every step."""

GENERATIONS = 2
"""Length of an evaluation: ended requests, as a multiple of the requests that ran at once. It covers beginnings and tails."""
FIRST_WATCH_SHARE = 0.02
"""Share of the engine's time for the first new trial of a dormant model. The share halves after each trial that fails."""
WATCH_SHARE = 0.0025
"""Smallest share of the engine's time for trials: the tasks may change, but a hopeless model must cost nothing."""
HOPELESS_STEPS = 64
"""Hopeless steps in a row before the model is given up, and steps of a new trial before its forecast is trusted. By then the
forecast of a model without drafts has returned to its prior."""


class Following:
    """Decides whether a draft model follows new requests. Owns the seconds that drafts saved and that following took.

    A model can only draft for a request that it has followed from the first token on. The model follows new requests as
    long as its drafts save more time than following takes. Otherwise it lies dormant until the next trial. A request that
    arrives meanwhile never gets drafts of the model. If there is no hope that the model recovers its cost, the evaluation
    comes early and the running requests are given up.

    Example: call `step(64, 0.002, 0.0002, now_s)` after each step and `ended(3)` when 3 followed requests have ended. Then
    `is_on` tells whether new requests are followed.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._won_s = self._cost_s = self._resumes_at_s = 0.0
        self._num_ended = self._most_at_once = self._num_hopeless = 0
        self._num_to_look = 0
        self._watch_share = FIRST_WATCH_SHARE

    @property
    def is_looking(self) -> bool:
        """Whether this is one of the first steps of a trial."""
        return self.is_on and self._num_to_look > 0

    @property
    def gives_up(self) -> bool:
        """Whether the model stops following the running requests."""
        return self._num_hopeless >= HOPELESS_STEPS

    def step(self, num_requests: int, won_s: float, cost_s: float, now_s: float, is_hopeless: bool = False) -> None:
        """Takes note of a finished step.

        `won_s`: seconds that drafts saved. `cost_s`: seconds that following took. `now_s`: seconds that the engine has
        worked. `is_hopeless`: until these requests end, the model will save less than following takes.
        """
        self._num_hopeless = self._num_hopeless + 1 if is_hopeless and not self.gives_up else 0
        if not self.is_on:
            if now_s >= self._resumes_at_s:
                self._look()
            return
        self._num_to_look = max(self._num_to_look - (won_s + cost_s > 0.0), 0)
        self._won_s += won_s
        self._cost_s += cost_s
        self._most_at_once = max(self._most_at_once, num_requests)
        if self.gives_up or self._num_ended >= GENERATIONS * self._most_at_once:
            self.is_on = self._won_s >= self._cost_s
            if self.is_on:
                self._watch_share = FIRST_WATCH_SHARE
            else:
                self._resumes_at_s = now_s + self._cost_s / self._watch_share
                self._watch_share = max(WATCH_SHARE, self._watch_share / 2)
            self._restart_evaluation()

    def ended(self, num_requests: int) -> None:
        """Takes note of followed requests that have ended."""
        self._num_ended += num_requests

    def begin(self) -> None:
        """Starts a trial of a model whose weights have changed."""
        self._watch_share = FIRST_WATCH_SHARE
        self._look()

    def _look(self) -> None:
        self.is_on, self._num_to_look, self._num_hopeless = True, HOPELESS_STEPS, 0
        self._restart_evaluation()

    def _restart_evaluation(self) -> None:
        self._won_s = self._cost_s = 0.0
        self._num_ended = self._most_at_once = 0
