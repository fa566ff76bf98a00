# SPDX-License-Identifier: Apache-2.0
"""The context index: counts which token followed each context, in tensors of fixed size on one device.

One index serves all requests. A *salt* separates texts that must not see each other, and joins those that may. The requests
of a group share a salt. No token leaves the device, and nothing waits for it. Programs of a kernel race for the tables. A lost
update or a wrong draft costs speed and nothing else, and no access is out of bounds.

Shapes: B rows of the batch, S request slots, L longest sequence, K draft positions.
"""

import mmap
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from nemo_specrollout.drafters.base import NUM_LEVELS, Proposals, Texts
from nemo_specrollout.drafters.index_layout import BUCKET_SLOTS, NUM_CANDIDATES, SLOT_BYTES

HUGE_PAGE = 1 << 21
"""Bytes of a huge page."""
LONGEST_ORDER = 32
"""Longest context, in tokens."""
FEWEST_SLOTS = 1 << 10
"""Contexts that the smallest index holds."""
MOST_BYTES = 1 << 30
"""Bytes that an index takes at most, unless a user asks for more."""


def context_orders(shortest: int, longest: int) -> tuple[int, ...]:
    """Returns the context lengths to count: all up to 2, then every second. More would cost time and add little."""
    return (*range(shortest, min(longest, 2) + 1), *range(4, longest + 1, 2))


def slots_for(max_num_seqs: int, max_model_len: int, orders: Sequence[int], max_bytes: int = MOST_BYTES) -> int:
    """Returns the number of contexts that an index should hold, a power of two.

    Every token creates one context of each order. Rollouts of a group, and repetitions in them, share half of the contexts or
    more. So the index gets a slot for half of the contexts of `max_num_seqs` texts of full length, rounded up, within
    `max_bytes`. A smaller index only drafts less, because it forgets earlier.

    Raises ValueError if `max_bytes` is too few for any index.
    """
    if max_bytes < FEWEST_SLOTS * SLOT_BYTES:
        raise ValueError(f"an index takes at least {FEWEST_SLOTS * SLOT_BYTES} bytes, got max_bytes={max_bytes}")
    wanted = max(FEWEST_SLOTS, max_num_seqs * max_model_len * len(orders) // 2)
    affordable = max_bytes // SLOT_BYTES
    return min(1 << (wanted - 1).bit_length(), 1 << (affordable.bit_length() - 1))


class ContextIndex:
    """A hash table from (salt, last m tokens) to the tokens that followed and their counts.

    Owns `words` and `candidates`, which `index_layout.py` explains.
    Invariant: the first `learned_S[s]` tokens of request slot s have been counted.
    Example: in each step `index.learn(texts, salts_S, learned_S, max_new)`, then `index.walk(texts, salts_S, ...)`.
    """

    def __init__(self, num_slots: int, orders: tuple[int, ...], device: torch.device) -> None:
        """Creates an empty index of `num_slots` contexts; `orders` are the context lengths to count, ascending.

        Raises ValueError if `num_slots` is not a power of two, or if `orders` do not ascend within 1..LONGEST_ORDER.
        """
        if num_slots & (num_slots - 1) or num_slots < BUCKET_SLOTS:
            raise ValueError(f"num_slots must be a power of two of at least {BUCKET_SLOTS}, got {num_slots}")
        if not orders or list(orders) != sorted(set(orders)) or not 1 <= orders[0] <= orders[-1] <= LONGEST_ORDER:
            raise ValueError(f"orders must ascend and lie within 1..{LONGEST_ORDER}, got {orders}")
        self._order_bits = sum(1 << m for m in orders)
        self.words = _zeros(num_slots // BUCKET_SLOTS, BUCKET_SLOTS, device)
        self.candidates = _zeros(num_slots, NUM_CANDIDATES, device)
        self._body = _body_for(device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tables."""
        return self.words.nbytes + self.candidates.nbytes

    def learn(self, texts: Texts, salts_S: torch.Tensor, learned_S: torch.Tensor, max_new: int) -> None:
        """Counts the new tokens of each text as continuations of their contexts.

        Args:
            texts: rows whose slot is outside 0..S-1 are skipped.
            salts_S: int64, the salt under which each request reads and writes contexts.
            learned_S: int32, how many tokens were counted before; updated.
            max_new: upper bound of the new tokens of a text. The rest of a longer one waits for the next call.
        """
        self._body.learn(self.words, self.candidates, self._order_bits, texts, salts_S, learned_S, max_new)

    def walk(
        self, texts: Texts, salts_S: torch.Tensor, level_rates: torch.Tensor, floor: float, out: Proposals
    ) -> None:
        """Extends each text by the likeliest continuation of its longest known context, token by token.

        A walk ends where no context is known, or where the product of the tokens' `level_rates` (float32 [NUM_LEVELS]) falls
        below `floor`. `texts` and `salts_S` are as for `learn`. Buffers in `out` stay as they are beyond the tokens found.
        """
        assert len(level_rates) == NUM_LEVELS
        self._body.walk(self.words, self.candidates, self._order_bits, texts, salts_S, level_rates, floor, out)


def _body_for(device: torch.device) -> ModuleType:
    if device.type == "cuda":
        from nemo_specrollout.drafters import index_triton

        return index_triton
    from nemo_specrollout.drafters import index_numba

    return index_numba


def _zeros(num_rows: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """Returns int64 zeros. On a CPU they start at a huge page if the system has them: with small pages, half of the time is
    page walks."""
    if device.type != "cpu":
        return torch.zeros(num_rows, num_columns, dtype=torch.int64, device=device)
    size = num_rows * num_columns * 8
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    start = -everything.ctypes.data % HUGE_PAGE
    return torch.from_numpy(everything[start : start + size].view(np.int64).reshape(num_rows, num_columns))
