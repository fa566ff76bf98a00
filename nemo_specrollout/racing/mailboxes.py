# SPDX-License-Identifier: Apache-2.0
"""Mailboxes of engines that come for their orders, and an inbox for their results."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from nemo_specrollout.racing.turns import Orders, TurnResult


class Mailboxes:
    """The `Engines` of a coordinator that cannot call them.

    Owns the orders that were not fetched, the results that were not read, and the number of turns that each engine has.

    An engine is absent until it joins, and again after it leaves or is lost. It fetches its orders in order, and hands in
    one result for each turn, in the same order.
    """

    def __init__(self, methods: Sequence[int]) -> None:
        self.methods = list(methods)
        self.capacity = 0
        self._orders: list[deque[Orders]] = [deque() for _ in self.methods]
        self._num_turns = [0] * len(self.methods)
        self._present: set[int] = set()
        self._inbox: deque[tuple[int, TurnResult | None]] = deque()

    # For engines

    def join(self, engine: int, capacity: int) -> None:
        """Adds an engine that decodes `capacity` requests at a time and has no turn."""
        self.capacity = min(capacity, self.capacity or capacity)
        self._forget(engine)
        self._present.add(engine)

    def leave(self, engine: int) -> None:
        """Removes an engine; to the coordinator it has died."""
        if engine in self._present:
            self._present.discard(engine)
            self._forget(engine)
            self._inbox.append((engine, None))

    def clear(self) -> None:
        """Removes all engines and all mail."""
        self._present.clear()
        self._inbox.clear()
        for engine in range(len(self.methods)):
            self._forget(engine)

    def fetch(self, engine: int) -> tuple[Orders, ...]:
        """Returns the orders that wait for the engine."""
        orders = tuple(self._orders[engine])
        self._orders[engine].clear()
        return orders

    def hand_in(self, engine: int, result: TurnResult) -> None:
        """Takes the result of a turn."""
        self._num_turns[engine] -= 1
        self._inbox.append((engine, result))

    def _forget(self, engine: int) -> None:
        self._orders[engine].clear()
        self._num_turns[engine] = 0

    # For the coordinator: see `Engines`

    def send(self, engine: int, orders: Orders) -> None:
        self._orders[engine].append(orders)
        self._num_turns[engine] += 1

    def results(self) -> list[tuple[int, TurnResult | None]]:
        """Returns the results since the last call; does not wait."""
        results = list(self._inbox)
        self._inbox.clear()
        return results

    def num_turns(self, engine: int) -> int:
        return self._num_turns[engine]

    def is_alive(self, engine: int) -> bool:
        return engine in self._present

    def revive(self) -> None:
        """Does nothing: an absent engine comes back by itself or not at all."""

    def load_weights(self, tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Raises NotImplementedError: these engines get their weights from their own framework."""
        raise NotImplementedError
