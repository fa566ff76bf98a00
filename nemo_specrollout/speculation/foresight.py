# SPDX-License-Identifier: Apache-2.0
"""Predicts the survival of a step's drafts, for a host that knows only the acceptance rates of the step before.

A step is an engine step here, and the rate of a draft is the probability that it is accepted if all before it are.

Shapes: B requests of a step, K draft positions, S request slots.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar, NamedTuple

import numpy as np

from nemo_specrollout.speculation.decision import survival_of

MEMORY = 0.98
"""Factor by which each step reduces the weight of what was learned before."""
PRIOR_REQUESTS = 4.0
"""Weight of earlier knowledge about first drafts. It counts as much as the first drafts of this many requests."""


class Kind(IntEnum):
    """What is known about a request's drafts."""

    KNOWN = 0
    """The rates of its drafts in the step before are known."""
    SILENT = 1
    """It has no drafts."""
    NEW = 2
    """Nothing is known yet."""
    NEW_WITH_TEXT = 3
    """Nothing is known yet, but the request brings a text made ahead, which is probably right."""


class _Foretold(NamedTuple):
    """Requests of a step whose drafts were predicted."""

    slots_B: np.ndarray
    kind_B: np.ndarray
    apart_BK: np.ndarray
    """Survival in the step before, minus its mean over the requests."""


class Foresight:
    """Predicts the survival of drafts from rates that are one step old.

    A host that does not wait for the device must decide how many drafts a step has when it knows only the drafts of the step
    before. A request that had good drafts in that step probably has good ones again, but they are not as much better than
    those of the others. So the survival is shrunk towards the mean of the batch, by a share that is learned from earlier
    steps. A new request has no rates at all. Its drafts are predicted from those of other new requests, separately for
    requests that bring a text.

    Owns the kind of each request, and what was learned. It reads no clock and adds in a fixed order, so that all ranks that
    get the same rates make the same predictions.
    """

    LEARNED: ClassVar = ("_first", "_together", "_before")

    def __init__(self, num_slots: int, num_positions: int, text_rate: float) -> None:
        """`text_rate` is the assumed rate of drafts from a text that a request brings, before any such text was seen."""
        self._kind_S = np.full(num_slots, Kind.NEW, np.int8)
        self._first = {kind: np.zeros(num_positions, np.float32) for kind in (Kind.NEW, Kind.NEW_WITH_TEXT)}
        """Survival of the first drafts of a new request by its kind, [K]."""
        self._first[Kind.NEW_WITH_TEXT][:] = np.cumprod(np.full(num_positions, text_rate))
        self._together = 1.0
        """Sum of the products of requests' distances from the mean in two consecutive steps."""
        self._before = 1.0
        """Sum of the squares of these distances in the first of the two steps."""
        self._foretold: _Foretold | None = None

    def is_sound(self) -> bool:
        """Returns whether the content is valid, with survivals that are probabilities and a positive sum of squares."""
        return self._before > 0.0 and all(bool(((s >= 0.0) & (s <= 1.0)).all()) for s in self._first.values())

    @property
    def persistence(self) -> float:
        """Share of a request's distance from the mean that remains one step later, between 0 and 1."""
        return min(max(self._together / self._before, 0.0), 1.0)

    def opened(self, slots: Sequence[int], kinds: Sequence[Kind]) -> None:
        """Notes that new requests have come into these slots. `kinds` has the kind of each."""
        self._kind_S[list(slots)] = kinds

    def survival(self, rates_SK: np.ndarray, slots_B: np.ndarray) -> np.ndarray:
        """Returns the predicted survival of the drafts of a step's requests, float32 [B, K].

        `rates_SK` has the rates of the step before, by slot, and `slots_B` the slot of each request of this step. Call this
        once in each step with drafts. K may be less than the number of positions, and may differ between steps.
        """
        known_BK = survival_of(rates_SK[slots_B])
        self._learn(rates_SK, slots_B, known_BK)
        kind_B = self._kind_S[slots_B]
        is_known_B = kind_B == Kind.KNOWN
        if is_known_B.all():
            mean_K = known_BK.mean(axis=0)
            apart_BK = known_BK - mean_K
        else:
            mean_K = known_BK[is_known_B].sum(axis=0) / max(int(is_known_B.sum()), 1)
            apart_BK = (known_BK - mean_K) * is_known_B[:, None]
        foretold_BK = np.float32(self.persistence) * apart_BK
        foretold_BK += mean_K
        if not is_known_B.all():
            foretold_BK[kind_B == Kind.SILENT] = 0.0
            for kind, first_K in self._first.items():
                foretold_BK[kind_B == kind] = first_K[: known_BK.shape[1]]
            self._kind_S[slots_B[kind_B > Kind.SILENT]] = Kind.KNOWN
        self._foretold = _Foretold(slots_B, kind_B, apart_BK)
        return foretold_BK

    def _learn(self, rates_SK: np.ndarray, slots_B: np.ndarray, known_BK: np.ndarray) -> None:
        """Learns from the drafts of the step before, which are known now."""
        before = self._foretold
        if before is None:
            return
        is_same = len(before.slots_B) == len(slots_B) and bool((before.slots_B == slots_B).all())
        came_BK = known_BK if is_same else survival_of(rates_SK[before.slots_B])
        num_both = min(came_BK.shape[1], before.apart_BK.shape[1])
        came_BK = came_BK[:, :num_both]
        apart_BK = before.apart_BK[:, :num_both]
        together = np.einsum("bk,bk->k", apart_BK, came_BK)
        squares = np.einsum("bk,bk->k", apart_BK, apart_BK)
        self._together = MEMORY * self._together + sum(together.tolist())
        self._before = MEMORY * self._before + sum(squares.tolist())
        for kind, first_K in self._first.items():
            is_kind_B = before.kind_B == kind
            if num := int(is_kind_B.sum()):
                share = np.float32(num / (num + PRIOR_REQUESTS))
                first_K[:num_both] += share * (came_BK[is_kind_B].mean(axis=0) - first_K[:num_both])
