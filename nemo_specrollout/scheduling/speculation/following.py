# SPDX-License-Identifier: Apache-2.0
"""Whether to keep a drafter with weights up to date with the requests, which costs a little in every step, or let it lie."""

GENERATIONS = 2
"""A judgement is over this multiple of the requests that ran at once: beginnings, middles and tails."""
FIRST_WATCH_SHARE, WATCH_SHARE = 0.02, 0.0025
"""Following again, to see whether it pays by now, takes the first share of the time at most. The share is halved each time
that it did not pay, down to the second: other tasks may have come, but a drafter without hope must cost nothing."""
HOPELESS_STEPS = 64
"""Steps in a row without hope after which it is given up: a silent model's forecast is back at what is usual by then. A new
look is as long, before the forecast is believed."""


class Following:
    """A drafter can only be asked for requests that it was told of from the first token on. It is told as long as what its
    drafts win is more than what telling takes; if not, it lies dormant, and hears of none until it is worth another look.

    The judgement comes early where there is no hope that the drafter wins its time back: the running requests are given up.
    States: following, dormant. A request that comes while it is dormant gets none of its drafts. Example: `step(64, 0.002,
    0.0002, now_s)` after each step, `ended(3)` when requests are done; then `is_on` says whether new ones are followed.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._won_s = self._cost_s = self._resumes_at_s = 0.0
        self._num_ended = self._most_at_once = self._num_hopeless = 0
        self._num_to_look = 0
        self._watch_share = FIRST_WATCH_SHARE

    @property
    def is_looking(self) -> bool:
        """Returns whether the drafter is followed for the first steps after a rest, or with new weights."""
        return self.is_on and self._num_to_look > 0

    @property
    def gives_up(self) -> bool:
        """Returns whether the drafter stops following the running requests."""
        return self._num_hopeless >= HOPELESS_STEPS

    def step(self, num_requests: int, won_s: float, cost_s: float, now_s: float, is_hopeless: bool = False) -> None:
        """A step with `num_requests` is over: by how much drafts shortened the rollout, what following took, and the clock of
        the engine's work, all in seconds. `is_hopeless`: the drafter will win less, until they end, than following takes."""
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
            self._judge_again()

    def ended(self, num_requests: int) -> None:
        """So many requests that were followed are done."""
        self._num_ended += num_requests

    def begin(self) -> None:
        """Requests are followed from now on, for the drafter is another one."""
        self._watch_share = FIRST_WATCH_SHARE
        self._look()

    def _look(self) -> None:
        self.is_on, self._num_to_look, self._num_hopeless = True, HOPELESS_STEPS, 0
        self._judge_again()

    def _judge_again(self) -> None:
        self._won_s = self._cost_s = 0.0
        self._num_ended = self._most_at_once = 0
