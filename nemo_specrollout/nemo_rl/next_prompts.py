# SPDX-License-Identifier: Apache-2.0
"""The prompts of the next step, which `run_ahead` needs early: NeMo-RL's data loader with a look at its next batch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar
from weakref import ref

from torchdata.stateful_dataloader import StatefulDataLoader

from nemo_specrollout.nemo_rl.early_rows import NextPrompt

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


def next_prompts() -> list[NextPrompt]:
    """Returns the prompts of the next step, in order; none if they are not known."""
    loader = None if PeekingLoader._latest is None else PeekingLoader._latest()
    shown = None if loader is None else loader.peek()
    if shown is None:
        return []
    logs = shown["message_log"]
    nothing = [None] * len(logs)
    tasks = shown.get("task_name") or nothing
    media = shown.get("vllm_content") or nothing
    return [
        NextPrompt(_token_ids(log), task, content is not None)
        for log, task, content in zip(logs, tasks, media, strict=True)
    ]


def _token_ids(message_log: Iterable[Mapping[str, Any]]) -> list[int]:
    return [token for message in message_log for token in message["token_ids"].tolist()]
