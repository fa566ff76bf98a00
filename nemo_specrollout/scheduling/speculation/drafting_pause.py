# SPDX-License-Identifier: Apache-2.0
"""Whether an engine's drafting rests: where drafts do not pay, they are left out of steps, and tried again now and then."""

from typing import Protocol

import numpy as np

from nemo_specrollout.config.block import BudgetConfig

PATIENCE = 4
"""Steps without drafts after which the first rest begins."""
LOOKS = 2
"""Steps without drafts that end a look between two rests: the first budget goes by figures of the rest."""
SIZES = 16
"""Sizes of batches that are told apart, in bits."""
FIRST_REST, REST_SHARE = 2, 1 / 8
"""Steps of the shortest rest; a longer one is this share of the steps since drafts last paid. So drafts that begin to pay
are found after as short a time, beside the time that they did not."""


class Pacing(Protocol):
    """Says in each step whether drafting rests."""

    def decided(self, num_drafts: int) -> None:
        """The budget gave the batch `num_drafts`."""

    def opened(self, num_requests: int) -> None:
        """`num_requests` have come."""

    def rests(self, num_requests: int) -> bool:
        """Whether drafting should rest now; asked once in each step, which has `num_requests` requests."""


class Pacer:
    """Counts steps whose drafts did not pay, for each size of batch: what pays for few requests may not for many. States:
    awake, resting for some steps, then awake for as many steps as it takes to see what drafts are worth.

    A batch of which half is new is looked at whatever the rest. Example: `decided(0)` after each step's budget, then
    `rests(8)` says whether to leave drafts out.
    """

    def __init__(self) -> None:
        self._num_idle = [0] * SIZES  # steps since drafts last paid
        self._size = self._num_refused = self._left = self._num_new = 0

    def decided(self, num_drafts: int) -> None:
        if num_drafts:
            self._num_idle[self._size] = self._num_refused = self._left = 0
        elif not self._left:
            self._num_refused += 1

    def opened(self, num_requests: int) -> None:
        self._num_new += num_requests

    def rests(self, num_requests: int) -> bool:
        size = min(num_requests.bit_length(), SIZES - 1)
        if size != self._size or 2 * self._num_new >= num_requests:
            self._size, self._num_refused, self._left, self._num_new = size, 0, 0, 0
        self._num_idle[size] += 1
        if self._left:
            self._left -= 1
            return self._left > 0
        num_idle = self._num_idle[size]
        if self._num_refused < (PATIENCE if num_idle <= PATIENCE else LOOKS):
            return False
        self._left = max(FIRST_REST, int(num_idle * REST_SHARE))
        self._num_refused = 0
        return True


class Restless:
    """Never rests: for budgets that do not weigh what drafts are worth."""

    def decided(self, num_drafts: int) -> None:
        pass

    def opened(self, num_requests: int) -> None:
        pass

    def rests(self, num_requests: int) -> bool:
        return False


class RandomPacer(Restless):
    """Begins and ends rests at random: for tests that outputs do not depend on them."""

    def __init__(self, seed: int = 1) -> None:
        self._rng, self._rests = np.random.default_rng(seed), False

    def rests(self, num_requests: int) -> bool:
        self._rests ^= bool(self._rng.random() < 1 / 4)
        return self._rests


def build_pacer(config: BudgetConfig) -> Pacing:
    """The pacing that goes with the budget policy of that name."""
    return {"auto": Pacer, "random": RandomPacer}.get(config.policy, Restless)()
