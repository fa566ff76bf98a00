# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's data loader, extended so that `run_ahead` can see the prompts of coming steps."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar
from weakref import ref

from torchdata.stateful_dataloader import StatefulDataLoader

from nemo_specrollout.nemo_rl.early_rows import NextPrompt
from nemo_specrollout.nemo_rl.peeked_batches import PeekedBatches


class PeekingLoader(StatefulDataLoader):
    """NeMo-RL's data loader, which can show its next batches without consuming them or changing `state_dict`."""

    _latest: ClassVar["ref[PeekingLoader] | None"] = None
    _batches: PeekedBatches | None = None
    """Batches of the current epoch, or None before the first epoch."""
    num_taken = 0
    """Number of batches that the loader has given since it was made."""

    def __iter__(self) -> Iterator[Any]:
        self._batches = PeekedBatches(super().__iter__(), super().state_dict)
        for batch in self._batches:
            self.num_taken += 1
            PeekingLoader._latest = ref(self)
            yield batch

    @staticmethod
    def latest() -> "PeekingLoader | None":
        """Returns the loader that was the last one in this process to give a batch, or None if none has given any."""
        return None if PeekingLoader._latest is None else PeekingLoader._latest()

    def next_prompts(self, number: int) -> list[list[NextPrompt]]:
        """Returns the prompts of the next `number` batches, or of fewer at the end of an epoch."""
        return [] if self._batches is None else list(map(prompts_of, self._batches.peek(number)))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._batches is None else self._batches.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches = None
        super().load_state_dict(state_dict)


def prompts_of(shown: Mapping[str, Any]) -> list[NextPrompt]:
    """Returns the prompts of a batch of NeMo-RL's data loader, in order."""
    logs = shown["message_log"]
    nothing = [None] * len(logs)
    tasks = shown.get("task_name") or nothing
    rows = shown.get("idx")
    indices = nothing if rows is None else [int(index) for index in rows]
    media = shown.get("vllm_content") or nothing
    gym_rows = map(_gym_row, shown.get("extra_env_info") or nothing)
    return [
        NextPrompt(_token_ids(log), task, index, content is not None, gym_row)
        for log, task, index, content, gym_row in zip(logs, tasks, indices, media, gym_rows, strict=True)
    ]


def _gym_row(info: Any) -> Mapping[str, Any] | None:
    """Returns `info`, the environment's part of a prompt, if it is a row of NeMo-Gym, and otherwise None."""
    return info if isinstance(info, Mapping) and "responses_create_params" in info else None


def _token_ids(message_log: Iterable[Mapping[str, Any]]) -> list[int]:
    return [token for message in message_log for token in message["token_ids"].tolist()]
