# SPDX-License-Identifier: Apache-2.0
"""A simulated engine that decodes its own requests, and early requests of coming steps in free slots (`run_ahead`).

The production code (`run_ahead/decisions/early_share.py`) decides how many early requests run beside the engine's own. If a
part of a request's text was decoded in an earlier step, this part is verified first, many rows at a time. Decoding then
continues where the text diverges. Between two events all requests of the engine advance at constant speed.

Shapes: I requests, R numbers of requests from 0 on, L lengths of responses, B requests of an engine step.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from lab.simulation.event_loop import Span
from lab.simulation.speculation import DecodeStep, Speculation
from lab.simulation.workload import Workload
from nemo_specrollout.run_ahead.decisions.early_share import (
    EarlyPrices,
    PlainRollout,
    Worth,
    early_worth,
    num_early,
)
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth

VERIFIED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of drafts that are tried for each request that has right tokens from an early text left to verify. The engine takes
the number that gives the most tokens per second."""
_CLOSE = 1e-6
"""Number of missing tokens at which a text counts as ended, because sums over many engine steps are inexact."""
_FULL_ROWS = 1024
"""Number of rows of a full engine step. The price of a verified row is taken from steps of this size."""


@dataclass
class TextsInFlight:
    """All requests of an engine in a simulated step, its own and early ones, with their progress.

    Of two requests that are equally worth starting, the engine starts the one with the lower index.
    """

    numbers_I: np.ndarray
    """Index of each request among the requests of all steps."""
    work: Workload
    steps_ahead_I: np.ndarray
    """Number of steps until each request's own step, which is 0 for the engine's own requests."""
    known_I: np.ndarray
    """Number of tokens at the beginning of each early text that are right under the current weights. The engine learns this
    number only by verification."""
    is_complete_I: np.ndarray
    """Whether each early text has an end. The end is wrong if the text diverges before it."""
    done_I: np.ndarray
    """Number of tokens of each request that the current weights have decoded or verified."""
    end_I: np.ndarray
    """Second at which each request ended, or NaN if it has not ended."""
    has_begun_I: np.ndarray
    """Whether the engine has computed each request's prompt."""

    @classmethod
    def at_start(
        cls,
        numbers_I: np.ndarray,
        work: Workload,
        steps_ahead_I: np.ndarray,
        known_I: np.ndarray,
        is_complete_I: np.ndarray,
    ) -> "TextsInFlight":
        """Returns the requests at the beginning of a simulated step, when nothing has been decoded or verified in it."""
        num = len(numbers_I)
        progress = (np.zeros(num), np.full(num, np.nan), np.zeros(num, bool))
        return cls(numbers_I, work, steps_ahead_I, known_I, is_complete_I, *progress)

    @property
    def is_own_I(self) -> np.ndarray:
        """Mask of the engine's own requests, which are those of the current step."""
        return self.steps_ahead_I == 0

    def is_open_I(self) -> np.ndarray:
        """Returns a mask of the requests that have not ended."""
        return self.done_I < self.work.length_R - _CLOSE

    def is_verifying_I(self) -> np.ndarray:
        """Returns a mask of the requests that still have known tokens to verify."""
        return self.done_I < self.known_I - _CLOSE

    def part(self, rows_i: np.ndarray) -> "TextsInFlight":
        """Returns the requests at the indices `rows_i`."""
        return replace(
            self, work=self.work.part(rows_i), **{name: getattr(self, name)[rows_i] for name in self._columns()}
        )

    def with_others(self, others: "TextsInFlight") -> "TextsInFlight":
        """Returns these requests followed by others of the same steps."""
        columns = {n: np.concatenate([getattr(self, n), getattr(others, n)]) for n in self._columns()}
        return replace(self, work=self.work.with_others(others.work), **columns)

    def _columns(self) -> list[str]:
        return [field.name for field in fields(self) if field.name != "work"]


def early_prices(
    speculation: Speculation, num_slots: int, prompt_tokens: float, length_L: np.ndarray, num_steps: int
) -> EarlyPrices:
    """Returns the prices of early requests as an engine would have measured them in a rollout of responses of these lengths.

    The texts of `num_steps` coming steps are in flight. All engine steps are taken to have the same context, which is the mean
    over all tokens of the rollout.
    """
    context = prompt_tokens + 0.5 * float((length_L**2).sum() / length_L.sum())
    costs = speculation.costs
    num_R = np.arange(num_slots + 1)
    seconds_R = np.array([float(costs.step_s(n, n, context)) for n in np.maximum(num_R, 1).astype(float).tolist()])
    full_s, half_s = (
        float(costs.step_s(num_slots, float(max(n, num_slots)), context)) for n in (_FULL_ROWS, _FULL_ROWS // 2)
    )
    verify_row_s = max(full_s - half_s, 0.0) / (_FULL_ROWS - _FULL_ROWS // 2)
    return EarlyPrices(seconds_R, verify_row_s, PlainRollout(seconds_R, length_L), num_steps)


@dataclass(frozen=True)
class EarlyTerms:
    """What an engine knows about the cost and the worth of early requests."""

    prices: EarlyPrices
    kept: float
    """Share of the tokens made ahead that are still right after an update of the weights."""
    rows_of_branches: float
    """Mean number of branches that are decoded beside an early text. Each takes a slot and a row."""


class RollingEngine:
    """A simulated engine in one simulated step.

    The engine runs until its own requests have ended, and then as long as the caller wants. A tail policy sees the engine
    like a `SimulatedEngine` that has only its own requests.
    """

    def __init__(
        self, index: int, speculation: Speculation, num_slots: int, texts: TextsInFlight, terms: EarlyTerms | None
    ) -> None:
        """Begins the simulated step.

        If `terms` is None, the engine fills all free slots with early requests, whatever they cost.
        """
        self.index = index
        self.num_slots = num_slots
        self.method = 0
        self.texts = texts
        self.seconds = 0.0
        self.spans: list[Span] = []
        self.num_early_tokens = 0.0
        self._speculation = speculation
        self._terms = terms

    @property
    def is_done(self) -> bool:
        """Whether all of the engine's own requests have ended."""
        return not self._is_under_way_I().any()

    @property
    def load(self) -> int:
        """Number of the engine's own requests that have not ended, including waiting ones."""
        return int(self._is_under_way_I().sum())

    @property
    def requests_B(self) -> np.ndarray:
        """Numbers of the engine's own requests that have started and not ended, int64.

        A number is the request's index among the requests of all steps.
        """
        return self.texts.numbers_I[self._is_running_I()]

    @property
    def known_B(self) -> np.ndarray:
        """Number of right tokens that were made early for each request in `requests_B`, float64."""
        return self.texts.known_I[self._is_running_I()]

    @property
    def waiting(self) -> np.ndarray:
        """Numbers of the engine's own requests that have not started, int64.

        A number is the request's index among the requests of all steps.
        """
        return self.texts.numbers_I[self._is_under_way_I() & ~self.texts.has_begun_I]

    def tokens_at(self, now_s: float) -> np.ndarray:
        """Returns how many tokens each request in `requests_B` has, float64 [B]. The engine must have run until `now_s`."""
        return self.texts.done_I[self._is_running_I()]

    def run(self, until_s: float = np.inf, *, only_own: bool = False) -> None:
        """Runs until the second `until_s`.

        With `only_own`, or if `until_s` is infinite, the engine stops when its own requests have ended.
        """
        only_own |= np.isinf(until_s)
        while self.seconds < until_s - 1e-12 and not (only_own and self.is_done):
            own = np.flatnonzero(self._is_under_way_I())[: self.num_slots]
            running = np.concatenate([own, self._early(len(own))])
            if not len(running):
                self.seconds = until_s
                return
            self._prefill(running)
            self._advance(running, len(own), until_s)

    def give(self, request: int) -> TextsInFlight:
        """Removes a request that continues in another engine, and returns it with its progress."""
        is_it_I = self.texts.numbers_I == request
        given = self.texts.part(np.flatnonzero(is_it_I))
        self.texts = self.texts.part(np.flatnonzero(~is_it_I))
        return given

    def take(self, given: TextsInFlight) -> None:
        """Continues requests of other engines, after a prefill of their prompts and of the tokens that they have."""
        self.texts = self.texts.with_others(given)
        work = given.work
        self._compute(float(work.prompt_tokens * len(given.done_I) + given.done_I.sum()))

    def early_worth(self) -> EarlyWorth:
        """Returns the current worth of the engine's early work."""
        if self._terms is None:
            return EarlyWorth()
        return early_worth(_with_branches(self._terms, 0), self._early_candidates(self._terms, 0)[1])

    def _is_under_way_I(self) -> np.ndarray:
        return self.texts.is_own_I & self.texts.is_open_I()

    def _is_running_I(self) -> np.ndarray:
        return self._is_under_way_I() & self.texts.has_begun_I

    def _early(self, num_own: int) -> np.ndarray:
        """Returns the indices of the early requests that are to run beside the engine's own, the best first."""
        texts = self.texts
        terms = self._terms
        if terms is None:
            candidates = np.flatnonzero(~texts.is_own_I & texts.is_open_I())
            return candidates[: max(self.num_slots - num_own, 0)]
        candidates, worths = self._early_candidates(terms, num_own)
        return candidates[: num_early(_with_branches(terms, num_own), num_own, worths)]

    def _early_candidates(self, terms: EarlyTerms, num_own: int) -> tuple[np.ndarray, list[Worth]]:
        """Returns the indices of early requests that fit beside `num_own` own requests, and their worths, the best first."""
        texts = self.texts
        candidates = np.flatnonzero(~texts.is_own_I & texts.is_open_I())
        free = self.num_slots - num_own
        seems_complete_i = (texts.is_complete_I & texts.is_verifying_I())[candidates]
        k_i = texts.steps_ahead_I[candidates]
        p_i = terms.kept**k_i * np.where(seems_complete_i, 1.0 - terms.kept, 1.0)
        order = np.argsort(-p_i, kind="stable")[: max(int(free / (1.0 + terms.rows_of_branches)), 0)]
        known_i = np.maximum(texts.known_I, texts.done_I)[candidates]
        fields = (p_i, k_i, k_i, known_i)
        return candidates[order], list(map(Worth, *(values_i[order].tolist() for values_i in fields)))

    def _prefill(self, running: np.ndarray) -> None:
        """Computes the prompts of those running requests that are new."""
        new = running[~self.texts.has_begun_I[running]]
        if len(new):
            self.texts.has_begun_I[new] = True
            self._compute(self.texts.work.tokens_to_prefill(new))

    def _compute(self, num_tokens: float) -> None:
        """Lets the time of a prefill of `num_tokens` tokens pass, in which other requests wait."""
        begin_s = self.seconds
        self.seconds += self._speculation.costs.prefill_s(num_tokens)
        if self.seconds > begin_s:
            self.spans.append(Span(begin_s, self.seconds, self.index, 0, 0.0))

    def _advance(self, running: np.ndarray, num_own: int, until_s: float) -> None:
        """Runs until a request ends, until a request has no known tokens left, or until the second `until_s`."""
        texts = self.texts
        work = texts.work
        context = work.prompt_tokens + float(texts.done_I[running].mean())
        is_known_B = texts.is_verifying_I()[running]
        rows_of_branches = 0.0 if self._terms is None else self._terms.rows_of_branches
        num_branches = rows_of_branches * float((~is_known_B[num_own:]).sum())
        step = self._step(is_known_B, work.acceptance_RM[running, 0], num_branches, context)
        until_B = np.where(is_known_B, texts.known_I[running], work.length_R[running])
        left_B = until_B - texts.done_I[running]
        num_steps = float((left_B / step.tokens_B).min())
        middle = context + 0.5 * num_steps * float(step.tokens_B.mean())
        step_s = self._speculation.step_s(step, len(running) + num_branches, middle)
        num_steps = min(num_steps, (until_s - self.seconds) / step_s)
        made_B = np.minimum(num_steps * step.tokens_B, left_B)
        texts.done_I[running] += made_B
        begin_s = self.seconds
        self.seconds += num_steps * step_s
        ended = running[~texts.is_open_I()[running]]
        texts.end_I[ended] = self.seconds
        if num_own:
            own = float(made_B[:num_own].sum())
            self.spans.append(Span(begin_s, self.seconds, self.index, num_own, own, num_steps))
        self.num_early_tokens += float(made_B[num_own:].sum()) + num_steps * num_branches

    def _step(self, is_known_B: np.ndarray, p_B: np.ndarray, num_branches: float, context: float) -> DecodeStep:
        """Returns the engine step with the most tokens per second, among those with the numbers of drafts in `VERIFIED`.

        Requests with known tokens left (`is_known_B`) have these as drafts. The others draft as the `Speculation` decides.
        """
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
        return max(steps, key=lambda s: float(s.tokens_B.sum()) / self._speculation.step_s(s, num_running, context))


def _with_branches(terms: EarlyTerms, num_own: int) -> EarlyPrices:
    """Returns prices in which the cost of an early request includes that of its branches."""
    seconds_R = terms.prices.seconds_R
    num_R = np.arange(len(seconds_R))
    rows_R = num_own + (1.0 + terms.rows_of_branches) * (num_R - num_own)
    return terms.prices._replace(seconds_R=np.interp(np.maximum(rows_R, num_R), num_R, seconds_R))
