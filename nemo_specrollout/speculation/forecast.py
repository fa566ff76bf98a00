# SPDX-License-Identifier: Apache-2.0
"""Forecasts how many draft tokens a request will have, and which sizes the batch will have, for a speculation policy.

In this file a step is an engine step. The drafting depth of a step is the number of tokens that the drafter with weights
drafts for each request.

Shapes: F drafting depths from 0 on, Q bins of survival.
"""

from typing import ClassVar

import numpy as np

from nemo_specrollout.speculation.spread import Spread

WINDOW = 128
"""Number of requests, summed over engine steps, from which the survival of drafts is estimated."""
FORESEEN = 0.25
"""Weight of an assumed draft token, relative to one that was drafted. The draft board assumes tokens beyond the depth to which
the drafter with weights has drafted."""
GENERATION = 1024
"""Number of engine steps from which the sizes of batches are estimated."""


class BatchSizes:
    """Forecasts which sizes a batch will have until its last request ends.

    Owns a count of engine steps for each bit length of a batch size. For example, the sizes 32 to 63 have bit length 6. Old
    steps fade. Every count starts at 1, as if a batch needed as many steps to shrink from 64 to 32 requests as from 32 to 16.
    This is the case if the lengths of responses are exponentially distributed.
    """

    LEARNED: ClassVar = ("_steps",)

    def __init__(self) -> None:
        self._steps = np.ones(32)

    def is_sound(self) -> bool:
        """Returns whether counts that were loaded from a file are valid, which means that all of them are positive."""
        return bool((self._steps > 0.0).all())

    def count(self, num_requests: int) -> None:
        """Counts an engine step of `num_requests` requests."""
        self._steps *= 1.0 - 1.0 / GENERATION
        self._steps[self._bits(num_requests)] += 1.0

    def until_the_end(self, num_requests: int) -> list[tuple[int, float]]:
        """Returns the sizes that a batch of `num_requests` requests will have until it ends, each with a share.

        The share is the part of the batch's remaining engine steps that will have this size.
        """
        most = self._bits(num_requests)
        share = self._steps[1 : most + 1] / self._steps[1 : most + 1].sum()
        return [(min(num_requests, 3 * 2**i // 2), float(share[i])) for i in range(most)]

    def _bits(self, num_requests: int) -> int:
        """Returns the bit length of a batch size, but at most the largest one that has a count."""
        return min(num_requests.bit_length(), len(self._steps) - 1)


class Forecast:
    """Forecasts a request's yield at each drafting depth.

    The yield is the number of the request's draft tokens in each bin of survival.

    Owns means over the latest requests. An engine step that drafts to depth 3 shows the yields of the depths 0 to 3, but not
    those of larger depths. So the mean yields of two depths would come from different steps, and could not be compared.
    Therefore this class keeps the mean yield of depth 0, and for each further depth the mean change of the yield from the
    depth before it. Such a change is always between two yields of the same step. For depths that a step did not reach, the
    draft board provides an assumed yield, which counts less (`FORESEEN`).
    """

    LEARNED: ClassVar = ("_change_FQ", "_weight_F")

    def __init__(self, num_positions: int) -> None:
        self._change_FQ: np.ndarray | None = None
        self._weight_F = np.zeros(num_positions + 1)

    def is_sound(self) -> bool:
        """Returns whether means that were loaded from a file are valid.

        They are valid if no weight is negative, and if there are means in case any weight is above 0.
        """
        return bool((self._weight_F >= 0.0).all()) and (self._change_FQ is not None or not self._weight_F.any())

    def fade(self) -> None:
        """Lowers the weight of what was learned in an earlier start of the run to that of `WINDOW` / 4 requests.

        This weight is too small to make the drafter with weights dormant before it has drafted for requests of this start.
        """
        self._weight_F = np.minimum(self._weight_F, 0.25 * WINDOW)

    @property
    def num_seen(self) -> float:
        """Number of requests, summed over engine steps, for which the drafter with weights has drafted. At most `WINDOW`."""
        return float(self._weight_F[1:2].sum())  # 0 if drafters with weights may draft nothing

    @property
    def is_well_known(self) -> bool:
        """Whether the drafter with weights has drafted for enough requests that its drafts are well known."""
        return self.num_seen >= WINDOW

    def observe(self, spread: Spread) -> None:
        """Learns from the survival histogram of an engine step's drafts, for all drafting depths that are forecast."""
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
        """Forgets the yields of all drafting depths above 0, because these depend on the drafter with weights."""
        self._weight_F[1:] = 0.0
        if self._change_FQ is not None:
            self._change_FQ[1:] = 0.0

    def counts(self, num_requests: int, num_followed: int) -> np.ndarray:
        """Returns the expected number of draft tokens of a batch by drafting depth and bin of survival, float64 [F, Q].

        The batch has `num_requests` requests. The drafter with weights follows `num_followed` of them, and can draft only for
        these.
        """
        if self._change_FQ is None:
            return np.zeros((len(self._weight_F), 1))
        scale_F = np.full(len(self._weight_F), float(num_followed))
        scale_F[0] = num_requests
        return np.maximum(np.cumsum(scale_F[:, None] * self._change_FQ, axis=0), 0.0)
