# SPDX-License-Identifier: Apache-2.0
"""Moves stragglers of a simulated step to idle engines, which otherwise decode early requests of coming steps.

While an engine has no requests of the step left, the tail policy is asked at regular intervals. In between, engines continue
with what they have. An engine without requests of the step decodes early requests. When it takes over a straggler, it
continues with as many early requests as pay beside the straggler (`run_ahead/decisions/early_share.py`).
"""

from collections.abc import Sequence

import numpy as np

from lab.simulation.rolling_engine import RollingEngine
from lab.simulation.simulated_engine import TailPolicy
from lab.simulation.workload import Workload
from nemo_specrollout.stragglers.decisions.straggler_policy import TailDecision


class RollingTail:
    """Moves requests between rolling engines, as a tail policy decides.

    Owns the tail policy and what it knows of the requests. All engines draft alike, so requests move, but engines never race
    for them.
    """

    def __init__(self, policy: TailPolicy, requests: Workload) -> None:
        """Begins without any move. `requests` are the requests of all steps."""
        self._policy = policy
        self._requests = requests
        self._is_known_R = np.zeros(len(requests.length_R), bool)
        self.num_moves = 0
        """Number of requests that moved, over all steps."""

    def roll_out(self, engines: Sequence[RollingEngine]) -> None:
        """Runs the engines until all of their own requests have ended."""
        until_s = 0.0
        while not all(engine.is_done for engine in engines):
            until_s += self._policy.every_s
            for engine in engines:
                engine.run(until_s, only_own=True)
            self._learn(engines)
            if all(engine.is_done for engine in engines):
                break
            for engine in engines:
                engine.run(until_s)
            if any(engine.is_done for engine in engines):
                self._carry_out(engines, self._decide(engines, until_s))

    def _decide(self, engines: Sequence[RollingEngine], now_s: float) -> TailDecision:
        """Returns which requests move. A move must be worth more than the early requests that it displaces."""
        return self._policy.decide(self._requests, engines, now_s)

    def _carry_out(self, engines: Sequence[RollingEngine], decision: TailDecision) -> None:
        source_of = dict(decision.stops)
        for request, target in decision.starts:
            engines[target].take(engines[source_of[request]].give(request))
            self.num_moves += 1

    def _learn(self, engines: Sequence[RollingEngine]) -> None:
        """Tells the tail policy's length estimator how long the requests are that have ended since the last call."""
        for engine in engines:
            texts = engine.texts
            for request in texts.numbers_I[texts.is_own_I & ~texts.is_open_I()].tolist():
                if not self._is_known_R[request]:
                    self._is_known_R[request] = True
                    work = self._requests
                    self._policy.estimator.finished(int(work.prompt_R[request]), int(work.length_R[request]))
