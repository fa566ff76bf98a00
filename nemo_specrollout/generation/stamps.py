# SPDX-License-Identifier: Apache-2.0
"""What is written on each sample: the weights that made it, the head that drafted for it, and how its drafts fared."""

from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numba import njit

MOST_KEPT = 1 << 16


@dataclass(frozen=True)
class Stamp:
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


class Stamps:
    """Counts for each request under way, and the stamps of those that ended, by the request's seed, until they are taken.

    `policy_version` counts weight updates of the engine, `head_version` is that of the policy whose features the head in
    service learned from.
    """

    def __init__(self, num_lanes: int) -> None:
        self.policy_version = self.head_version = 0
        self._seed_of: dict[int, int] = {}
        self._spans: dict[int, tuple[tuple[int, int], ...]] = {}
        self._head_at_start = np.zeros(num_lanes, np.int64)
        self._drafted = np.zeros(num_lanes, np.int64)
        self._accepted = np.zeros(num_lanes, np.int64)
        self._ended: OrderedDict[int, Stamp] = OrderedDict()

    def open(self, lane: int, seed: int, prompt_length: int, num_tokens: int) -> None:
        """A request of so many tokens by now takes `lane`; one that was put aside goes on where it was."""
        earlier = self._ended.pop(seed, None)
        self._seed_of[lane] = seed
        spans = ((self.policy_version, prompt_length),) if earlier is None else earlier.policy_spans
        is_same = spans[-1][0] == self.policy_version
        self._spans[lane] = spans if is_same else (*spans, (self.policy_version, num_tokens - 1))
        self._head_at_start[lane] = self.head_version if earlier is None else earlier.head_versions[0]
        self._drafted[lane] = 0 if earlier is None else earlier.num_drafted
        self._accepted[lane] = 0 if earlier is None else earlier.num_accepted

    def policy_updated(self, version: int, lanes_B: np.ndarray, num_tokens_B: np.ndarray) -> None:
        """The policy has new weights; the batch's requests have so many tokens by the old ones."""
        self.policy_version = version
        for lane, num_tokens in zip(lanes_B.tolist(), num_tokens_B.tolist(), strict=True):
            if lane in self._seed_of:
                self._spans[lane] = (*self._spans[lane], (version, num_tokens))

    def count(self, lanes_B: np.ndarray, drafted_B: np.ndarray, emitted_B: np.ndarray) -> None:
        """A step verified `drafted_B` drafts of each request, which emitted so many tokens, the last of them no draft;
        int64 [B] each."""
        _count(lanes_B, drafted_B, emitted_B, self._drafted, self._accepted)

    def close(self, lanes: list[int]) -> None:
        """The requests of `lanes` are gone, or put aside."""
        for lane in lanes:
            self._ended[self._seed_of[lane]] = self._stamp(lane)
            del self._seed_of[lane]
        while len(self._ended) > MOST_KEPT:
            self._ended.popitem(last=False)

    def take(self, seeds: list[int]) -> list[Stamp | None]:
        """The stamps of requests that ended; None of those that were never seen."""
        lane_of = {seed: lane for lane, seed in self._seed_of.items()}
        return [self._stamp(lane_of[s]) if s in lane_of else self._ended.pop(s, None) for s in seeds]

    def take_ended(self) -> list[tuple[int, Stamp]]:
        """The seed and stamp of each request that ended since last asked. One that is put aside meanwhile begins anew."""
        ended, self._ended = list(self._ended.items()), OrderedDict()
        return ended

    def _stamp(self, lane: int) -> Stamp:
        heads = (int(self._head_at_start[lane]), self.head_version)
        return Stamp(self._spans[lane], heads, int(self._drafted[lane]), int(self._accepted[lane]))


@njit("void(int64[:], int64[:], int64[:], int64[:], int64[:])", cache=True)
def _count(lanes_B, drafted_B, emitted_B, drafted, accepted):  # type: ignore[no-untyped-def]
    for b in range(len(lanes_B)):
        drafted[lanes_B[b]] += drafted_B[b]
        accepted[lanes_B[b]] += min(max(emitted_B[b] - 1, 0), drafted_B[b])
