# SPDX-License-Identifier: Apache-2.0
"""Random but consistent batches of the V2 model runner: prefills, decodes, drafted and accepted tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PAD = -1
VOCAB = 50
IDLE, CHUNK, LAST_CHUNK, DECODE = range(4)


@dataclass(frozen=True)
class Size:
    """Size of a batch. `longest` is the longest prefill chunk, which may exceed a kernel's block of 1024."""

    name: str
    num_reqs: int
    num_drafts: int
    longest: int
    dtype: torch.dtype = torch.float32
    has_padding: bool = False


SIZES = (
    Size("one_request", 1, 0, 1),
    Size("decode", 5, 3, 1, has_padding=True),
    Size("chunked_prefill", 6, 2, 20, torch.bfloat16),
    Size("long_rows", 3, 4, 2100),
)


class World:
    """One batch of `size`, the same for the same seed.

    Slots are rows of the runner's state, in random order. `idx` may hold -1 for a request that has left.
    """

    def __init__(self, size: Size, seed: int = 0) -> None:
        self.size, self.rng = size, np.random.default_rng(seed)
        self.num_reqs = size.num_reqs
        self.num_steps = max(size.num_drafts, 2)
        self.max_reqs = size.num_reqs + 3
        self.max_len = 2 * size.longest + 64
        self.hidden_size = 1100 if size.longest == 20 else 24
        B = self.num_reqs
        self.slots = self.rng.permutation(self.max_reqs)[:B]
        self.kinds = self.rng.permutation(np.arange(B) % 3 + CHUNK) if size.longest > 1 else np.full(B, DECODE)
        decodes = self.kinds == DECODE
        self.num_drafts = np.where(decodes, self.rng.integers(0, size.num_drafts + 1, B), 0)
        self.num_drafts[np.flatnonzero(decodes)[:1]] = size.num_drafts
        lengths = np.where(decodes, self.num_drafts + 1, self.rng.integers(1, size.longest + 1, B))
        lengths[np.flatnonzero(~decodes)[:1]] = size.longest
        computed = np.where(decodes, self.rng.integers(30, 40, B), self.rng.integers(0, 30, B))
        prefill = computed + lengths + np.where(self.kinds == CHUNK, 5, 0)
        prefill[decodes] = self.rng.integers(1, 30, B)[decodes]
        accepted = self.rng.integers(0, self.num_drafts + 1)
        self.accepted = np.where(decodes, accepted, 0)
        sampled = np.where(self.kinds == CHUNK, 0, self.accepted + 1)
        rejected = np.where(decodes, self.num_drafts - self.accepted, 0)
        self.lengths, self.num_tokens = lengths, int(lengths.sum())
        self.query_start_loc = self.cumulative(lengths)
        self.cu_num_logits = self.cumulative(self.num_drafts + 1)
        self.num_rows = int(self.cu_num_logits[-1])
        self.seq_lens = torch.from_numpy(computed + lengths).int()
        self.num_sampled, self.num_rejected = torch.from_numpy(sampled).int(), torch.from_numpy(rejected).int()
        self.prefill_len, self.num_computed = self.at_slots(prefill), self.at_slots(computed)
        self.total_len = self.at_slots(np.maximum(prefill, computed + 1))
        self.positions = self.ints(self.num_tokens + 7, high=self.max_len, dtype=torch.int64)
        for b in range(B):
            start = int(self.query_start_loc[b])
            self.positions[start : start + lengths[b]] = torch.arange(computed[b], computed[b] + lengths[b])

    @staticmethod
    def cumulative(lengths: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int()

    def at_slots(self, values_B: np.ndarray) -> Tensor:
        """Returns the requests' values at their slots of the runner's state, int32. Other slots are random."""
        state = self.ints(self.max_reqs, high=9)
        state[torch.from_numpy(self.slots)] = torch.from_numpy(values_B).int()
        return state

    def ints(self, *shape: int, high: int = VOCAB, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(self.rng.integers(0, high, shape)).to(dtype)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape) * 3).to(dtype)

    def idx(self, may_be_gone: bool = False) -> Tensor:
        """Returns the requests' slots, int64, from a larger tensor. The second is -1 if the size has padding."""
        buffer = self.ints(self.max_reqs, dtype=torch.int64)
        buffer[: self.num_reqs] = torch.from_numpy(self.slots)
        if may_be_gone and self.size.has_padding:
            buffer[1] = PAD
        return buffer[: self.num_reqs]

    def rows(self) -> tuple[Tensor, Tensor]:
        """Returns the slot, and the place in its request, of each row of logits."""
        counts = torch.from_numpy(self.num_drafts + 1)
        local = torch.cat([torch.arange(n) for n in counts]).int()
        return torch.from_numpy(self.slots).repeat_interleave(counts), local

    def drafted(self) -> Tensor:
        """Returns the input token of each row of logits, int32: a draft, except in a request's first row."""
        return self.ints(self.num_rows)
