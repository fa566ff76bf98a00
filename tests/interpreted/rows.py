# SPDX-License-Identifier: Apache-2.0
"""Random but consistent rows of logits: requests, their slots, and rows after drafts."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Size:
    """Size of a batch. A kernel's blocks have 1024 or 8192 tokens."""

    name: str
    num_reqs: int
    num_drafts: int
    vocab_size: int
    dtype: torch.dtype = torch.float32


SIZES = (
    Size("one_row", 1, 0, 50),
    Size("drafts", 6, 3, 1500),
    Size("block", 4, 1, 1024, torch.bfloat16),
    Size("many_blocks", 3, 2, 9001),
)


class Rows:
    """One batch of `size`, the same for the same seed. Slots are rows of the runner's state, in random order."""

    def __init__(self, size: Size, seed: int = 0) -> None:
        self.size, self.vocab_size = size, size.vocab_size
        self.rng = np.random.default_rng(seed)
        self.num_reqs, self.max_reqs = size.num_reqs, size.num_reqs + 3
        slots = self.rng.permutation(self.max_reqs)[: self.num_reqs]
        num_rows = self.rng.integers(1, size.num_drafts + 2, self.num_reqs)
        num_rows[-1] = size.num_drafts + 1
        self.slots = torch.from_numpy(slots).int()
        self.cu_num_logits = torch.from_numpy(np.concatenate([[0], np.cumsum(num_rows)])).int()
        self.num_rows = int(num_rows.sum())
        self.idx = torch.from_numpy(np.repeat(slots, num_rows)).int()
        self.local = torch.from_numpy(np.concatenate([np.arange(n) for n in num_rows])).int()

    def ints(self, *shape: int, high: int, low: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(self.rng.integers(low, high, shape)).to(dtype)

    def floats(self, *shape: int, choices: tuple[float, ...] = ()) -> Tensor:
        values = self.rng.choice(choices, shape) if choices else self.rng.standard_normal(shape) * 3
        return torch.from_numpy(values).float()

    def tokens(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return self.ints(*shape, high=self.vocab_size, dtype=dtype)

    def distinct_tokens(self, num_rows: int, num: int) -> Tensor:
        rows = [self.rng.choice(self.vocab_size, num, replace=False) for _ in range(num_rows)]
        return torch.from_numpy(np.stack(rows)).int()

    def logits(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns rows with padding between them. A tenth of the logits is -inf, and bfloat16 makes some equal."""
        buffer = self.floats(self.num_rows, self.vocab_size + 7).to(dtype or self.size.dtype)
        buffer[torch.from_numpy(self.rng.random(buffer.shape) < 0.1)] = -torch.inf
        return buffer[:, : self.vocab_size]

    def comparable_logits(self) -> Tensor:
        """Returns logits of a type that Triton's interpreter can compare: it compares bfloat16 by its bits."""
        return self.logits(torch.float32 if self.size.dtype == torch.bfloat16 else None)

    def processed_logits(self) -> Tensor:
        """Returns float32 logits, the type that vLLM's logits processors get."""
        return self.logits(torch.float32)
