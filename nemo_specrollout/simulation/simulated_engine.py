# SPDX-License-Identifier: Apache-2.0
"""Simulated engine: between two events, all its requests advance at constant decode speed.

Shapes: B requests of an engine.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.simulation.speculation import DecodeStep, Speculation

_CLOSE = 1e-6
"""Missing tokens at which a request counts as ended, because sums of many steps are inexact."""
_NO_STEP = DecodeStep(np.ones(0), 0.0)


@dataclass(frozen=True)
class Span:
    """Work of an engine over a stretch of time. `num_requests` is 0 for a prefill."""

    begin_s: float
    end_s: float
    engine: int
    num_requests: int
    num_tokens: float
    num_steps: float = 0.0


class SimulatedEngine:
    """Owns the requests of an engine, those that wait for a slot, and the progress of each.

    `advance` brings the engine to a moment. Changes of its requests follow, and `plan` after all changes.
    Invariant: a request is in `requests_B` at most once, and its tokens never exceed its length.
    """

    def __init__(self, index: int, speculation: Speculation, method: int, num_slots: int) -> None:
        self.index, self.speculation, self.method, self.num_slots = index, speculation, method, num_slots
        self.waiting: deque[int] = deque()
        self.requests_B = np.zeros(0, np.int64)
        self.tokens_B = np.zeros(0)
        self.lengths_B = np.zeros(0)
        self.p_B = np.zeros(0)
        self.spans: list[Span] = []
        self.after_idle: tuple[Speculation, int] | None = None
        """Speculation and method once the engine has been idle; None if they stay the same."""
        self._step, self._num_steps = _NO_STEP, 0.0
        self.begin_s = self.end_s = 0.0
        self.plan_number = 0
        """Number of plans so far. An event of an earlier plan is outdated."""

    @property
    def load(self) -> int:
        """Number of requests, including waiting ones."""
        return len(self.requests_B) + len(self.waiting)

    def tokens_at(self, now_s: float) -> np.ndarray:
        """Returns the tokens of each request, float64 [B], at a moment of the current plan."""
        done_B = self.tokens_B + self._step.tokens_B * self._num_steps * self._share(now_s)
        return np.minimum(done_B, self.lengths_B)

    def advance(self, now_s: float) -> None:
        """Brings all requests to `now_s`, which lies within the current plan."""
        if now_s <= self.begin_s or not len(self.requests_B):
            return
        before, share = self.tokens_B, self._share(now_s)
        self.tokens_B = self.tokens_at(now_s)
        num_tokens = float((self.tokens_B - before).sum())
        num_steps = self._num_steps * share
        self.spans.append(Span(self.begin_s, now_s, self.index, len(self.requests_B), num_tokens, num_steps))
        self._num_steps *= 1.0 - share
        self.begin_s = now_s

    def plan(self, now_s: float, prompt_tokens: int) -> float:
        """Plans the decode steps from now on. Returns when the next request ends; infinity if there is none."""
        self.plan_number += 1
        self.begin_s = max(self.begin_s, now_s)
        if not len(self.requests_B):
            self._step, self.end_s = _NO_STEP, np.inf
            return self.end_s
        context = prompt_tokens + float(self.tokens_B.mean())
        self._step = self.speculation.decode_step(self.p_B, context)
        self._num_steps = max(float(((self.lengths_B - self.tokens_B) / self._step.tokens_B).min()), 0.0)
        # Costs are nearly linear in the context, so the middle represents all steps.
        middle = context + 0.5 * self._num_steps * float(self._step.tokens_B.mean())
        self.end_s = self.begin_s + self._num_steps * self.speculation.step_s(self._step, len(self.requests_B), middle)
        return self.end_s

    def prefill(self, now_s: float, num_tokens: float) -> None:
        """Computes texts of `num_tokens` tokens first; other requests wait."""
        begin_s = max(self.begin_s, now_s)
        self.begin_s = begin_s + self.speculation.costs.prefill_s(num_tokens)
        if self.begin_s > begin_s:
            self.spans.append(Span(begin_s, self.begin_s, self.index, 0, 0.0))

    def take(self, requests_b: np.ndarray, tokens_b: np.ndarray, lengths_b: np.ndarray, p_b: np.ndarray) -> None:
        """Adds requests that begin or continue here."""
        self.requests_B = np.concatenate([self.requests_B, requests_b])
        self.tokens_B = np.concatenate([self.tokens_B, tokens_b])
        self.lengths_B = np.concatenate([self.lengths_B, lengths_b])
        self.p_B = np.concatenate([self.p_B, p_b])

    def became_idle(self) -> None:
        """Switches to the method for engines that have been idle, if there is one."""
        if self.after_idle is not None:
            (self.speculation, self.method), self.after_idle = self.after_idle, None

    def ended(self) -> np.ndarray:
        """Returns the requests that have all their tokens, int64."""
        return self.requests_B[self.tokens_B >= self.lengths_B - _CLOSE]

    def drop(self, requests_b: np.ndarray) -> float:
        """Removes requests. Returns the sum of their tokens."""
        stays_B = (self.requests_B[:, None] != requests_b).all(axis=1)
        num_tokens = float(self.tokens_B[~stays_B].sum())
        self.requests_B, self.tokens_B = self.requests_B[stays_B], self.tokens_B[stays_B]
        self.lengths_B, self.p_B = self.lengths_B[stays_B], self.p_B[stays_B]
        return num_tokens

    def _share(self, now_s: float) -> float:
        if now_s >= self.end_s or self.end_s <= self.begin_s:
            return 1.0
        return max(now_s - self.begin_s, 0.0) / (self.end_s - self.begin_s)
