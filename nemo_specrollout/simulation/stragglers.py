# SPDX-License-Identifier: Apache-2.0
"""Shows the tail of a rollout to the production policy: what it may know, when it is asked, and the paces that it counts on.

Shapes: R requests under way, M draft methods, U runs, W workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.scheduling.racing.request_speeds import RequestSpeeds
from nemo_specrollout.scheduling.racing.response_lengths import LengthEstimator
from nemo_specrollout.scheduling.racing.straggler_policy import FastestOfN, TailDecision
from nemo_specrollout.scheduling.racing.tail_forecast import TailObservation
from nemo_specrollout.simulation.speculation import Speculation
from nemo_specrollout.simulation.worker import Worker
from nemo_specrollout.simulation.workload import Workload

# The draft length at which acceptances are turned into relative paces.
_TYPICAL_K = 4


@dataclass(frozen=True)
class MethodPaces:
    """The ladder that the policy counts on, by the cost model: typical acceptance, at one context."""

    methods: tuple[Speculation, ...]
    typical_p: tuple[float, ...]
    context: float

    def tokens_per_s(self, method: int, batch: int) -> float:
        """Of each of `batch` typical requests."""
        p_B = np.full(batch, self.typical_p[method])
        return self.methods[method].tokens_per_s(p_B, self.context)

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds in which an engine computes a text of `num_tokens` tokens."""
        return self.methods[0].costs.prefill_s(num_tokens)


class Tail:
    """The production policy and what it remembers. It is asked as a request ends while a worker is dry, once in `every_s`."""

    def __init__(
        self, config: FastestOfNConfig, paces: MethodPaces, estimator: LengthEstimator, every_s: float
    ) -> None:
        self.policy, self.paces, self.estimator = FastestOfN(config, paces), paces, estimator
        self.every_s = every_s
        self._next_s = 0.0

    def ended(self, prompt: int, length: int) -> None:
        """A response is complete."""
        self.estimator.finished(prompt, length)

    def is_due(self, workers: Sequence[Worker], now_s: float) -> bool:
        """Whether to ask, now that a request has ended."""
        return now_s >= self._next_s and any(not worker.load for worker in workers)

    def decide(self, workload: Workload, workers: Sequence[Worker], now_s: float) -> TailDecision:
        """What the policy starts and stops, by the numbers of requests and workers."""
        self._next_s = now_s + self.every_s
        # What waits in a worker has no text yet, and stays.
        requests_R = np.unique(np.concatenate([w.requests_B for w in workers]))
        if not len(requests_R):
            return TailDecision()
        decision = self.policy.decide(self._observation(workload, workers, requests_R, now_s))
        starts, stops = (
            tuple((int(requests_R[r]), w) for r, w in pairs) for pairs in (decision.starts, decision.stops)
        )
        return TailDecision(starts, stops)

    def _observation(
        self, workload: Workload, workers: Sequence[Worker], requests_R: np.ndarray, now_s: float
    ) -> TailObservation:
        request_U = np.searchsorted(requests_R, np.concatenate([w.requests_B for w in workers]))
        worker_U = np.repeat([w.index for w in workers], [len(w.requests_B) for w in workers])
        tokens_U = np.concatenate([w.tokens_at(now_s) for w in workers])
        tokens_R = np.zeros(len(requests_R))
        np.maximum.at(tokens_R, request_U, tokens_U)
        groups = workload.prompt_R[requests_R].tolist()
        remaining_R = self.estimator.remaining(groups, tokens_R.astype(np.int64))
        method_W = np.array([w.method for w in workers])
        speeds = self._speeds(workload.acceptance_RM[requests_R], request_U, method_W[worker_U], tokens_U)
        return TailObservation(
            workload.prompt_tokens + tokens_R.astype(np.int64), remaining_R, speeds.speeds(), speeds.doubts(), request_U,
            worker_U, (tokens_R[request_U] - tokens_U).astype(np.int64), method_W,
            np.array([w.num_slots - len(w.waiting) for w in workers]),
        )  # fmt: skip

    def _speeds(
        self, p_RM: np.ndarray, request_U: np.ndarray, method_U: np.ndarray, tokens_U: np.ndarray
    ) -> RequestSpeeds:
        """What the runs under way have told of their requests' paces."""
        typical_p_M = np.array(self.paces.typical_p)
        speeds = RequestSpeeds(np.ones_like(p_RM))
        for method in range(len(typical_p_M)):
            runs_u = np.flatnonzero(method_U == method)
            relative_u = _tokens(typical_p_M[method]) / _tokens(p_RM[request_U[runs_u], method])
            speeds.observe(request_U[runs_u], method, tokens_U[runs_u], tokens_U[runs_u] * relative_u)
        return speeds


def _tokens(p: np.ndarray) -> np.ndarray:
    """A step's, as `coupled_tokens` has them."""
    return (1.0 - p ** (_TYPICAL_K + 1)) / (1.0 - p)
