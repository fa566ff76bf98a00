# SPDX-License-Identifier: Apache-2.0
"""The seed of every row that NeMo-RL asks for: who it is, never where or when it runs.

NeMo-RL passes a row's tokens to the generation and no index. A prompt is therefore known by its content, and a sample by
how many rows of that content came before it under the same weights: siblings of a GRPO group come in order.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from threading import Lock
from typing import Any

from nemo_specrollout.sampling.seeds import combine, content_hash, request_seed


class Stream(Enum):
    """What the rows are for. Streams never share a seed."""

    ROLLOUT = 0
    VALIDATION = 1


class RowIdentities:
    """Gives rows their seeds. Owns how often each content was asked for under the current policy version.

    Equal calls in equal order give equal seeds, whatever the number of workers. A new version starts counting afresh, so
    a resumed run samples as an uninterrupted one does.
    """

    def __init__(self, run_seed: int, policy_version: int = 0) -> None:
        self._run_seed = run_seed
        self.policy_version = policy_version
        self._seen: Counter[tuple[Stream, int]] = Counter()
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        """For Ray, which copies the generation to the trajectory collector: a lock stays where it is."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    def begin_version(self, policy_version: int) -> None:
        """The weights are now those of `policy_version`, the number of training steps behind them."""
        with self._lock:
            if policy_version != self.policy_version:
                self.policy_version = policy_version
                self._seen.clear()

    def seeds(self, rows: Iterable[Sequence[int]], stream: Stream = Stream.ROLLOUT) -> list[int]:
        """The seed of each row, an integer in [0, 2^63); a row is the tokens of its prompt."""
        with self._lock:  # the collector asks from several threads
            return [self._seed(content_hash(row), stream) for row in rows]

    def _seed(self, content: int, stream: Stream) -> int:
        sample_index = self._seen[stream, content]
        self._seen[stream, content] += 1
        return request_seed(combine(self._run_seed, stream.value), content, sample_index, self.policy_version)
