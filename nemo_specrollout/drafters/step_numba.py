# SPDX-License-Identifier: Apache-2.0
"""A step's kernels for a CPU: the kernels of the draft board and of each context index, one after the other.

`step_triton.py` has the same functions. `DraftBoard` and `ContextIndex` say what they compute.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nemo_specrollout.drafters import board_numba, index_numba
from nemo_specrollout.drafters.base import SMALLEST_SHARE, Texts
from nemo_specrollout.drafters.device_index import Lookup

if TYPE_CHECKING:
    from nemo_specrollout.drafters.board import DraftBoard, Tables

learn, walk = index_numba.learn, index_numba.walk


def memory_of(tables: "Tables") -> Any:
    """Returns a board's tensors as arrays, which numba takes. Making them in every step would take as long as the kernels."""
    arrays: Any = (table.numpy() for table in tables)
    return type(tables)(*arrays)


def listing_buffers(num_orders: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns nothing: contexts are learned as they are found."""
    return ()


def observe(
    board: "DraftBoard",
    texts: Texts,
    outcomes: tuple[torch.Tensor, torch.Tensor],
    step: int,
    lookups: Sequence[Lookup],
    max_new: int,
) -> None:
    """Implements `DraftBoard.observe`."""
    board_numba.observe(texts, *outcomes, board.memory, step, board.witness)
    for lookup in lookups if max_new > 0 else ():
        learn(lookup, texts, max_new)


def choose(board: "DraftBoard", texts: Texts, row_price: float, lookups: Sequence[Lookup]) -> None:
    """Implements `DraftBoard.choose`."""
    rates_DL: Any = board.level_rates_DL if lookups else None
    for lookup in lookups:
        walk(lookup, texts, rates_DL[lookup.drafter], SMALLEST_SHARE, board.proposals_of(lookup.drafter))
    board_numba.choose(texts, board.memory, board.model, board.witness, row_price)
