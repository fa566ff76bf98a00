# SPDX-License-Identifier: Apache-2.0
"""One engine between two events: all its requests go at a constant pace, until one of them ends, comes, or is taken away.

Shapes: B requests of an engine.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.simulation.speculation import Pace, Speculation

# A request is at its end when so little of a token is missing: sums of many paces are not exact.
_CLOSE = 1e-6
_NO_PACE = Pace(np.ones(0), 0.0)


@dataclass(frozen=True)
class Span:
    """What an engine did for a while. `num_requests` 0: it computed prompts."""

    begin_s: float
    end_s: float
    worker: int
    num_requests: int
    num_tokens: float
    num_steps: float = 0.0


class Worker:
    """Owns the requests that an engine decodes and those that wait for a place in it, and how far each of the first is.

    `advance` brings it to a moment; what changes its requests comes after that, and `plan` after all such changes.
    Invariant: a request is in `requests_B` once at most, and its tokens never exceed its length.
    """

    def __init__(self, index: int, speculation: Speculation, method: int, num_slots: int) -> None:
        self.index, self.speculation, self.method, self.num_slots = index, speculation, method, num_slots
        self.waiting: deque[int] = deque()
        self.requests_B = np.zeros(0, np.int64)
        self.tokens_B = np.zeros(0)
        self.lengths_B = np.zeros(0)
        self.p_B = np.zeros(0)
        self.spans: list[Span] = []
        self.after_dry: tuple[Speculation, int] | None = None
        """How it drafts, and by which method, once it has run dry; None: as before."""
        self._pace, self._num_steps = _NO_PACE, 0.0
        self.begin_s = self.end_s = 0.0
        self.stamp = 0

    @property
    def load(self) -> int:
        """Requests that it has, waiting ones too."""
        return len(self.requests_B) + len(self.waiting)

    @property
    def has_room(self) -> bool:
        return len(self.requests_B) < self.num_slots

    def tokens_at(self, now_s: float) -> np.ndarray:
        """How far each request is, float64 [B], at a moment of the present plan."""
        done_B = self.tokens_B + self._pace.tokens_B * self._num_steps * self._share(now_s)
        return np.minimum(done_B, self.lengths_B)

    def advance(self, now_s: float) -> None:
        """Brings all requests to `now_s`, which lies within the present plan."""
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
        """Sets the pace from now on; the moment at which the next request ends, infinite if there is none."""
        self.stamp += 1
        self.begin_s = max(self.begin_s, now_s)
        if not len(self.requests_B):
            self._pace, self.end_s = _NO_PACE, np.inf
            return self.end_s
        context = prompt_tokens + float(self.tokens_B.mean())
        self._pace = self.speculation.pace(self.p_B, context)
        self._num_steps = max(float(((self.lengths_B - self.tokens_B) / self._pace.tokens_B).min()), 0.0)
        # Costs are nearly linear in the context, so those in the middle stand for all.
        middle = context + 0.5 * self._num_steps * float(self._pace.tokens_B.mean())
        self.end_s = self.begin_s + self._num_steps * self.speculation.step_s(self._pace, len(self.requests_B), middle)
        return self.end_s

    def prefill(self, now_s: float, num_tokens: float) -> None:
        """Texts of `num_tokens` tokens are computed first; its other requests wait."""
        begin_s = max(self.begin_s, now_s)
        self.begin_s = begin_s + self.speculation.costs.prefill_s(num_tokens)
        if self.begin_s > begin_s:
            self.spans.append(Span(begin_s, self.begin_s, self.index, 0, 0.0))

    def take(self, requests_b: np.ndarray, tokens_b: np.ndarray, lengths_b: np.ndarray, p_b: np.ndarray) -> None:
        """Requests that begin, or go on, here."""
        self.requests_B = np.concatenate([self.requests_B, requests_b])
        self.tokens_B = np.concatenate([self.tokens_B, tokens_b])
        self.lengths_B = np.concatenate([self.lengths_B, lengths_b])
        self.p_B = np.concatenate([self.p_B, p_b])

    def run_dry(self) -> None:
        """It has nothing to do: GPUs that are free host another method."""
        if self.after_dry is not None:
            (self.speculation, self.method), self.after_dry = self.after_dry, None

    def ended(self) -> np.ndarray:
        """Requests that have all their tokens, int64."""
        return self.requests_B[self.tokens_B >= self.lengths_B - _CLOSE]

    def drop(self, requests_b: np.ndarray) -> float:
        """Takes requests out; the tokens that they had."""
        stays_B = (self.requests_B[:, None] != requests_b).all(axis=1)
        num_tokens = float(self.tokens_B[~stays_B].sum())
        self.requests_B, self.tokens_B = self.requests_B[stays_B], self.tokens_B[stays_B]
        self.lengths_B, self.p_B = self.lengths_B[stays_B], self.p_B[stays_B]
        return num_tokens

    def _share(self, now_s: float) -> float:
        if now_s >= self.end_s or self.end_s <= self.begin_s:
            return 1.0
        return max(now_s - self.begin_s, 0.0) / (self.end_s - self.begin_s)
