# SPDX-License-Identifier: Apache-2.0
"""What a rollout's moves and races have saved, by estimate: who had what before the first of them, and when that would have
ended.

Shapes: R requests, M draft methods, W workers.
"""

from collections.abc import Sequence

import numpy as np

from nemo_specrollout.generation.responses import Response
from nemo_specrollout.scheduling.drain import Held, undisturbed_end_s
from nemo_specrollout.scheduling.fastest_of_n import TailDecision
from nemo_specrollout.scheduling.ladder import Paces


class Savings:
    """Of one rollout. Owns when each worker told last, and what was held before the first move or race."""

    def __init__(self, num_workers: int) -> None:
        self._told_s_W = np.zeros(num_workers)
        self._keys: list[int] = []
        self._held: Held | None = None

    def told(self, worker: int, now_s: float) -> None:
        """The worker has reported."""
        self._told_s_W[worker] = now_s

    def before(self, decision: TailDecision, keys: Sequence[int], responses: Sequence[Response]) -> None:
        """The decision is about to be carried out, over requests `keys`; who waits counts as begun where it is to begin."""
        workers = {key: list(responses[key].runs) for key in keys}
        if self._held is not None or not any(workers[keys[request]] for request, _ in decision.starts):
            return
        begun = {keys[request]: worker for request, worker in decision.starts}
        holders = {**begun, **{key: has[0] for key, has in workers.items() if has}}
        num_tokens_R = np.array([len(responses[key].tokens) for key in holders])
        self._keys = list(holders)
        self._held = Held(np.array(list(holders.values())), num_tokens_R, self._told_s_W.copy())

    def saved_s(
        self, ended_s: float, responses: Sequence[Response], speed_RM: np.ndarray, method_W: np.ndarray, paces: Paces
    ) -> float | None:
        """Seconds by which a rollout that ended at `ended_s` would have ended later; None if nobody moved or raced."""
        if self._held is None:
            return None
        lengths_R = np.array([len(responses[key].tokens) for key in self._keys])
        return undisturbed_end_s(self._held, lengths_R, speed_RM[self._keys], method_W, paces) - ended_s
