# SPDX-License-Identifier: Apache-2.0
"""Statistics of each sample, with the policy versions that made it, the head that drafted for it, and how its drafts fared.

Shapes: S request slots. A slot is vLLM's own number for a request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_KEPT = 1 << 16
"""Maximum number of ended requests whose statistics are kept until they are taken. Beyond it, the oldest are dropped."""
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SampleStats:
    """Statistics of one sample."""

    policy_spans: Spans
    """Each policy version that sampled, with the first position that it sampled, counted from the start of the prompt.

    A version that came while the prompt was being read has the position after the first token that it has read."""
    head_versions: tuple[int, int]
    """Versions of the head in service when the request began and when it ended."""
    num_drafted: int
    """Number of draft tokens that were verified."""
    num_accepted: int
    read_again: tuple[int, ...] = ()
    """First positions of those spans before which the engine recomputed the KV cache of the whole text with the policy version
    of the span. In other spans, a version reads the KV cache that earlier versions have left."""

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "SampleStats":
        """Returns the record with these fields, whose tuples may have become lists on the way."""
        spans = tuple(map(tuple, wire["policy_spans"]))
        heads = tuple(wire["head_versions"])
        read_again = tuple(wire.get("read_again", ()))
        return cls(**{**wire, "policy_spans": spans, "head_versions": heads, "read_again": read_again})

    @classmethod
    def of_spans(cls, policy_spans: Iterable[Sequence[int]], read_again: Iterable[int]) -> "SampleStats":
        """Returns a record that has only policy spans, from JSON values."""
        spans = tuple((int(version), int(first)) for version, first in policy_spans)
        return cls(spans, (0, 0), 0, 0, tuple(map(int, read_again)))

    def merged(self, other: "SampleStats") -> "SampleStats":
        """Returns the statistics of a sample that moved or was raced, from the two engines that decoded it."""
        spans, read_again = _merged_spans(self, other)
        heads = (*self.head_versions, *other.head_versions)
        num_drafted = self.num_drafted + other.num_drafted
        num_accepted = self.num_accepted + other.num_accepted
        return SampleStats(spans, (min(heads), max(heads)), num_drafted, num_accepted, read_again)


def _merged_spans(one: SampleStats, other: SampleStats) -> tuple[Spans, tuple[int, ...]]:
    """Returns the policy spans of a sample that two engines have decoded, and where they computed the whole text again.

    An engine computes the whole text of a request that moves to it. That makes no difference if the same policy version had
    computed the KV cache of all tokens before.
    """
    begun = {stats.policy_spans[0][1] for stats in (one, other)}
    is_read = {*one.read_again, *other.read_again, *begun}
    spans = list[tuple[int, int]]()
    read_again = list[int]()
    for version, first in sorted({*one.policy_spans, *other.policy_spans}, key=lambda span: (span[1], span[0])):
        has_other_kv = any(version != earlier for earlier, _ in spans)
        is_read_again = has_other_kv and first in is_read
        if not spans or version != spans[-1][0] or is_read_again:
            spans.append((version, first))
            read_again += [first] * is_read_again
    return tuple(spans), tuple(read_again)


@dataclass(frozen=True)
class StepEnd:
    """Reply of an engine at the end of a training step."""

    alarms: list[dict[str, Any]]
    """Alarms of the head's canary since the last step."""
    sample_stats: list[tuple[int, SampleStats]]
    """Seed and statistics of each sample."""
    policy_version: int
    head_version: int | None = None
    """None without a drafter with weights."""
    head_is_dormant: bool | None = None
    """None without a drafter with weights."""
    began: Sequence[str] = ()
    """What the engine had from earlier starts when it began, in phrases that end a sentence. Each is reported only once."""
    history: Mapping[str, Any] | None = None
    """`HistoryFacts` of the engine as plain values, or None without a history."""

    @classmethod
    def from_wire(cls, reply: Mapping[str, Any]) -> "StepEnd":
        """Returns the record from the vLLM worker's reply."""
        samples = [(seed, SampleStats.from_wire(stats)) for seed, stats in reply["sample_stats"]]
        return cls(**{**reply, "sample_stats": samples})


@dataclass
class _Record:
    seed: int
    policy_spans: Spans
    head_at_start: int
    read_again: tuple[int, ...] = ()
    row: int = -1
    """Row of the archive with the counts of a request that has left its slot."""
    is_taken: bool = False
    """True if nothing is kept when the request leaves its slot, because it was taken before or is no sample."""

    def read_whole_text(self, version: int, num_tokens: int) -> None:
        """Notes that policy version `version` recomputes the KV cache of all tokens, as after a preemption."""
        # A preempted request loses a token that vLLM has not returned yet, which this version samples again.
        kept = tuple(span for span in self.policy_spans if span[1] < num_tokens) or self.policy_spans[:1]
        self.policy_spans = kept
        self.read_again = tuple(first for first in self.read_again if first < num_tokens)
        if any(version != earlier for earlier, _ in kept):
            self.policy_spans += ((version, num_tokens),)
            self.read_again += (num_tokens,)


class SampleStatsLog:
    """Collects the statistics of running and ended requests, by seed, until they are taken.

    Counts stay on the device until they are asked for, which costs one copy for all requests together.
    """

    def __init__(
        self,
        counts_S2: torch.Tensor,
        *,
        begins_again: bool = False,
        put: Callable[[Sequence[int]], torch.Tensor] = torch.tensor,
    ) -> None:
        """Creates an empty log.

        Args:
            counts_S2: numbers of draft tokens verified and accepted for the request in each slot, int32, on the device.
            begins_again: whether new weights make all running requests start over (`run_ahead`), so that what they did before
                is no sample.
            put: returns a few numbers as an int64 tensor on that device, without waiting.
        """
        self._put = put
        self._begins_again = begins_again
        self.policy_version = 0
        """Policy version of the engine's weights."""
        self.head_version = 0
        """Version of the policy whose features the head in service was trained on."""
        self._counts_S2 = counts_S2
        self._archive = torch.zeros(MAX_KEPT, 2, dtype=torch.int32, device=counts_S2.device)
        self._num_archived = 0
        self._running: dict[int, _Record] = {}
        self._ended: dict[int, _Record] = {}

    def open(self, slot: int, seed: int, prompt_length: int, num_tokens: int) -> None:
        """Starts the record of a request in `slot`, whose counts must be zero.

        A preempted request with tokens of its own continues its record, and so does one that comes back from another
        engine with its text so far as its prompt. A request that starts over gets a new record.
        """
        record = self._ended.pop(seed, None)
        if record is None or num_tokens <= record.policy_spans[0][1]:
            record = _Record(seed, ((self.policy_version, prompt_length),), self.head_version)
        else:
            self._counts_S2[slot] = self._archive[record.row]
            record.read_whole_text(self.policy_version, num_tokens)
        self._running[slot] = record

    def close(self, slots: list[int]) -> None:
        """Archives the requests in `slots`, which have ended or are preempted, with one copy for all of them."""
        left = {slot: self._running.pop(slot) for slot in slots if slot in self._running}
        kept = {slot: record for slot, record in left.items() if not record.is_taken}
        if not kept:
            return
        for row, record in enumerate(kept.values(), start=self._num_archived):
            record.row = row % MAX_KEPT
            self._ended[record.seed] = record
        self._num_archived += len(kept)
        rows = self._put([record.row for record in kept.values()])
        self._archive.index_copy_(0, rows, self._counts_S2.index_select(0, self._put([*kept])))
        while len(self._ended) > MAX_KEPT:
            del self._ended[next(iter(self._ended))]

    def policy_updated(self, version: int, positions_S: Sequence[int]) -> None:
        """Starts a span of policy version `version` in each running request, at the position that it samples next."""
        self.policy_version = version
        for slot, record in self._running.items():
            record.is_taken |= self._begins_again
            record.policy_spans += ((version, positions_S[slot]),)

    def take(self, seeds: Sequence[int] | None) -> dict[int, SampleStats]:
        """Returns the statistics of the requests with these seeds, running or ended, or of all ended ones if None.

        vLLM frees the slot of a request one engine step after its last one, so an ended request may still have a slot.
        """
        archive = self._archive.cpu()
        counts_S2 = self._counts_S2.cpu()
        found = dict[int, SampleStats]()
        slot_of = {} if seeds is None else {record.seed: slot for slot, record in self._running.items()}
        for seed in list(self._ended) if seeds is None else seeds:
            if seed in slot_of:
                record = self._running[slot_of[seed]]
                counts = counts_S2[slot_of[seed]]
                record.is_taken = True
            elif seed in self._ended:
                record = self._ended.pop(seed)
                counts = archive[record.row]
            else:
                continue
            versions = (record.head_at_start, self.head_version)
            num_drafted, num_accepted = counts.tolist()
            found[seed] = SampleStats(record.policy_spans, versions, num_drafted, num_accepted, record.read_again)
        return found
