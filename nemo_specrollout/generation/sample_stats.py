# SPDX-License-Identifier: Apache-2.0
"""What is written on each sample: the weights that made it, the head that drafted for it, and how its drafts fared.

Shapes: S request slots; a slot is vLLM's own number for a request.
"""

from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

MOST_KEPT = 1 << 16


@dataclass(frozen=True)
class SampleStats:
    """Of one sample. `policy_spans`: (version, first position in the sequence) of each policy that sampled of it; one, unless
    weights were updated while it was under way. `head_versions`: in force when it began and when it ended. `num_drafted`,
    `num_accepted`: its draft tokens verified, and accepted."""

    policy_spans: tuple[tuple[int, int], ...]
    head_versions: tuple[int, int]
    num_drafted: int
    num_accepted: int

    def wire(self) -> dict[str, Any]:
        """As plain numbers and lists."""
        return asdict(self)


@dataclass(frozen=True)
class _Record:
    """Of a request: its seed, the policies that sampled of it, the head in service when it began. `row`: where the counts of
    its draft tokens are archived, once it has left its slot."""

    seed: int
    policy_spans: tuple[tuple[int, int], ...]
    head_at_start: int
    row: int = -1
    is_taken: bool = False
    """Its sample was asked for while it had a slot."""


class SampleStatsLog:
    """Owns a record for each request under way and of those that ended, by seed, until they are taken.

    `policy_version` counts weight updates of the engine, `head_version` is that of the policy whose features the head in
    service learned from. Counts stay on the device until somebody asks, which costs one copy however many requests there are.
    """

    def __init__(self, counts_S2: torch.Tensor) -> None:
        """`counts_S2`: draft tokens verified and accepted of each slot's request, int32, on the device."""
        self.policy_version = self.head_version = 0
        self._counts_S2 = counts_S2
        self._archive = torch.zeros(MOST_KEPT, 2, dtype=torch.int32, device=counts_S2.device)
        self._num_archived = 0
        self._of_slot: dict[int, _Record] = {}
        self._ended: OrderedDict[int, _Record] = OrderedDict()

    def open(self, slot: int, seed: int, prompt_length: int, num_tokens: int) -> None:
        """A request of `num_tokens` takes `slot`; one that was put aside goes on where it was. Its counts in the slot must be
        zero: `resume` puts its earlier counts in."""
        earlier = self._ended.pop(seed, None)
        spans = ((self.policy_version, prompt_length),) if earlier is None else earlier.policy_spans
        if spans[-1][0] != self.policy_version:
            spans = (*spans, (self.policy_version, num_tokens))
        if earlier is None:
            self._of_slot[slot] = _Record(seed, spans, self.head_version)
        else:
            self._counts_S2[slot] = self._archive[earlier.row]
            self._of_slot[slot] = replace(earlier, policy_spans=spans, row=-1)

    def close(self, slots: list[int]) -> None:
        """The requests of `slots` are done, or put aside."""
        known = [slot for slot in slots if slot in self._of_slot]
        for slot in known:
            record = self._of_slot.pop(slot)
            if record.is_taken:
                continue
            row = self._num_archived % MOST_KEPT
            self._archive[row] = self._counts_S2[slot]
            self._ended[record.seed] = replace(record, row=row)
            self._num_archived += 1
        while len(self._ended) > MOST_KEPT:
            self._ended.popitem(last=False)

    def policy_updated(self, version: int, total_len_S: torch.Tensor) -> None:
        """The policy has new weights from now on; requests have `total_len_S` tokens by the old ones."""
        self.policy_version = version
        lengths_S = total_len_S.cpu()
        for slot, record in self._of_slot.items():
            spans = (*record.policy_spans, (version, int(lengths_S[slot])))
            self._of_slot[slot] = replace(record, policy_spans=spans)

    def take(self, seeds: list[int]) -> list[SampleStats | None]:
        """The sample_stats of requests under way or ended; None of those that were never seen.

        vLLM frees the slot of a request in the step after its last, so one that has ended may still have a slot. A sample that
        was taken is not kept when the slot is freed.
        """
        archive, counts_S2 = self._archive.cpu(), self._counts_S2.cpu()
        slots = {record.seed: slot for slot, record in self._of_slot.items()}
        sample_stats: list[SampleStats | None] = []
        for seed in seeds:
            if seed in slots:
                slot, record = slots[seed], self._of_slot[slots[seed]]
                self._of_slot[slot] = replace(record, is_taken=True)
                sample_stats.append(self._sample_stats(record, counts_S2[slot]))
            else:
                ended = self._ended.pop(seed, None)
                sample_stats.append(None if ended is None else self._sample_stats(ended, archive[ended.row]))
        return sample_stats

    def take_ended(self) -> list[tuple[int, SampleStats]]:
        """The seed and sample of each request that ended since last asked."""
        ended, self._ended = self._ended, OrderedDict()
        archive = self._archive.cpu()
        return [(seed, self._sample_stats(record, archive[record.row])) for seed, record in ended.items()]

    def _sample_stats(self, record: _Record, counts: torch.Tensor) -> SampleStats:
        return SampleStats(
            record.policy_spans, (record.head_at_start, self.head_version), int(counts[0]), int(counts[1])
        )
