# SPDX-License-Identifier: Apache-2.0
"""What a speculation policy forecasts, which are the drafts that a request will have and the sizes of coming batches.

In this file a step is an engine step, and the model is the drafter with weights. Its depth is the number of tokens that it
drafts for each request.

Shapes: F depths of drafting from 0 on, Q bins of survival.
"""

from typing import ClassVar

import numpy as np

from nemo_specrollout.speculation.spread import Spread

WINDOW = 128
"""Number of requests, summed over steps, from which the survival of drafts is estimated."""
FORESEEN = 0.25
"""Weight of a draft that was not made and that the board only foresees, relative to a draft that was made."""
GENERATION = 1024
"""Number of steps from which the sizes of batches are estimated."""


class BatchSizes:
    """Forecasts the sizes that a batch will have until its last request ends.

    Owns a count of steps for each bit length of a batch size, in which old steps fade. It starts with one step for each bit
    length. So until smaller batches were seen, it assumes that a batch takes as long to shrink from 64 to 32 requests as from
    32 to 16, which holds if the lengths of responses are exponentially distributed.
    """

    LEARNED: ClassVar = ("_steps",)

    def __init__(self) -> None:
        self._steps = np.ones(32)

    def is_sound(self) -> bool:
        """Returns whether the content is valid, which it is if all counts are positive."""
        return bool((self._steps > 0.0).all())

    def count(self, num_requests: int) -> None:
        """Counts a step of `num_requests` requests."""
        self._steps *= 1.0 - 1.0 / GENERATION
        self._steps[self._bits(num_requests)] += 1.0

    def until_the_end(self, num_requests: int) -> list[tuple[int, float]]:
        """Returns the sizes that a batch will have until it ends, and the share of its remaining steps at each size."""
        most = self._bits(num_requests)
        share = self._steps[1 : most + 1] / self._steps[1 : most + 1].sum()
        return [(min(num_requests, 3 * 2**i // 2), float(share[i])) for i in range(most)]

    def _bits(self, num_requests: int) -> int:
        """Returns the bit length of a size, capped at the longest one that is counted."""
        return min(num_requests.bit_length(), len(self._steps) - 1)


class Forecast:
    """Forecasts for each depth the yield of a request, which is how many draft tokens it has in each bin of survival.

    Owns means over the latest requests. A step shows the yield only of the depths up to its own, so the yields of two depths
    come from different steps, and the means of these yields could not be compared. Therefore the means that are kept are those
    of the yield of depth 0, and of the change of the yield from each depth to the next within a step. For depths that a step
    did not reach, the board foresees a yield, which counts less than one that was seen (`FORESEEN`).
    """

    LEARNED: ClassVar = ("_change_FQ", "_weight_F")

    def __init__(self, num_positions: int) -> None:
        self._change_FQ: np.ndarray | None = None
        self._weight_F = np.zeros(num_positions + 1)

    def is_sound(self) -> bool:
        """Returns whether the content is valid, which means that no weight is negative, and that weights come with means."""
        return bool((self._weight_F >= 0.0).all()) and (self._change_FQ is not None or not self._weight_F.any())

    def fade(self) -> None:
        """Reduces the weight of what an earlier start has seen to that of a few requests.

        Their number is too small to make the model dormant before this start has seen requests of its own.
        """
        self._weight_F = np.minimum(self._weight_F, 0.25 * WINDOW)

    @property
    def num_seen(self) -> float:
        """Number of requests, summed over steps, from which the yield of depth 1 is known."""
        return float(self._weight_F[1:2].sum())  # 0 if the model may draft nothing

    @property
    def is_well_known(self) -> bool:
        """Whether `num_seen` has reached `WINDOW`, which is its largest value."""
        return self.num_seen >= WINDOW

    def observe(self, spread: Spread) -> None:
        """Learns from the histogram of the latest proposals, up to the largest depth that is forecast."""
        num_depths = len(self._weight_F)
        requests_F = spread.requests_F[:num_depths].astype(np.float64)
        depth = int(np.count_nonzero(requests_F[1:]))
        foreseen = slice(depth + 1, 2 * depth + 2)
        requests_F[foreseen] = requests_F[1:2]
        mean_FQ = spread.tokens_FQ[:num_depths] / np.maximum(requests_F, 1.0)[:, None]
        requests_F[foreseen] *= FORESEEN
        change_FQ = mean_FQ.copy()
        change_FQ[1:] -= mean_FQ[:-1]
        if self._change_FQ is None or self._change_FQ.shape != change_FQ.shape:
            self._change_FQ = np.zeros_like(change_FQ)
            self._weight_F = np.zeros(num_depths)
        self._weight_F = np.minimum(self._weight_F + requests_F, WINDOW)
        share_F = np.divide(requests_F, self._weight_F, out=np.zeros_like(requests_F), where=requests_F > 0)
        self._change_FQ += np.minimum(share_F, 1.0)[:, None] * (change_FQ - self._change_FQ)

    def forget_model(self) -> None:
        """Forgets what the model drafts, which is the yield of all depths above 0."""
        self._weight_F[1:] = 0.0
        if self._change_FQ is not None:
            self._change_FQ[1:] = 0.0

    def counts(self, num_requests: int, num_followed: int) -> np.ndarray:
        """Returns the expected number of draft tokens of a batch by depth and bin of survival, float64 [F, Q].

        The batch has `num_requests`, of which the drafter with weights follows `num_followed`.
        """
        if self._change_FQ is None:
            return np.zeros((len(self._weight_F), 1))
        scale_F = np.full(len(self._weight_F), float(num_followed))
        scale_F[0] = num_requests
        return np.maximum(np.cumsum(scale_F[:, None] * self._change_FQ, axis=0), 0.0)
