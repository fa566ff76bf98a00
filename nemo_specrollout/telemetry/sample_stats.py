# SPDX-License-Identifier: Apache-2.0
"""Collects statistics of each sample: the policy versions that sampled it, the draft head, and counts of draft tokens.

Shapes: S request slots. A slot is the number that vLLM gives to a request while it runs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_KEPT = 1 << 16
"""Maximum number of ended requests whose statistics are kept until somebody asks for them. The oldest are dropped first."""
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SampleStats:
    """The statistics of one sample."""

    policy_spans: Spans
    """Pairs of a policy version and the first position that it sampled. Positions count from the start of the prompt.

    If the weights changed while the prompt was being computed, the new version's position is still in the prompt. It is one
    above the position of the first token that this version has computed.
    """
    head_versions: tuple[int, int]
    """Version of the draft head in service when the request began, and version when it ended."""
    num_drafted: int
    """Number of draft tokens that were verified."""
    num_accepted: int
    """Number of draft tokens that were accepted."""
    read_again: tuple[int, ...] = ()
    """Those first positions in `policy_spans` before which the engine computed the KV cache of all earlier text again, with
    the new policy version. At other positions, the new version continues with the KV cache that earlier versions have left."""

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "SampleStats":
        """Returns the statistics from a dictionary of the fields, in which tuples may have become lists."""
        spans = tuple(map(tuple, wire["policy_spans"]))
        heads = tuple(wire["head_versions"])
        read_again = tuple(wire.get("read_again", ()))
        return cls(**{**wire, "policy_spans": spans, "head_versions": heads, "read_again": read_again})

    @classmethod
    def of_spans(cls, policy_spans: Iterable[Sequence[int]], read_again: Iterable[int]) -> "SampleStats":
        """Returns statistics with policy spans from JSON values. All other numbers are 0."""
        spans = tuple((int(version), int(first)) for version, first in policy_spans)
        return cls(spans, (0, 0), 0, 0, tuple(map(int, read_again)))

    def merged(self, other: "SampleStats") -> "SampleStats":
        """Returns the statistics of a sample that two engines have decoded, from those of each engine.

        That happens if the request has moved to another engine, or if two engines have raced for it.
        """
        spans, read_again = _merged_spans(self, other)
        heads = (*self.head_versions, *other.head_versions)
        num_drafted = self.num_drafted + other.num_drafted
        num_accepted = self.num_accepted + other.num_accepted
        return SampleStats(spans, (min(heads), max(heads)), num_drafted, num_accepted, read_again)


def _merged_spans(one: SampleStats, other: SampleStats) -> tuple[Spans, tuple[int, ...]]:
    """Returns `policy_spans` and `read_again` of a sample that two engines have decoded.

    An engine to which a request moves computes the KV cache of all of its text again. That counts as `read_again` only if
    another policy version had computed a part of the KV cache before.
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
    """What an engine reports at the end of a training step."""

    alarms: list[dict[str, Any]]
    """Alarms since the last training step, from the canary that watches the acceptance rate of the draft head."""
    sample_stats: list[tuple[int, SampleStats]]
    """Seed and statistics of each sample of the step."""
    policy_version: int
    head_version: int | None = None
    """Version of the draft head in service. None if the engine has no drafter with weights."""
    head_is_dormant: bool | None = None
    """True if the drafter with weights does not draft now, because drafts do not pay. None if there is no such drafter."""
    began: Sequence[str] = ()
    """Phrases about what the engine knew from earlier starts when it began. Each phrase is reported only once."""
    history: Mapping[str, Any] | None = None
    """Facts about the finished responses that the engine drafts from (`HistoryFacts`), or None if it has no such drafter."""

    @classmethod
    def from_wire(cls, reply: Mapping[str, Any]) -> "StepEnd":
        """Returns the report from the reply of a vLLM worker, which is a dictionary of the report's fields."""
        samples = [(seed, SampleStats.from_wire(stats)) for seed, stats in reply["sample_stats"]]
        return cls(**{**reply, "sample_stats": samples})


@dataclass
class _Record:
    seed: int
    policy_spans: Spans
    head_at_start: int
    read_again: tuple[int, ...] = ()
    row: int = -1
    """Row of `SampleStatsLog._archive` with the counts of draft tokens that the request had when it last left a slot. It is -1
    if the request has not left one."""
    is_taken: bool = False
    """True if the record is dropped when the request leaves its slot, because it was taken before or is no sample."""

    def read_whole_text(self, version: int, num_tokens: int) -> None:
        """Notes that policy version `version` computes the KV cache of all `num_tokens` tokens again.

        That happens after a preemption, for example.
        """
        # A preempted request loses a token that vLLM has not returned yet, which this version samples again.
        kept = tuple(span for span in self.policy_spans if span[1] < num_tokens) or self.policy_spans[:1]
        self.policy_spans = kept
        self.read_again = tuple(first for first in self.read_again if first < num_tokens)
        if any(version != earlier for earlier, _ in kept):
            self.policy_spans += ((version, num_tokens),)
            self.read_again += (num_tokens,)


class SampleStatsLog:
    """Collects the statistics of running and ended requests until `take` returns them, by the requests' seeds.

    The counts of verified and accepted draft tokens stay on the device. `take` copies the counts of all requests to the host
    at once.
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
            counts_S2: counts of verified and of accepted draft tokens of the request in each slot, int32, shape [S, 2], on the
                device.
            begins_again: whether all running requests start over when the weights change (`run_ahead`). What they had decoded
                before is then no sample.
            put: function that copies a few numbers into an int64 tensor on the device, without waiting for the device.
        """
        self._put = put
        self._begins_again = begins_again
        self.policy_version = 0
        """The policy version of the engine's weights."""
        self.head_version = 0
        """The version of the draft head in service. It is the policy version on whose hidden states the head was trained."""
        self._counts_S2 = counts_S2
        self._archive = torch.zeros(MAX_KEPT, 2, dtype=torch.int32, device=counts_S2.device)
        self._num_archived = 0
        self._running: dict[int, _Record] = {}
        self._ended: dict[int, _Record] = {}

    def open(self, slot: int, seed: int, prompt_length: int, num_tokens: int) -> None:
        """Begins or continues the record of a request that has got a slot. The slot's row in `counts_S2` must be zero.

        After a preemption, or when a request comes back from another engine, it already has tokens of its response. Then the
        record of the earlier request with the same seed goes on. Otherwise a new record begins.

        Args:
            slot: the slot of the request.
            seed: the seed of the request.
            prompt_length: number of tokens of the prompt.
            num_tokens: number of tokens of the prompt and of the response so far.
        """
        record = self._ended.pop(seed, None)
        if record is None or num_tokens <= record.policy_spans[0][1]:
            record = _Record(seed, ((self.policy_version, prompt_length),), self.head_version)
        else:
            self._counts_S2[slot] = self._archive[record.row]
            record.read_whole_text(self.policy_version, num_tokens)
        self._running[slot] = record

    def close(self, slots: list[int]) -> None:
        """Notes that the requests in these slots leave them, because they have ended or are preempted.

        Their counts of verified and accepted draft tokens are saved, because other requests will use the slots.
        """
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
        """Notes that policy version `version` samples all further tokens of the running requests.

        `positions_S` has the position of the next token of the request in each slot.
        """
        self.policy_version = version
        for slot, record in self._running.items():
            record.is_taken |= self._begins_again
            record.policy_spans += ((version, positions_S[slot]),)

    def take(self, seeds: Sequence[int] | None) -> dict[int, SampleStats]:
        """Returns the statistics of the requests with these seeds, by seed, and forgets them.

        Seeds of unknown requests are left out. If `seeds` is None, all ended requests are taken. A request may still have its
        slot although it has ended, because vLLM frees a slot one engine step late.
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
