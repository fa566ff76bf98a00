# SPDX-License-Identifier: Apache-2.0
"""The coordinator of a local run, which distributes requests among engines, restarts dead engines and gives them new weights.

Shapes: R requests, E engines.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from lab.local.timeline import Timeline
from lab.simulation.dealing import in_shards, longest_first
from nemo_specrollout.generation.engine.requests import Rollout
from nemo_specrollout.stragglers.attempts import Response
from nemo_specrollout.stragglers.coordinator import Coordinator
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK, DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.straggler_policy import TailDecision, TailPolicy
from nemo_specrollout.stragglers.decisions.tail_forecast import TailObservation
from nemo_specrollout.stragglers.turns import EngineFleet, Request


class LocalFleet(EngineFleet, Protocol):
    """Interface through which the coordinator of a local run uses its engines."""

    def revive(self) -> None:
        """Begins to restart dead engines with the current weights, without waiting.

        Raises RuntimeError if no engine is left.
        """

    def load_weights(self, tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Gives every engine new weights, which it loads after the turns that are already queued for it."""


class Stay:
    """A tail policy under which no request ever moves to another engine, and no two engines race for a request."""

    def decide(self, seen: TailObservation) -> TailDecision:
        return TailDecision()


class DealingCoordinator(Coordinator):
    """Coordinator of a local run's engines. Without a tail policy, a request stays in its engine unless that engine dies."""

    engines: LocalFleet

    def __init__(
        self,
        engines: LocalFleet,
        policy: TailPolicy | None,
        ladder: DecodeSpeedTable,
        lengths: LengthEstimator,
        *,
        begins_again: bool = False,
        deals_shards: bool | None = None,
    ) -> None:
        """Makes a coordinator for `engines`. `policy` is its tail policy, or None for no moves and races.

        With `begins_again`, running requests start over when new weights are loaded, and their texts so far become drafts
        (`run_ahead`). With `deals_shards`, each engine gets an equal share of the requests in their order, as in NeMo-RL.
        Otherwise requests are distributed by their expected lengths. If `deals_shards` is None, it is true without a tail
        policy and false with one.
        """
        super().__init__(engines, policy or Stay(), ladder, lengths)
        self._stays = policy is None
        self._deals_shards = self._stays if deals_shards is None else deals_shards
        self._begins_again = begins_again

    def roll_out(
        self,
        requests: Sequence[Request],
        on_finished: Callable[[int], None] = lambda done: None,
        task: str = ANY_TASK,
    ) -> tuple[list[Rollout], Timeline]:
        """Decodes `requests`, and returns their responses in the same order with the timeline of the rollout.

        Calls `on_finished` with the number of finished responses. If the call is interrupted, all of its requests are
        abandoned.
        """
        keys = self.deal(requests, task)
        try:
            num_done = 0
            while num_done < len(keys):
                num_done += len(self.advance())
                on_finished(num_done)
        except BaseException:
            self.abandon()
            raise
        responses, timeline = self.take_with_timeline(keys)
        return [r.rollout for r in responses], timeline

    def take_with_timeline(self, keys: Sequence[int]) -> tuple[list[Response], Timeline]:
        """Returns responses that have ended, with their timeline, and removes them from the coordinator.

        `keys` come from `deal`.
        """
        responses, saved_s = self.take(keys)
        methods = tuple(self._speeds.table.methods[m] for m in self.engines.methods)
        return responses, Timeline.of(responses, methods, saved_s)

    def deal(self, requests: Sequence[Request], task: str = ANY_TASK) -> list[int]:
        """Distributes requests among the engines and starts them. Returns a key for each request, for `take_with_timeline`."""
        self.engines.revive()
        keys = self._begin(requests, task)
        self._deal_out(keys)
        return keys

    def load_weights(self, tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Gives all engines new weights, even while requests are running."""
        self.decide_races()
        if self._begins_again:
            self.begin_again()
        self.engines.load_weights(tensors, policy_version)

    def _lose(self, engine: int) -> None:
        super()._lose(engine)
        self.engines.revive()

    def _consult_policy(self) -> None:
        if self._stays:
            self._deal_out(self._waiting())
        else:
            super()._consult_policy()

    def _deal_out(self, keys: Sequence[int]) -> None:
        """Starts requests in live engines, distributed in equal shards or by their expected lengths."""
        is_alive_E = self._is_alive_E()
        if not keys or not is_alive_E.any():
            return
        responses = [self.responses[key] for key in keys]
        expected_R = self._remaining(responses)
        if self._deals_shards:
            alive = np.flatnonzero(is_alive_E)
            engine_R = alive[in_shards(len(keys), len(alive))]
        else:
            loads_E = np.where(is_alive_E, self._loads_E(), np.inf)
            engine_R = longest_first([r.request.prompt_index for r in responses], expected_R, loads_E)
        for i in np.argsort(-expected_R, kind="stable").tolist():
            self._start(keys[i], int(engine_R[i]))

    def _loads_E(self) -> np.ndarray:
        """Returns how many tokens each engine is expected to decode for its running requests, float64 [E]."""
        responses: list[Response] = [self.responses[key] for key in self._active]
        loads_E = np.zeros(len(self._assigned))
        for response, tokens in zip(responses, self._remaining(responses).tolist(), strict=True):
            loads_E[list(response.attempts)] += tokens
        return loads_E
