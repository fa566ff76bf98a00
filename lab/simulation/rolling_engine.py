# SPDX-License-Identifier: Apache-2.0
"""Simulated engine with texts in flight: its own requests, and requests of coming steps in slots that are free.

The production policy (`run_ahead/decisions/early_share.py`) says how many of those requests run beside the engine's own. What is
known of a text is verified first, many rows at a time, and decoded from where it parts. Between two events all requests of the
engine advance at constant speed.

Shapes: I requests, R numbers of requests from 0 on, B requests of a step.
"""

from dataclasses import dataclass

import numpy as np

from lab.simulation.event_loop import Span
from lab.simulation.speculation import DecodeStep, Speculation
from lab.simulation.workload import Workload
from nemo_specrollout.run_ahead.decisions.early_share import EarlyPrices, Worth, mean_token_s, num_early

VERIFIED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Possible drafts a step of a request whose text is known."""
_CLOSE = 1e-6
"""Missing tokens at which something counts as ended, because sums of many steps are inexact."""
_FULL_ROWS = 1024
"""Rows of a full step, at which the price of a verified row is taken."""


@dataclass
class TextsInFlight:
    """The requests of an engine in a phase, in the order in which equals are begun. Owns their progress."""

    numbers_I: np.ndarray
    """Their numbers among those of all steps."""
    work: Workload
    steps_ahead_I: np.ndarray
    """0 for the engine's own requests."""
    known_I: np.ndarray
    """Tokens of each text that are right under the present weights; nobody knows so before they are verified."""
    is_complete_I: np.ndarray
    """Whether the text that was made had an end, which is wrong if it parts before."""
    branched_I: np.ndarray
    """Tokens that branches of each text have."""
    done_I: np.ndarray
    """Tokens that the present weights have made or verified."""

    def is_open_I(self) -> np.ndarray:
        """Returns which requests have tokens to come."""
        return self.done_I < self.work.length_R - _CLOSE

    def is_verifying_I(self) -> np.ndarray:
        """Returns which requests have known tokens ahead of them."""
        return self.done_I < self.known_I - _CLOSE


def early_prices(speculation: Speculation, num_slots: int, context: float, length_L: np.ndarray) -> EarlyPrices:
    """Returns what an engine would have measured after a rollout of responses of these lengths."""
    costs = speculation.costs
    num_R = np.arange(num_slots + 1)
    seconds_R = np.array([float(costs.step_s(max(n, 1), float(max(n, 1)), context)) for n in num_R])
    full_s, half_s = (float(costs.step_s(num_slots, float(max(n, num_slots)), context)) for n in (_FULL_ROWS, _FULL_ROWS // 2))
    verify_row_s = max(full_s - half_s, 0.0) / (_FULL_ROWS - _FULL_ROWS // 2)
    return EarlyPrices(seconds_R, verify_row_s, mean_token_s(seconds_R, length_L))


class RollingEngine:
    """One engine in one phase: until its own requests have ended, and then as long as it is asked to go on."""

    def __init__(
        self,
        index: int,
        speculation: Speculation,
        num_slots: int,
        texts: TextsInFlight,
        prices: EarlyPrices | None,
        kept: float = 1.0,
        branches: int = 0,
        foreseen: float = 0.0,
    ) -> None:
        """`prices` is None for an engine that fills all of its slots, whatever that costs.

        `kept` is the share of what was made ahead that updates leave, and `foreseen` the share of partings at which `branches`
        branches of each text foresee the new one.
        """
        self.texts = texts
        self.seconds = 0.0
        self.spans: list[Span] = []
        self.num_early_tokens = 0.0
        self.end_I = np.full(len(texts.done_I), np.nan)
        """Second at which each request has ended."""
        self._index = index
        self._speculation = speculation
        self._num_slots = num_slots
        self._prices = prices
        self._kept = kept
        self._branches = branches
        self._foreseen = foreseen
        self._is_own_I = texts.steps_ahead_I == 0
        self._has_begun_I = np.zeros(len(texts.done_I), bool)

    @property
    def is_done(self) -> bool:
        """Whether its own requests have ended."""
        return not (self._is_own_I & self.texts.is_open_I()).any()

    def run(self, until_s: float = np.inf) -> None:
        """Goes on until its own requests have ended, or until the moment `until_s`, whatever comes later for an idle engine."""
        while self.seconds < until_s - 1e-12 and not (self.is_done and np.isinf(until_s)):
            own = np.flatnonzero(self._is_own_I & self.texts.is_open_I())[: self._num_slots]
            early, branched = self._early(len(own))
            running = np.concatenate([own, early])
            if not len(running):
                self.seconds = until_s
                return
            self._prefill(running)
            self._advance(running, branched, len(own), until_s)

    def _early(self, num_own: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the early requests that run, best first, and those of them of which branches do, once for each branch."""
        texts = self.texts
        free = self._num_slots - num_own
        open_I = ~self._is_own_I & (texts.is_open_I() | texts.is_verifying_I())
        candidates = np.flatnonzero(open_I)
        nothing = np.zeros(0, np.int64)
        if free <= 0 or not len(candidates):
            return nothing, nothing
        seems_complete_i = (texts.is_complete_I & texts.is_verifying_I())[candidates]
        k_i = texts.steps_ahead_I[candidates]
        p_i = self._kept**k_i * np.where(seems_complete_i, 1.0 - self._kept, 1.0)
        order = np.argsort(-p_i, kind="stable")[:free]
        candidates, p_i, k_i = candidates[order], p_i[order], k_i[order]
        if self._prices is None:
            return candidates, nothing
        branched, worth_b = self._branches_of(candidates, p_i, free)
        worths = [*map(Worth, p_i.tolist(), k_i.tolist()), *worth_b]
        number = min(num_early(self._prices, num_own, worths), free)
        return candidates[:number], branched[: max(number - len(candidates), 0)]

    def _branches_of(self, candidates: np.ndarray, p_i: np.ndarray, free: int) -> tuple[np.ndarray, list[Worth]]:
        """Returns the texts whose branches could run in slots that texts leave, once for each branch, and their worths.

        A branch of a text has half of its tokens on average.
        """
        texts = self.texts
        left = free - len(candidates)
        share = (1.0 - self._kept) * self._foreseen
        if left <= 0 or not self._branches or share <= 0.0:
            return np.zeros(0, np.int64), []
        is_missing_i = texts.branched_I[candidates] < self._needed(candidates) - _CLOSE
        each = np.repeat(candidates[is_missing_i], self._branches)[:left]
        k_b = texts.steps_ahead_I[each]
        p_b = share / self._branches * self._kept ** (k_b - 1)
        return each, [Worth(p, p * k) for p, k in zip(p_b.tolist(), k_b.tolist(), strict=True)]

    def _needed(self, requests_i: np.ndarray) -> np.ndarray:
        return self._branches * self.texts.work.length_R[requests_i] / 2

    def branched_share(self) -> np.ndarray:
        """Returns the share of its branches that each text has, float64 [I]."""
        needed_I = self._needed(np.arange(len(self._is_own_I)))
        return np.minimum(self.texts.branched_I / np.maximum(needed_I, 1.0), 1.0)

    def _prefill(self, running: np.ndarray) -> None:
        """Computes the prompts of requests that begin."""
        new = running[~self._has_begun_I[running]]
        if len(new):
            self._has_begun_I[new] = True
            begin_s = self.seconds
            self.seconds += self._speculation.costs.prefill_s(self.texts.work.tokens_to_prefill(new))
            if self.seconds > begin_s:
                self.spans.append(Span(begin_s, self.seconds, self._index, 0, 0.0))

    def _advance(self, running: np.ndarray, branched: np.ndarray, num_own: int, until_s: float) -> None:
        """Goes on to the next event: a request has ended or has no known tokens left, or the time is up."""
        texts = self.texts
        work = texts.work
        num_running = len(running) + len(branched)
        context = work.prompt_tokens + float(texts.done_I[running].mean())
        is_known_B = texts.is_verifying_I()[running]
        step = self._step(is_known_B, work.acceptance_RM[running, 0], len(branched), context)
        until_B = np.where(is_known_B, texts.known_I[running], work.length_R[running])
        num_steps = max(float(((until_B - texts.done_I[running]) / step.tokens_B).min()), 0.0)
        middle = context + 0.5 * num_steps * float(step.tokens_B.mean())
        step_s = self._speculation.step_s(step, num_running, middle)
        num_steps = min(num_steps, (until_s - self.seconds) / step_s)
        made_B = np.minimum(num_steps * step.tokens_B, until_B - texts.done_I[running])
        texts.done_I[running] += made_B
        np.add.at(texts.branched_I, branched, num_steps)
        begin_s = self.seconds
        self.seconds += num_steps * step_s
        ended = running[texts.done_I[running] >= work.length_R[running] - _CLOSE]
        self.end_I[ended] = self.seconds
        if num_own:
            own = float(made_B[:num_own].sum())
            self.spans.append(Span(begin_s, self.seconds, self._index, num_own, own, num_steps))
        self.num_early_tokens += float(made_B[num_own:].sum()) + num_steps * len(branched)

    def _step(self, is_known_B: np.ndarray, p_B: np.ndarray, num_branches: int, context: float) -> DecodeStep:
        """Returns the step that makes the most tokens a second, with known tokens as drafts where there are any."""
        num_running = len(is_known_B) + num_branches
        others = DecodeStep(np.ones(0), 0.0)
        if not is_known_B.all():
            others = self._speculation.decode_step(p_B[~is_known_B], context)
        steps = []
        for num_drafts in VERIFIED if is_known_B.any() else VERIFIED[:1]:
            tokens_B = np.full(len(is_known_B), 1.0 + num_drafts)
            tokens_B[~is_known_B] = others.tokens_B
            num_rows = others.num_rows + num_branches + (1.0 + num_drafts) * float(is_known_B.sum())
            steps.append(DecodeStep(tokens_B, num_rows, others.depth))
        return max(steps, key=lambda s: s.tokens_B.sum() / self._speculation.step_s(s, num_running, context))
