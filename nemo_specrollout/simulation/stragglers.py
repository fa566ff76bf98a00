# SPDX-License-Identifier: Apache-2.0
"""Connects a simulated rollout to the production straggler policy.

Shapes: R requests under way, M draft methods, A attempts, E engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.scheduling.racing.request_speeds import RequestSpeeds
from nemo_specrollout.scheduling.racing.response_lengths import LengthEstimator
from nemo_specrollout.scheduling.racing.straggler_policy import FastestOfN, TailDecision
from nemo_specrollout.scheduling.racing.tail_forecast import TailObservation
from nemo_specrollout.simulation.simulated_engine import SimulatedEngine
from nemo_specrollout.simulation.speculation import Speculation
from nemo_specrollout.simulation.workload import Workload

_TYPICAL_K = 4
"""Draft length at which acceptances are converted to relative speeds."""


@dataclass(frozen=True)
class SimulatedSpeeds:
    """Speed model for the policy, from the cost model at typical acceptance and one context length."""

    methods: tuple[Speculation, ...]
    typical_p: tuple[float, ...]
    context: float

    def tokens_per_s(self, method: int, batch: int) -> float:
        """Returns the tokens a second of each of `batch` typical requests."""
        p_B = np.full(batch, self.typical_p[method])
        return self.methods[method].tokens_per_s(p_B, self.context)

    def prefill_s(self, num_tokens: int) -> float:
        """Returns the seconds of a prefill of `num_tokens` tokens."""
        return self.methods[0].costs.prefill_s(num_tokens)


class TailPolicy:
    """The production policy and its length estimates. Owns both.

    The policy is asked when a request ends while an engine is idle, at most once in `every_s` seconds.
    """

    def __init__(
        self, config: FastestOfNConfig, speeds: SimulatedSpeeds, estimator: LengthEstimator, every_s: float
    ) -> None:
        self.policy, self.speeds, self.estimator = FastestOfN(config, speeds), speeds, estimator
        self.every_s = every_s
        self._next_s = 0.0

    def ended(self, prompt: int, length: int) -> None:
        """Adds a complete response to the length estimates."""
        self.estimator.finished(prompt, length)

    def is_due(self, engines: Sequence[SimulatedEngine], now_s: float) -> bool:
        """Returns whether to ask the policy now that a request has ended."""
        return now_s >= self._next_s and any(not engine.load for engine in engines)

    def decide(self, workload: Workload, engines: Sequence[SimulatedEngine], now_s: float) -> TailDecision:
        """Returns the policy's decision, by the numbers of requests and engines."""
        self._next_s = now_s + self.every_s
        # Requests that wait in an engine have no text yet, and stay there.
        requests_R = np.unique(np.concatenate([e.requests_B for e in engines]))
        if not len(requests_R):
            return TailDecision()
        decision = self.policy.decide(self._observation(workload, engines, requests_R, now_s))
        starts, stops = (
            tuple((int(requests_R[r]), e) for r, e in pairs) for pairs in (decision.starts, decision.stops)
        )
        return TailDecision(starts, stops)

    def _observation(
        self, workload: Workload, engines: Sequence[SimulatedEngine], requests_R: np.ndarray, now_s: float
    ) -> TailObservation:
        request_A = np.searchsorted(requests_R, np.concatenate([e.requests_B for e in engines]))
        engine_A = np.repeat([e.index for e in engines], [len(e.requests_B) for e in engines])
        tokens_A = np.concatenate([e.tokens_at(now_s) for e in engines])
        tokens_R = np.zeros(len(requests_R))
        np.maximum.at(tokens_R, request_A, tokens_A)
        groups = workload.prompt_R[requests_R].tolist()
        remaining_R = self.estimator.remaining(groups, tokens_R.astype(np.int64))
        method_E = np.array([e.method for e in engines])
        speeds = self._speeds(workload.acceptance_RM[requests_R], request_A, method_E[engine_A], tokens_A)
        return TailObservation(
            workload.prompt_tokens + tokens_R.astype(np.int64), remaining_R, speeds.speeds(), speeds.doubts(), request_A,
            engine_A, (tokens_R[request_A] - tokens_A).astype(np.int64), method_E,
            np.array([e.num_slots - len(e.waiting) for e in engines]),
        )  # fmt: skip

    def _speeds(
        self, p_RM: np.ndarray, request_A: np.ndarray, method_A: np.ndarray, tokens_A: np.ndarray
    ) -> RequestSpeeds:
        """Returns the request speeds that follow from the attempts under way."""
        typical_p_M = np.array(self.speeds.typical_p)
        speeds = RequestSpeeds(np.ones_like(p_RM))
        for method in range(len(typical_p_M)):
            attempts_a = np.flatnonzero(method_A == method)
            relative_a = _tokens(typical_p_M[method]) / _tokens(p_RM[request_A[attempts_a], method])
            speeds.observe(request_A[attempts_a], method, tokens_A[attempts_a], tokens_A[attempts_a] * relative_a)
        return speeds


def _tokens(p: np.ndarray) -> np.ndarray:
    """Returns the tokens of a step, as `coupled_tokens` does."""
    return (1.0 - p ** (_TYPICAL_K + 1)) / (1.0 - p)
