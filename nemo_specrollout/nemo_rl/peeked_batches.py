# SPDX-License-Identifier: Apache-2.0
"""A stream of batches that can be peeked at. The state of its source is reported as if nobody had peeked."""

from collections import deque
from collections.abc import Callable, Iterator
from threading import RLock
from typing import Any

State = dict[str, Any]


class PeekedBatches:
    """Yields the batches of one epoch. Owns the batches that were peeked at and have not been taken yet.

    Invariant: the batches, their order and `state` are the same as if nobody had ever peeked.

    One thread may take batches while another peeks at them.
    """

    def __init__(self, stream: Iterator[Any], state_of_source: Callable[[], State]) -> None:
        """`state_of_source` returns the state from which the source would continue after the last batch of `stream`."""
        self._stream = stream
        self._state_of_source = state_of_source
        self._lock = RLock()
        self._waiting: deque[tuple[State, Any]] = deque()
        """Batches that were peeked at, each with the state of the source before it."""
        self._state_at_end: State | None = None
        """State of the source before the end of the epoch, or None until a peek has reached the end."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()[1]
            if self._state_at_end is not None:
                self._state_at_end = None
                raise StopIteration
            return next(self._stream)

    def peek(self, number: int) -> list[Any]:
        """Returns the next `number` batches without taking them, or fewer if the epoch ends before."""
        with self._lock:
            while len(self._waiting) < number and self._state_at_end is None:
                state = self._state_of_source()
                try:
                    self._waiting.append((state, next(self._stream)))
                except StopIteration:
                    self._state_at_end = state
            return [batch for _, batch in list(self._waiting)[:number]]

    def state(self) -> State:
        """Returns the state of the source after the batch that was taken last."""
        with self._lock:
            if self._waiting:
                return self._waiting[0][0]
            return self._state_of_source() if self._state_at_end is None else self._state_at_end
