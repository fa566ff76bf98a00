# SPDX-License-Identifier: Apache-2.0
"""The seed of every row that NeMo-RL asks for: who it is, never where or when it runs.

NeMo-RL passes a row's tokens to the generation and no index. Where the row's rollout is known (`current_sample`), the seed
follows from it. Otherwise a prompt is known by its content, and a sample by how many rows of that content came before it
under the same weights: siblings of a GRPO group come in order.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

from nemo_specrollout.nemo_rl.locked import Locked
from nemo_specrollout.sampling.seeds import combine, content_hash, request_seed


class Stream(Enum):
    """The purpose of rows. Streams never share a seed."""

    ROLLOUT = 0
    VALIDATION = 1


# Seeds of other kinds, which never share one with a stream: of known rollouts; of requests over HTTP, which bring a seed or
# do not.
KNOWN_SAMPLE, GIVEN, DERIVED = 2, 3, 4


@dataclass(frozen=True)
class Sample:
    """One rollout: number `index` of the group of row `prompt` of the dataset, in its epoch `epoch`.

    `prompt_length` is the number of tokens with which the conversation begins; None if that is not known.
    """

    prompt: int
    index: int
    epoch: int = 0
    prompt_length: int | None = None


current_sample: ContextVar[Sample | None] = ContextVar("specrollout_current_sample", default=None)
"""The rollout that this task belongs to. Every turn of it asks for rows, one at a time."""


class RowIdentities(Locked):
    """Gives rows their seeds. Owns how often each content was asked for under the current policy version.

    Equal calls in equal order give equal seeds, whatever the number of workers. A new version starts counting afresh, so
    a resumed run samples as an uninterrupted one does.
    """

    def __init__(self, run_seed: int, policy_version: int = 0) -> None:
        super().__init__()
        self._run_seed = run_seed
        self.policy_version = policy_version
        self._seen: Counter[tuple[Stream, int]] = Counter()

    def begin_version(self, policy_version: int) -> None:
        """The weights are now those of `policy_version`, the number of training steps behind them."""
        with self._lock:
            if policy_version != self.policy_version:
                self.policy_version = policy_version
                self._seen.clear()

    def seeds(self, rows: Iterable[Sequence[int]], stream: Stream = Stream.ROLLOUT) -> list[int]:
        """The seed of each row, an integer in [0, 2^63); a row is the tokens of its prompt."""
        sample = current_sample.get()
        if sample is not None:
            return [sample_seed(self._run_seed, sample, row) for row in rows]
        with self._lock:  # the collector asks from several threads
            return [self._seed(content_hash(row), stream) for row in rows]

    def _seed(self, content: int, stream: Stream) -> int:
        sample_index = self._seen[stream, content]
        self._seen[stream, content] += 1
        return request_seed(combine(self._run_seed, stream.value), content, sample_index, self.policy_version)


def sample_seed(run_seed: int, sample: Sample, row: Sequence[int] = ()) -> int:
    """Returns the seed of a turn of `sample` whose prompt is `row`, an integer in [0, 2^63).

    It does not depend on the policy version: a group that is rolled out again, by other weights or on another engine,
    keeps its seeds.
    """
    run = combine(run_seed, KNOWN_SAMPLE, sample.prompt)
    return request_seed(run, content_hash(row), sample.index, sample.epoch)
