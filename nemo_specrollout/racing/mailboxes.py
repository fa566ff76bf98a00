# SPDX-License-Identifier: Apache-2.0
"""Workers that come for their orders: a mailbox for each, and one inbox for what they report."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from nemo_specrollout.racing.turns import Orders, Report


class Mailboxes:
    """A coordinator's `Workers`, none of which is called. Owns the orders that were not fetched yet, the reports that were not
    read, and how many turns each worker has before it.

    A worker is away until it joins, and again when it leaves or is lost. It fetches its orders in order and reports every
    one of them once, in the same order.
    """

    def __init__(self, methods: Sequence[int]) -> None:
        self.methods = list(methods)
        self.capacity = 0
        self._mail: list[deque[Orders]] = [deque() for _ in self.methods]
        self._num_turns = [0] * len(self.methods)
        self._present: set[int] = set()
        self._inbox: deque[tuple[int, Report | None]] = deque()

    def join(self, worker: int, capacity: int) -> None:
        """The worker is there, with room for `capacity` requests and nothing to do."""
        self.capacity = min(capacity, self.capacity or capacity)
        self._forget(worker)
        self._present.add(worker)

    def close(self) -> None:
        """Everybody is away, and nothing is left to read."""
        self._present.clear()
        self._inbox.clear()
        for worker in range(len(self.methods)):
            self._forget(worker)

    def leave(self, worker: int) -> None:
        """It comes no more: what it has belongs to no worker until another begins with it."""
        if worker in self._present:
            self._present.discard(worker)
            self._forget(worker)
            self._inbox.append((worker, None))

    def _forget(self, worker: int) -> None:
        self._mail[worker].clear()
        self._num_turns[worker] = 0

    def fetch(self, worker: int) -> tuple[Orders, ...]:
        """The orders that wait for it."""
        orders = tuple(self._mail[worker])
        self._mail[worker].clear()
        return orders

    def has_mail(self, worker: int) -> bool:
        """Whether any wait for it."""
        return bool(self._mail[worker])

    def has_reports(self) -> bool:
        """Whether any wait to be read."""
        return bool(self._inbox)

    def report(self, worker: int, report: Report) -> None:
        """What a turn has brought."""
        self._num_turns[worker] -= 1
        self._inbox.append((worker, report))

    # Workers

    def send(self, worker: int, orders: Orders) -> None:
        """Puts a turn into its mailbox."""
        self._mail[worker].append(orders)
        self._num_turns[worker] += 1

    def reports(self) -> list[tuple[int, Report | None]]:
        """What came since last asked; does not wait."""
        reports = list(self._inbox)
        self._inbox.clear()
        return reports

    def num_turns(self, worker: int) -> int:
        """Turns that it was asked for and has not reported."""
        return self._num_turns[worker]

    def is_alive(self, worker: int) -> bool:
        """Whether it comes for orders."""
        return worker in self._present

    def revive(self) -> None:
        """No worker can be called."""

    def load_weights(self, tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """They come another way."""
        raise NotImplementedError
