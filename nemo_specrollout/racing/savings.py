# SPDX-License-Identifier: Apache-2.0
"""Estimate of the seconds that a rollout's moves and races have saved.

The estimate asks when the rollout would have ended if every engine had kept what it had before the first move or race.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_specrollout.racing.decode_speeds import DecodeSpeeds
from nemo_specrollout.racing.responses import Response
from nemo_specrollout.scheduling.racing.straggler_policy import TailDecision
from nemo_specrollout.scheduling.racing.tail_forecast import Assignment, undisturbed_end_s


class Savings:
    """Savings of requests that began together.

    Owns the time of each engine's latest result, and the distribution of requests before the first move or race.
    """

    def __init__(self, num_engines: int, now_s: float) -> None:
        self.keys: list[int] = []
        """Requests under way just before the first move or race."""
        self._heard_s_W = np.full(num_engines, now_s)
        self._before: Assignment | None = None
        self._gave_up = False

    def heard_from(self, engine: int, now_s: float) -> None:
        """Notes that the engine has handed in a result at `now_s`."""
        self._heard_s_W[engine] = now_s

    def give_up(self) -> None:
        """Gives up the estimate: after a death or new weights, nothing remains to compare with."""
        self._gave_up = True

    def more_requests(self) -> None:
        """Gives up the estimate if requests are added after the first move or race."""
        self._gave_up = self._gave_up or self._before is not None

    def before(self, decision: TailDecision, keys: Sequence[int], responses: Mapping[int, Response]) -> None:
        """Notes which engine has which request, just before the first decision that moves or races one.

        `keys` are the requests that the decision numbers. A waiting request counts for the engine where it will begin.
        """
        engines = {key: list(responses[key].attempts) for key in keys}
        if self._before is not None or not any(engines[keys[request]] for request, _ in decision.starts):
            return
        begun = {keys[request]: engine for request, engine in decision.starts}
        holders = {**begun, **{key: has[0] for key, has in engines.items() if has}}
        num_tokens_R = np.array([len(responses[key].tokens) for key in holders])
        self.keys = list(holders)
        self._before = Assignment(np.array(list(holders.values())), num_tokens_R, self._heard_s_W.copy())

    def saved_s(
        self, ended_s: float, responses: Mapping[int, Response], speeds: DecodeSpeeds, methods: Sequence[int]
    ) -> float | None:
        """Returns by how many seconds a rollout that ended at `ended_s` would have ended later.

        None if no request moved or raced, or if nothing remains to compare with. `methods` is the draft method by engine.
        """
        if self._before is None or self._gave_up:
            return None
        lengths_R = np.array([len(responses[key].tokens) for key in self.keys])
        speed_RM, method_W = speeds.of(self.keys), np.array(methods)
        return undisturbed_end_s(self._before, lengths_R, speed_RM, method_W, speeds.ladder) - ended_s
