# SPDX-License-Identifier: Apache-2.0
"""Whether to consult drafters that read text in a step: where their drafts do not pay, they are asked now and then."""

PATIENCE = 4
"""Steps without drafts after which the first rest begins."""
FIRST_REST, LONGEST_REST, GROWTH = 2, 32, 1.5
"""Steps of the first rest, of the longest, and by how much each is longer than the one before."""


class Pacer:
    """Counts steps whose drafts did not pay. States: awake, resting for some steps, then awake again for as many steps as it
    takes to see what drafts are worth.

    Example: `decided(0)` after each step's budget, then `rests(8)` says whether to leave the drafters alone.
    """

    def __init__(self, can_rest: bool) -> None:
        """`can_rest`: whether the budget weighs drafts at all."""
        self._can_rest = can_rest
        self._num_refused, self._left, self._rest, self._size = 0, 0, float(FIRST_REST), 0

    def decided(self, num_drafts: int) -> None:
        """The budget gave the batch `num_drafts` drafts."""
        if num_drafts:
            self.wake()
        elif not self._left:
            self._num_refused += 1

    def wake(self) -> None:
        """Something has changed: drafts pay, or requests have come."""
        self._num_refused, self._left, self._rest = 0, 0, float(FIRST_REST)

    def rests(self, num_requests: int) -> bool:
        """Whether this step, with `num_requests` requests, goes without the drafters."""
        if num_requests.bit_length() != self._size:
            self._size = num_requests.bit_length()
            self.wake()
        if self._left:
            self._left -= 1
            return self._left > 0
        if self._can_rest and self._num_refused >= PATIENCE:
            self._left = int(self._rest)
            self._rest = min(self._rest * GROWTH, LONGEST_REST)
            self._num_refused = PATIENCE - 2
            return True
        return False
