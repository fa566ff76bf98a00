# SPDX-License-Identifier: Apache-2.0
"""Drafting pauses: if drafts do not pay, an engine leaves them out of its steps and tries them again now and then."""

import numpy as np

from nemo_specrollout.config.block import BudgetConfig

PATIENCE = 4
"""Budgets without drafts in a row before the first pause."""
LOOKS = 2
"""Budgets without drafts in a row before each later pause. The first of them still uses numbers from the pause."""
SIZES = 16
"""Batch size classes, by the bit length of the number of requests."""
FIRST_PAUSE = 2
"""Steps of the shortest pause."""
PAUSE_SHARE = 1 / 8
"""Steps of a longer pause, as a share of the steps since drafts last paid. Drafts that begin to pay are found that soon."""


class DraftingPause:
    """Never pauses drafting: the policy for budgets that ignore the value of drafts. Base of the other policies."""

    def drafts_decided(self, num_drafts: int) -> None:
        """Takes note that the budget gave the batch `num_drafts` draft tokens."""

    def requests_arrived(self, num_requests: int) -> None:
        """Takes note of new requests."""

    def should_pause(self, num_requests: int) -> bool:
        """Returns whether to leave out drafts in this step of `num_requests` requests. Call it once in each step."""
        return False


class AutoPause(DraftingPause):
    """Pauses after some steps whose drafts did not pay, counted for each batch size class.

    The longer drafts have not paid, the longer a pause lasts. Between two pauses, drafting is on until `LOOKS` budgets in
    a row have refused all drafts. A batch with at least half new requests ends the pause.
    Example: call `drafts_decided(0)` after each budget, then `should_pause(8)` for the next step.
    """

    def __init__(self) -> None:
        self._num_idle = [0] * SIZES
        """Steps since drafts last paid, for each batch size class."""
        self._size = self._num_refused = self._left = self._num_new = 0

    def drafts_decided(self, num_drafts: int) -> None:
        if num_drafts:
            self._num_idle[self._size] = self._num_refused = self._left = 0
        elif not self._left:
            self._num_refused += 1

    def requests_arrived(self, num_requests: int) -> None:
        self._num_new += num_requests

    def should_pause(self, num_requests: int) -> bool:
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
        self._left = max(FIRST_PAUSE, int(num_idle * PAUSE_SHARE))
        self._num_refused = 0
        return True


class RandomPause(DraftingPause):
    """Begins and ends pauses at random. Tests use it to show that outputs do not depend on pauses."""

    def __init__(self, seed: int = 1) -> None:
        self._rng, self._is_paused = np.random.default_rng(seed), False

    def should_pause(self, num_requests: int) -> bool:
        self._is_paused ^= bool(self._rng.random() < 1 / 4)
        return self._is_paused


def build_pause(config: BudgetConfig) -> DraftingPause:
    """Returns the pause policy that goes with the budget policy `config.policy`."""
    return {"auto": AutoPause, "fixed": DraftingPause, "random": RandomPause}[config.policy]()
