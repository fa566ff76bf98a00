# SPDX-License-Identifier: Apache-2.0
"""The prompts of the next step, which `run_ahead` needs early: NeMo-RL's data loader with a look at its next batch."""

from collections.abc import Iterator
from typing import Any, ClassVar
from weakref import ref

from torchdata.stateful_dataloader import StatefulDataLoader

_END = object()


class PeekingLoader(StatefulDataLoader):
    """NeMo-RL's data loader, which can show its next batch early. That leaves `state_dict` as it was."""

    _latest: ClassVar["ref[PeekingLoader] | None"] = None
    _next: Any = None
    _state_before: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._stream = super().__iter__()
        self._next = self._state_before = None
        while (batch := self._take()) is not _END:
            PeekingLoader._latest = ref(self)
            yield batch

    def _take(self) -> Any:
        batch = self._next
        self._next = None
        self._state_before = None
        return next(self._stream, _END) if batch is None else batch

    def peek(self) -> Any:
        """Returns the batch that comes next; None at the end of an epoch."""
        if self._next is None:
            self._state_before = super().state_dict()
            self._next = next(self._stream, _END)
        return None if self._next is _END else self._next

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._state_before is None else self._state_before


def next_prompts() -> list[list[int]]:
    """Returns the tokens of the prompts of the next step, in order; empty if they are not known."""
    loader = None if PeekingLoader._latest is None else PeekingLoader._latest()
    batch = None if loader is None else loader.peek()
    logs = [] if batch is None else batch["message_log"]
    return [[token for message in log for token in message["token_ids"].tolist()] for log in logs]
