# SPDX-License-Identifier: Apache-2.0
"""The kernels of an engine step on a CPU. `observe` and `choose` each call one of the draft board and one of each context
index.

`DraftBoard` and `ContextIndex` say what the kernels compute.
"""

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lab.vllm_on_cpu.own_kernels import board as board_kernels
from lab.vllm_on_cpu.own_kernels import index as index_kernels
from nemo_specrollout.drafters.base import NUM_LEVELS, SMALLEST_SHARE, RowPrice, Texts
from nemo_specrollout.drafters.device_index import Lookup

if TYPE_CHECKING:
    from nemo_specrollout.drafters.board import DraftBoard, Tables

HUGE_PAGE = 1 << 21
"""Bytes of a huge page."""
learn, walk = index_kernels.learn, index_kernels.walk


def memory_of(tables: "Tables") -> Any:
    """Returns a draft board's tensors as arrays for numba.

    The board keeps them, because making them in every engine step would take as long as the kernels.
    """
    arrays: Any = (table.numpy() for table in tables)
    return type(tables)(*arrays)


def empty_table(num_rows: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """Returns int64 zeros [num_rows, num_columns], in huge pages of memory if possible.

    With small pages, a kernel spends half of its time on page walks.
    """
    size = num_rows * num_columns * 8
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    start = -everything.ctypes.data % HUGE_PAGE
    return torch.from_numpy(everything[start : start + size].view(np.int64).reshape(num_rows, num_columns))


def listing_buffers(num_orders: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns no buffers, because a CPU learns contexts as it finds them."""
    return ()


def observe(
    board: "DraftBoard",
    texts: Texts,
    outcomes: tuple[torch.Tensor, torch.Tensor],
    step: int,
    lookups: Sequence[Lookup],
    max_new: int,
) -> None:
    """Implements `DraftBoard.observe` on a CPU."""
    board_kernels.observe(texts, *outcomes, board.memory, step)
    for lookup in lookups if max_new > 0 else ():
        learn(lookup, texts, max_new)


def choose(board: "DraftBoard", texts: Texts, price: RowPrice, lookups: Sequence[Lookup], most: int) -> None:
    """Implements `DraftBoard.choose` on a CPU."""
    rates_DL: Any = level_rates(board) if lookups else None
    for lookup in lookups:
        walk(lookup, texts, rates_DL[lookup.drafter], SMALLEST_SHARE, board.proposals_of(lookup.drafter))
    board_kernels.choose(texts, board.memory, board.model, board.reference, *price, most)


def level_rates(board: "DraftBoard") -> torch.Tensor:
    """Returns the share of hits of each of the L = NUM_LEVELS evidence levels, over all relations, float32 [D, L]."""
    tried_DL2 = board.tables.evidence_DE2.unflatten(1, (-1, NUM_LEVELS)).sum(dim=1)
    return tried_DL2[..., 0] / tried_DL2[..., 1]
