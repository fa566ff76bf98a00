# SPDX-License-Identifier: Apache-2.0
"""What a rollout's moves and races have saved, by estimate: who had what before the first of them, and when that would have
ended.

Shapes: R requests under way then, M draft methods, W workers.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_specrollout.racing.responses import Response
from nemo_specrollout.scheduling.racing.draft_ladder import Paces
from nemo_specrollout.scheduling.racing.drain import Held, undisturbed_end_s
from nemo_specrollout.scheduling.racing.straggler_policy import TailDecision


class Savings:
    """Of requests that began together. Owns when each worker told last, and what was held before the first move or race."""

    def __init__(self, num_workers: int, now_s: float) -> None:
        self.keys: list[int] = []
        """The requests that were held then."""
        self._told_s_W = np.full(num_workers, now_s)
        self._held: Held | None = None
        self._gave_up = False

    def told(self, worker: int, now_s: float) -> None:
        """The worker has reported."""
        self._told_s_W[worker] = now_s

    def give_up(self) -> None:
        """Something happened after which there is nothing to compare with: a death, new weights."""
        self._gave_up = True

    def more(self) -> None:
        """More requests are under way: there is nothing to compare with, unless no request has moved or raced yet."""
        self._gave_up = self._gave_up or self._held is not None

    def before(self, decision: TailDecision, keys: Sequence[int], responses: Mapping[int, Response]) -> None:
        """The decision is about to be carried out, over requests `keys`; who waits counts as begun where it is to begin."""
        workers = {key: list(responses[key].runs) for key in keys}
        if self._held is not None or not any(workers[keys[request]] for request, _ in decision.starts):
            return
        begun = {keys[request]: worker for request, worker in decision.starts}
        holders = {**begun, **{key: has[0] for key, has in workers.items() if has}}
        num_tokens_R = np.array([len(responses[key].tokens) for key in holders])
        self.keys = list(holders)
        self._held = Held(np.array(list(holders.values())), num_tokens_R, self._told_s_W.copy())

    @property
    def is_known(self) -> bool:
        """Whether anybody moved or raced, and there is something to compare with."""
        return self._held is not None and not self._gave_up

    def saved_s(
        self,
        ended_s: float,
        responses: Mapping[int, Response],
        speed_RM: np.ndarray,
        method_W: np.ndarray,
        paces: Paces,
    ) -> float:
        """Seconds by which what ended at `ended_s` would have ended later, if that is known. `speed_RM`: of `keys`."""
        assert self._held is not None
        lengths_R = np.array([len(responses[key].tokens) for key in self.keys])
        return undisturbed_end_s(self._held, lengths_R, speed_RM, method_W, paces) - ended_s
