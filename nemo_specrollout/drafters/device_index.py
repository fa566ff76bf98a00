# SPDX-License-Identifier: Apache-2.0
"""Which token followed a context: counts by the hash of the last m tokens, in tensors of fixed size on one device.

One index serves every request. A `salt` separates texts that must not see each other, and joins those that may: requests
of one group share theirs. No token leaves the device and nothing waits for it. Programs of a kernel race for the tables:
a lost update or a wrong draft costs speed, never more, and nothing is read or written out of bounds.

Shapes: B rows of the batch, S request slots, L longest sequence, K draft positions.
"""

import mmap
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from nemo_specrollout.drafters.base import NUM_LEVELS
from nemo_specrollout.drafters.index_layout import BUCKET_SLOTS, NUM_CANDIDATES, SLOT_BYTES

HUGE_PAGE = 1 << 21
LONGEST_ORDER = 32
FEWEST_SLOTS = 1 << 10
MOST_BYTES = 1 << 30


def context_orders(shortest: int, longest: int) -> tuple[int, ...]:
    """Context lengths to count: up to 2, then every second. More would cost time and tell little more."""
    return (*range(shortest, min(longest, 2) + 1), *range(4, longest + 1, 2))


def slots_for(max_num_seqs: int, max_model_len: int, orders: Sequence[int], max_bytes: int = MOST_BYTES) -> int:
    """How many contexts an index needs to have room for, a power of two.

    Every token makes a context of each order; the rollouts of a group, and repetitions in each, share half of them or
    more. So there is a slot for half of what `max_num_seqs` texts of full length hold, rounded up, as far as `max_bytes`
    allow. Too few cost drafts, not errors: the index then knows what was written lately.
    """
    if max_bytes < FEWEST_SLOTS * SLOT_BYTES:
        raise ValueError(f"an index takes at least {FEWEST_SLOTS * SLOT_BYTES} bytes, got max_bytes={max_bytes}")
    wanted = max(FEWEST_SLOTS, max_num_seqs * max_model_len * len(orders) // 2)
    affordable = max_bytes // SLOT_BYTES
    return min(1 << (wanted - 1).bit_length(), 1 << (affordable.bit_length() - 1))


class ContextIndex:
    """A hash table from (salt, last m tokens) to the tokens seen next and how often; owns the tables.

    `orders` are the context lengths m, ascending. `words` int64 [slots / 8, 8] hold the contexts, `candidates` int64
    [slots, 4] what followed them (`index_layout`). Invariant: `learned_S[s]` tokens of request slot s have been counted.
    Example, each step: `learn` with the bound that the host knows of new tokens, then `walk`.
    """

    def __init__(self, num_slots: int, orders: tuple[int, ...], device: torch.device) -> None:
        if num_slots & (num_slots - 1) or num_slots < BUCKET_SLOTS:
            raise ValueError(f"num_slots must be a power of two of at least {BUCKET_SLOTS}, got {num_slots}")
        if not orders or list(orders) != sorted(set(orders)) or not 1 <= orders[0] <= orders[-1] <= LONGEST_ORDER:
            raise ValueError(f"orders must ascend and lie within 1..{LONGEST_ORDER}, got {orders}")
        self.orders = orders
        self._order_bits = sum(1 << m for m in orders)
        self.words = _zeros(num_slots // BUCKET_SLOTS, BUCKET_SLOTS, device)
        self.candidates = _zeros(num_slots, NUM_CANDIDATES, device)
        self._body = _body_for(device)

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.candidates.nbytes

    def learn(
        self,
        idx_mapping_B: torch.Tensor,
        salts_S: torch.Tensor,
        learned_S: torch.Tensor,
        total_len_S: torch.Tensor,
        token_ids_SL: torch.Tensor,
        max_new: int,
    ) -> None:
        """Counts what is new in the text of each row's request slot as continuations of what precedes it.

        Args:
            idx_mapping_B: int32 or int64, the request slot of each row, none twice; rows outside 0..S-1 are skipped.
            salts_S: int64, whose contexts a request reads and writes.
            learned_S: int32, how many tokens were counted before; set to how many are now.
            total_len_S: int32, how many tokens the request has.
            token_ids_SL: int32; rows may be strided, or in host memory that the device reads.
            max_new: no request has more new tokens than this; the rest of one that has waits for the next call.
        """
        self._body.learn(
            self.words, self.candidates, self._order_bits, idx_mapping_B, salts_S, learned_S, total_len_S, token_ids_SL,
            max_new,
        )  # fmt: skip

    def walk(
        self,
        idx_mapping_B: torch.Tensor,
        salts_S: torch.Tensor,
        total_len_S: torch.Tensor,
        token_ids_SL: torch.Tensor,
        level_rates: torch.Tensor,
        floor: float,
        tokens_BK: torch.Tensor,
        levels_BK: torch.Tensor,
        found_B: torch.Tensor,
    ) -> None:
        """Extends each request by the likeliest continuation of its longest known context, again and again.

        Stops where none is known or the product of `level_rates` (float32 [NUM_LEVELS]) falls below `floor`. Writes
        tokens int32 [B, K], their evidence levels int8 [B, K], and how many were found int32 [B]; beyond those,
        `tokens_BK` and `levels_BK` stay as they were. Other arguments as for `learn`.
        """
        assert len(level_rates) == NUM_LEVELS
        self._body.walk(
            self.words, self.candidates, self._order_bits, idx_mapping_B, salts_S, total_len_S, token_ids_SL,
            level_rates, floor, tokens_BK, levels_BK, found_B,
        )  # fmt: skip


def _body_for(device: torch.device) -> ModuleType:
    if device.type == "cuda":
        from nemo_specrollout.drafters import index_triton

        return index_triton
    from nemo_specrollout.drafters import index_numba

    return index_numba


def _zeros(num_rows: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """int64 zeros, on a CPU from the start of a huge page, where the system has them: with small ones, half of the
    waiting is for page walks."""
    if device.type != "cpu":
        return torch.zeros(num_rows, num_columns, dtype=torch.int64, device=device)
    size = num_rows * num_columns * 8
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    start = -everything.ctypes.data % HUGE_PAGE
    return torch.from_numpy(everything[start : start + size].view(np.int64).reshape(num_rows, num_columns))
