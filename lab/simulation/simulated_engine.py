# SPDX-License-Identifier: Apache-2.0
"""A simulated engine, and the production tail policy that observes such engines.

Between two events, all requests of an engine advance at constant decode speed.

Shapes: B requests of an engine, R running requests, M draft methods, A attempts, E engines.
"""

from collections import deque
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from lab.simulation.speculation import DecodeStep, Speculation
from lab.simulation.workload import Workload
from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.stragglers.decisions.idle_time import NO_EARLY_WORK, EarlyWorth, IdleTime
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator, RequestSpeeds
from nemo_specrollout.stragglers.decisions.speed_table import SpeedModel
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN, TailDecision
from nemo_specrollout.stragglers.decisions.straggler_policy import TailPolicy as RealTailPolicy
from nemo_specrollout.stragglers.decisions.tail_forecast import TailObservation

_CLOSE = 1e-6
"""Number of missing tokens at which a request counts as ended, because sums over many engine steps are inexact."""
_NO_STEP = DecodeStep(np.ones(0), 0.0)


@dataclass(frozen=True)
class Span:
    """Work of an engine between two seconds, on the same requests. `num_requests` is 0 for a prefill."""

    begin_s: float
    end_s: float
    engine: int
    num_requests: int
    num_tokens: float
    num_steps: float = 0.0


class SimulatedEngine:
    """A simulated engine. Owns its running requests with their progress, and the requests that wait for a slot.

    Before its requests change, call `advance` with the second of the change, and after all changes call `plan`.

    Invariant: a request is in `requests_B` at most once, and its tokens never exceed its length.
    """

    def __init__(self, index: int, speculation: Speculation, method: int, num_slots: int) -> None:
        self.index = index
        self.speculation = speculation
        self.method = method
        self.num_slots = num_slots
        self.waiting: deque[int] = deque()
        self.requests_B = np.zeros(0, np.int64)
        self.tokens_B = np.zeros(0)
        self.lengths_B = np.zeros(0)
        self.p_B = np.zeros(0)
        self.spans: list[Span] = []
        self.after_idle: tuple[Speculation, int] | None = None
        """Way to draft and method to which the engine changes when it has been idle, or None if it keeps its own."""
        self._step = _NO_STEP
        self._num_steps = 0.0
        self.begin_s = self.end_s = 0.0
        self.plan_number = 0
        """Number of plans so far. An event that was computed by an earlier plan is outdated."""

    @property
    def load(self) -> int:
        """Number of requests, including waiting ones."""
        return len(self.requests_B) + len(self.waiting)

    @property
    def known_B(self) -> np.ndarray:
        """Number of tokens that were made early for each request, which is always 0."""
        return np.zeros(len(self.requests_B))

    def early_worth(self) -> EarlyWorth:
        """Returns a worth of 0, because this engine decodes no early requests."""
        return EarlyWorth()

    def tokens_at(self, now_s: float) -> np.ndarray:
        """Returns how many tokens each request has at the second `now_s`, float64 [B].

        `now_s` must be within the current plan.
        """
        done_B = self.tokens_B + self._step.tokens_B * self._num_steps * self._share(now_s)
        return np.minimum(done_B, self.lengths_B)

    def advance(self, now_s: float) -> None:
        """Advances all requests to the second `now_s`, which must be within the current plan."""
        if now_s <= self.begin_s or not len(self.requests_B):
            return
        before = self.tokens_B
        share = self._share(now_s)
        self.tokens_B = self.tokens_at(now_s)
        num_tokens = float((self.tokens_B - before).sum())
        num_steps = self._num_steps * share
        self.spans.append(Span(self.begin_s, now_s, self.index, len(self.requests_B), num_tokens, num_steps))
        self._num_steps *= 1.0 - share
        self.begin_s = now_s

    def plan(self, now_s: float, prompt_tokens: int) -> float:
        """Plans the engine steps from now on.

        Returns the second at which the next request ends, or infinity without requests.
        """
        self.plan_number += 1
        self.begin_s = max(self.begin_s, now_s)
        if not len(self.requests_B):
            self._step = _NO_STEP
            self.end_s = np.inf
            return self.end_s
        context = prompt_tokens + float(self.tokens_B.mean())
        self._step = self.speculation.decode_step(self.p_B, context)
        self._num_steps = max(float(((self.lengths_B - self.tokens_B) / self._step.tokens_B).min()), 0.0)
        # Costs are nearly linear in the context, so the middle represents all steps.
        middle = context + 0.5 * self._num_steps * float(self._step.tokens_B.mean())
        self.end_s = self.begin_s + self._num_steps * self.speculation.step_s(self._step, len(self.requests_B), middle)
        return self.end_s

    def prefill(self, now_s: float, num_tokens: float) -> None:
        """Lets the engine first do a prefill of `num_tokens` tokens, in which other requests wait."""
        begin_s = max(self.begin_s, now_s)
        self.begin_s = begin_s + self.speculation.costs.prefill_s(num_tokens)
        if self.begin_s > begin_s:
            self.spans.append(Span(begin_s, self.begin_s, self.index, 0, 0.0))

    def take(
        self,
        requests_b: np.ndarray,
        tokens_b: np.ndarray,
        lengths_b: np.ndarray,
        p_b: np.ndarray,
    ) -> None:
        """Adds requests, with the tokens that they already have, their lengths, and their acceptances."""
        self.requests_B = np.concatenate([self.requests_B, requests_b])
        self.tokens_B = np.concatenate([self.tokens_B, tokens_b])
        self.lengths_B = np.concatenate([self.lengths_B, lengths_b])
        self.p_B = np.concatenate([self.p_B, p_b])

    def became_idle(self) -> None:
        """Lets the engine draft as `after_idle` says from now on. Does nothing if `after_idle` is None."""
        if self.after_idle is not None:
            (self.speculation, self.method) = self.after_idle
            self.after_idle = None

    def ended(self) -> np.ndarray:
        """Returns the indices in the `Workload` of the requests that have all their tokens, int64."""
        return self.requests_B[self.tokens_B >= self.lengths_B - _CLOSE]

    def drop(self, requests_b: np.ndarray) -> float:
        """Removes requests from the engine. Returns the sum of their tokens."""
        stays_B = (self.requests_B[:, None] != requests_b).all(axis=1)
        num_tokens = float(self.tokens_B[~stays_B].sum())
        self.requests_B = self.requests_B[stays_B]
        self.tokens_B = self.tokens_B[stays_B]
        self.lengths_B = self.lengths_B[stays_B]
        self.p_B = self.p_B[stays_B]
        return num_tokens

    def _share(self, now_s: float) -> float:
        if now_s >= self.end_s or self.end_s <= self.begin_s:
            return 1.0
        return max(now_s - self.begin_s, 0.0) / (self.end_s - self.begin_s)


class TailEngine(Protocol):
    """Interface of an engine, as a tail policy sees it."""

    index: int
    num_slots: int
    method: int

    @property
    def load(self) -> int:
        """Number of requests, including waiting ones."""

    @property
    def requests_B(self) -> np.ndarray:
        """Indices of the running requests in the `Workload`, int64 [B]."""

    @property
    def known_B(self) -> np.ndarray:
        """Number of tokens that were made early for each running request (`run_ahead`), float64."""

    @property
    def waiting(self) -> Sized:
        """Indices in the `Workload` of the requests that wait for a slot."""

    def tokens_at(self, now_s: float) -> np.ndarray:
        """Returns the number of tokens of each running request, float64 [B]."""

    def early_worth(self) -> EarlyWorth:
        """Returns the current worth of the engine's early work."""


class BlindToEarlyWork:
    """A tail policy that ignores the worth of idle engines' time, to show the benefit of counting it."""

    def __init__(self, policy: RealTailPolicy) -> None:
        self._policy = policy

    def decide(self, seen: TailObservation) -> TailDecision:
        return self._policy.decide(replace(seen, idle=NO_EARLY_WORK))


_TYPICAL_K = 4
"""Number of drafts for which acceptances are converted to relative speeds."""


class TypicalSpeeds(SpeedModel, Protocol):
    """A speed model that also knows the acceptance of the typical request with each draft method."""

    @property
    def typical_p(self) -> tuple[float, ...]:
        """Probability that a draft token of the typical request is right, by draft method."""


@dataclass(frozen=True)
class SimulatedSpeeds:
    """Speed model for the tail policy, computed from the cost model for typical requests of one context length."""

    methods: tuple[Speculation, ...]
    typical_p: tuple[float, ...]
    context: float

    def tokens_per_s(self, method: int, batch: int) -> float:
        """Returns the tokens per second of each of `batch` typical requests."""
        p_B = np.full(batch, self.typical_p[method])
        return self.methods[method].tokens_per_s(p_B, self.context)

    def prefill_s(self, num_tokens: int) -> float:
        """Returns the seconds of a prefill of `num_tokens` tokens."""
        return self.methods[0].costs.prefill_s(num_tokens)


class TailPolicy:
    """Applies the production tail policy to simulated engines. Owns this policy and its length estimates.

    The policy is asked when a request ends while an engine is idle, at most once in `every_s` seconds.
    """

    def __init__(
        self,
        config: FastestOfNConfig,
        speeds: TypicalSpeeds,
        estimator: LengthEstimator,
        every_s: float,
        *,
        is_blind: bool = False,
    ) -> None:
        """Makes a tail policy that has not been asked yet.

        With `is_blind`, it does not count the early requests that have to give way to a request that moves.
        """
        policy = FastestOfN(config, speeds)
        self.policy: RealTailPolicy = BlindToEarlyWork(policy) if is_blind else policy
        self.speeds = speeds
        self.estimator = estimator
        self.every_s = every_s
        self._next_s = 0.0

    def is_due(self, engines: Sequence[TailEngine], now_s: float) -> bool:
        """Returns whether the tail policy is to be asked, now that a request has ended."""
        return now_s >= self._next_s and any(not engine.load for engine in engines)

    def decide(self, workload: Workload, engines: Sequence[TailEngine], now_s: float) -> TailDecision:
        """Returns the tail policy's decision, in which a request is named by its index in `workload`."""
        self._next_s = now_s + self.every_s
        # Requests that wait in an engine have no text yet, and stay there.
        requests_R = np.unique(np.concatenate([e.requests_B for e in engines]))
        if not len(requests_R):
            return TailDecision()
        decision = self.policy.decide(self._observation(workload, engines, requests_R, now_s))
        starts, stops = (
            tuple((int(requests_R[r]), e) for r, e in pairs) for pairs in (decision.starts, decision.stops)
        )
        return TailDecision(starts, stops, decision.num_declined)

    def _observation(
        self, workload: Workload, engines: Sequence[TailEngine], requests_R: np.ndarray, now_s: float
    ) -> TailObservation:
        request_A = np.searchsorted(requests_R, np.concatenate([e.requests_B for e in engines]))
        engine_A = np.repeat([e.index for e in engines], [len(e.requests_B) for e in engines])
        tokens_A = np.concatenate([e.tokens_at(now_s) for e in engines])
        tokens_R = np.zeros(len(requests_R))
        np.maximum.at(tokens_R, request_A, tokens_A)
        groups = workload.prompt_R[requests_R].tolist()
        known_R = np.zeros(len(requests_R))
        np.maximum.at(known_R, request_A, np.concatenate([e.known_B for e in engines]))
        remaining_R = self.estimator.remaining(groups, tokens_R.astype(np.int64), known_R.astype(np.int64))
        method_E = np.array([e.method for e in engines])
        speeds = self._speeds(workload.acceptance_RM[requests_R], request_A, method_E[engine_A], tokens_A)
        return TailObservation(
            workload.prompt_tokens + tokens_R.astype(np.int64),
            remaining_R,
            speeds.speeds(),
            speeds.doubts(),
            request_A,
            engine_A,
            (tokens_R[request_A] - tokens_A).astype(np.int64),
            method_E,
            np.array([e.num_slots - len(e.waiting) for e in engines]),
            idle=IdleTime(tuple(e.early_worth() for e in engines)),
        )

    def _speeds(
        self, p_RM: np.ndarray, request_A: np.ndarray, method_A: np.ndarray, tokens_A: np.ndarray
    ) -> RequestSpeeds:
        """Returns estimates of each request's decode speed, from the tokens that running attempts have made."""
        typical_p_M = np.array(self.speeds.typical_p)
        speeds = RequestSpeeds(np.ones_like(p_RM))
        for method in range(len(typical_p_M)):
            attempts_a = np.flatnonzero(method_A == method)
            relative_a = _tokens(typical_p_M[method]) / _tokens(p_RM[request_A[attempts_a], method])
            speeds.observe(request_A[attempts_a], method, tokens_A[attempts_a], tokens_A[attempts_a] * relative_a)
        return speeds


def _tokens(p: np.ndarray) -> np.ndarray:
    """Returns the expected tokens of a request in an engine step with `_TYPICAL_K` drafts.

    Each draft is right with probability `p` if those before it are.
    """
    return (1.0 - p ** (_TYPICAL_K + 1)) / (1.0 - p)
