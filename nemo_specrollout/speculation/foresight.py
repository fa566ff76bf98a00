# SPDX-License-Identifier: Apache-2.0
"""Predicts the survival of the drafts of an engine step from the acceptance rates of the engine step before.

In this file a step is an engine step. The rate of a draft is the probability that it is accepted if all drafts before it are
accepted.

Shapes: B requests of a step, K draft positions, S request slots.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar, NamedTuple

import numpy as np

from nemo_specrollout.speculation.decision import survival_of

MEMORY = 0.98
"""Factor by which each engine step reduces the weight of what was learned before."""
PRIOR_REQUESTS = 4.0
"""Weight of what was learned earlier about the first drafts of new requests, in new requests."""


class Kind(IntEnum):
    """Says what is known about the drafts of a request, which decides how their survival is predicted."""

    KNOWN = 0
    """The acceptance rates of the request's drafts in the engine step before are known."""
    SILENT = 1
    """The request has no drafts."""
    NEW = 2
    """The request is new, so no acceptance rates of its drafts are known."""
    NEW_WITH_TEXT = 3
    """The request is new, but brings a text made ahead, which is probably right."""


class _Foretold(NamedTuple):
    """The requests of an engine step for which survivals were predicted."""

    slots_B: np.ndarray
    kind_B: np.ndarray
    apart_BK: np.ndarray
    """Survival of each draft in the engine step before, minus the mean over the requests. 0 where it was not known."""


class Foresight:
    """Predicts the survival of drafts from acceptance rates that are one engine step old.

    The host must decide how many drafts an engine step has while the device still computes the step before. So it only knows
    the acceptance rates of that earlier step. A request whose drafts were better than the mean of the batch will probably have
    better drafts again, but by less. Therefore the predicted survival lies between the request's latest survival and the mean
    of the batch, and earlier steps show how far from the mean. A new request has no rates yet. Its prediction is the mean over
    the first drafts of earlier new requests. Requests that bring a text made ahead have a mean of their own.

    Owns the kind of each request, and what was learned. It reads no clock and adds numbers in a fixed order. So all ranks that
    get the same rates make the same predictions.
    """

    LEARNED: ClassVar = ("_first", "_together", "_before")

    def __init__(self, num_slots: int, num_positions: int, text_rate: float) -> None:
        """`text_rate` is the acceptance rate that is assumed for drafts from texts made ahead until some were verified."""
        self._kind_S = np.full(num_slots, Kind.NEW, np.int8)
        self._first = {kind: np.zeros(num_positions, np.float32) for kind in (Kind.NEW, Kind.NEW_WITH_TEXT)}
        """For each kind of new request, the survival of its first drafts, [K]."""
        self._first[Kind.NEW_WITH_TEXT][:] = np.cumprod(np.full(num_positions, text_rate))
        self._together = 1.0
        """Numerator of `persistence`. It adds up products for all requests. Each product is the distance of a request's
        survival from the mean in one engine step, multiplied by its distance in the next one."""
        self._before = 1.0
        """Denominator of `persistence`. It adds up the squares of the distances in the first of the two engine steps."""
        self._foretold: _Foretold | None = None

    def is_sound(self) -> bool:
        """Returns whether fields that were loaded from a file are valid.

        They are valid if all survivals are between 0 and 1, and the sum of squares is positive.
        """
        return self._before > 0.0 and all(bool(((s >= 0.0) & (s <= 1.0)).all()) for s in self._first.values())

    @property
    def persistence(self) -> float:
        """Share of a request's distance from the mean survival that remains one engine step later, between 0 and 1."""
        return min(max(self._together / self._before, 0.0), 1.0)

    def opened(self, slots: Sequence[int], kinds: Sequence[Kind]) -> None:
        """Notes that new requests have come into the slots `slots`. `kinds` has the kind of each of these requests."""
        self._kind_S[list(slots)] = kinds

    def survival(self, rates_SK: np.ndarray, slots_B: np.ndarray) -> np.ndarray:
        """Returns the predicted survival of the drafts of an engine step's requests, float32 [B, K].

        `rates_SK` has the acceptance rates of the engine step before, by slot. `slots_B` has the slot of each request of the
        step that is predicted. Also learns from `rates_SK` how good the last prediction was. So call this method once in each
        engine step with drafts. K may differ between steps, up to the number of positions that the object was made for.
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
        """Learns from the engine step before, by comparing the survivals predicted for it with those that are known now."""
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
