# SPDX-License-Identifier: Apache-2.0
"""GPU kernels that serve the draft board and all context indexes of an engine together.

In an engine step, `_observe` and `_learn` read the sampled tokens, and `_propose` proposes drafts and chooses among them.
`DraftBoard` and `ContextIndex` say what the kernels compute. A board without indexes works too, and so does an index without a
board. A program is a single warp, because it mostly waits for memory and there are many programs.

Shapes and constants are as in `board.py` and `index_triton.py`. D is 0 without a board. The constants of the indexes are
passed as one tuple for each constant, because Triton 3.6 does not support records of constants.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from nemo_specrollout.drafters.base import NUM_LEVELS, SMALLEST_SHARE, Proposals, RowPrice, Texts, num_looked_up
from nemo_specrollout.drafters.board_triton import Sums, choose_for_request, level_rates, observe_request
from nemo_specrollout.drafters.device_index import MAX_LISTED, Lookup
from nemo_specrollout.drafters.index_triton import (
    BLOCK,
    Index,
    learn_listed,
    list_contexts,
    record_learned,
    walk_row,
)

if TYPE_CHECKING:
    from nemo_specrollout.drafters.board import DraftBoard, Tables

MAX_PARTS = 512
"""Largest number of programs among which the buckets of an index are divided."""
MAX_PROGRAMS = 1 << 14
"""Largest number of programs of a kernel launch."""
_NUM_LEVELS = tl.constexpr(NUM_LEVELS)
# Triton must not specialize kernels for 1 and multiples of 16, because that is not worth another compilation.
_INTEGERS = ["row_stride", "num_slots", "longest", "max_new", "num_rows", "step"]


class BoardMemory(NamedTuple):
    """The tensors of a draft board, with buffers for what each engine step adds to them."""

    tables: "Tables"
    sums: Sums


@triton.jit
def _given(number, number_ptr):  # type: ignore[no-untyped-def]
    """Returns `number`, or in a CUDA graph the number at `number_ptr`, which may change between replays."""
    if number_ptr is not None:
        number = tl.load(number_ptr)
    return number


@triton.jit(do_not_specialize=_INTEGERS)
def _observe(  # type: ignore[no-untyped-def]
    texts, row_stride, num_slots, longest, max_new, outcomes, board, indexes, step, step_ptr, D: tl.constexpr,
    K: tl.constexpr, E: tl.constexpr, ORDER_BITS: tl.constexpr, NUM_ORDERS: tl.constexpr,
    LANES: tl.constexpr, BUCKET_MASK: tl.constexpr,
):  # fmt: skip
    """Learns from the tokens that an engine step has sampled, and lists the new contexts for `_learn`.

    If there is a board, program (b, 0) learns from entry b of the batch. The other programs (b, ...) divide the new tokens of
    the entry's text among themselves.
    """
    step = _given(step, step_ptr)
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    if D > 0:
        part = part - 1
        num_parts = num_parts - 1
        if part < 0:
            observe_request(texts, row_stride, outcomes, board.tables, board.sums, row, num_rows, step, D, K, E)
    if part >= 0:
        for i in tl.static_range(len(LANES)):
            list_contexts(
                indexes[i], texts, row_stride, num_slots, longest, max_new, row, num_rows, part, num_parts, ORDER_BITS[i],
                NUM_ORDERS[i], LANES[i],
            )  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS)
def _learn(  # type: ignore[no-untyped-def]
    texts, num_slots, longest, max_new, num_rows, indexes, ORDER_BITS: tl.constexpr, NUM_ORDERS: tl.constexpr,
    LANES: tl.constexpr, BUCKET_MASK: tl.constexpr,
):  # fmt: skip
    """Counts the contexts that `_observe` has listed. Program (p, i) serves part p of the buckets of index i."""
    part = tl.program_id(0)
    num_parts = tl.num_programs(0)
    for i in tl.static_range(len(LANES)):
        if tl.program_id(1) == i:
            learn_listed(indexes[i], part, num_parts, NUM_ORDERS[i], BUCKET_MASK[i])
            if part == 0:
                record_learned(indexes[i], texts, num_slots, longest, max_new, num_rows)


@triton.jit(do_not_specialize=[*_INTEGERS, "row_price", "context_price", "mean_price", "most_drafts", "floor"])
def _propose(  # type: ignore[no-untyped-def]
    texts, row_stride, num_slots, longest, t, row_price, row_price_ptr, context_price, context_price_ptr, mean_price,
    mean_price_ptr, most_drafts, most_drafts_ptr, indexes, outs, level_rates_ptr, floor, MODEL: tl.constexpr,
    REFERENCE: tl.constexpr, S: tl.constexpr, D: tl.constexpr, K: tl.constexpr, MOST: tl.constexpr, E: tl.constexpr,
    DRAFTERS: tl.constexpr, ORDER_BITS: tl.constexpr, NUM_ORDERS: tl.constexpr, LANES: tl.constexpr, BUCKET_MASK: tl.constexpr,
):  # fmt: skip
    """Proposes drafts. Program b serves entry b of the batch, and first proposes tokens from each context index.

    If there is a board, the program then chooses among the proposals of all drafters.
    """
    row_price = _given(row_price, row_price_ptr)
    context_price = _given(context_price, context_price_ptr)
    mean_price = _given(mean_price, mean_price_ptr)
    most_drafts = _given(most_drafts, most_drafts_ptr)
    row = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(len(LANES)):
        rate_G = level_rates(t, DRAFTERS[i], E) if D > 0 else tl.load(level_rates_ptr + tl.arange(0, _NUM_LEVELS))
        walk_row(
            indexes[i], texts, row_stride, num_slots, longest, row, rate_G, floor, outs[i], K, MOST, ORDER_BITS[i],
            LANES[i], BUCKET_MASK[i],
        )  # fmt: skip
    if D > 0:
        tl.debug_barrier()  # all drafts of the walks are written
        choose_for_request(
            texts, t, row, row_price, context_price, mean_price, most_drafts, MODEL, REFERENCE, S, D, K, E
        )


def memory_of(tables: "Tables") -> BoardMemory:
    """Returns the tensors of a board, and new buffers for what each engine step adds to these tensors."""
    num_slots = len(tables.limit_S)
    num_drafters = len(tables.evidence_DE2)
    shared = (tables.evidence_DE2, tables.steps_TD2[0])
    evidence_DE2, steps_D2 = (torch.zeros_like(table, dtype=torch.int32) for table in shared)
    weight_BW = tables.rates_SK.new_zeros(num_slots, 4 * num_drafters + 2)
    return BoardMemory(tables, Sums(evidence_DE2, steps_D2, steps_D2.new_zeros(1), weight_BW))


def empty_table(num_rows: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """Returns a tensor of int64 zeros, [num_rows, num_columns], for the words or candidates of an index."""
    return torch.zeros(num_rows, num_columns, dtype=torch.int64, device=device)


def listing_buffers(num_orders: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Allocates buffers for the contexts that an engine step learns. They become the last three fields of `Index`."""
    keys_NM = torch.zeros(MAX_LISTED, num_orders, dtype=torch.int64, device=device)
    return keys_NM, keys_NM.new_zeros(MAX_LISTED, dtype=torch.int32), keys_NM.new_zeros(1, dtype=torch.int32)


def observe(
    board: "DraftBoard",
    texts: Texts,
    outcomes: tuple[torch.Tensor, torch.Tensor],
    step: int | torch.Tensor,
    lookups: Sequence[Lookup],
    max_new: int,
) -> None:
    """Launches the kernels that learn from an engine step's tokens, for `DraftBoard.observe`."""
    _launch_observe(texts, lookups, max_new, outcomes, board.memory, step, **_sizes(board))


def learn(lookup: Lookup, texts: Texts, max_new: int) -> None:
    """Launches the kernels that count the new tokens of texts, for `ContextIndex.learn`."""
    _launch_observe(texts, [lookup], max_new, None, None, 0, D=0, K=0, E=0)


def _launch_observe(
    texts: Texts, lookups: Sequence[Lookup], max_new: int, outcomes: Any, memory: Any, step: Any, **constants: int
) -> None:
    """Launches `_observe`, and `_learn` if there may be new tokens for an index. `memory` is None without a board."""
    num_rows = len(texts.slots_B)
    (num_slots, longest) = _bounds(texts, lookups)
    max_new = min(max_new, longest) if lookups else 0
    num_parts = min(triton.cdiv(max_new, BLOCK), max(1, MAX_PROGRAMS // num_rows))
    indexes = tuple(map(_index, lookups))
    bounds = (num_slots, longest, max_new)
    shapes = _shapes(lookups)
    _observe[(num_rows, num_parts + (memory is not None))](
        texts,
        texts.token_ids_SL.stride(0),
        *bounds,
        outcomes,
        memory,
        indexes,
        *_number(step),
        num_warps=1,
        **constants,
        **shapes,
    )
    if max_new > 0:
        num_parts = min(MAX_PARTS, *(len(lookup.index.words) for lookup in lookups))
        _learn[(num_parts, len(lookups))](texts, *bounds, num_rows, indexes, num_warps=1, **shapes)


def choose(board: "DraftBoard", texts: Texts, price: RowPrice, lookups: Sequence[Lookup], most: Any) -> None:
    """Launches the kernel that proposes from the context indexes and chooses among all proposals, for `DraftBoard.choose`."""
    walks = [(lookup, board.proposals_of(lookup.drafter)) for lookup in lookups]
    constants = {"MODEL": board.model, "REFERENCE": board.reference, "S": len(board.tables.limit_S), **_sizes(board)}
    numbers = (number for value in (*price, most) for number in _number(value))
    _launch_propose(texts, walks, None, SMALLEST_SHARE, (board.tables, *numbers), **constants)


def walk(lookup: Lookup, texts: Texts, level_rates: torch.Tensor, floor: float, out: Proposals) -> None:
    """Launches the kernel that proposes from one context index, for `ContextIndex.walk`.

    The buffers in `out` must be contiguous, and must have as many rows as the batch has entries.
    """
    assert out.tokens_BK.is_contiguous() and out.levels_BK.shape == out.tokens_BK.shape
    constants = {"MODEL": -1, "REFERENCE": -1, "S": 0, "D": 0, "K": out.tokens_BK.shape[1], "E": 0}
    _launch_propose(texts, [(lookup, out)], level_rates, floor, (None, *3 * _number(0.0), *_number(0)), **constants)


def _launch_propose(
    texts: Texts,
    walks: Sequence[tuple[Lookup, Proposals]],
    level_rates: torch.Tensor | None,
    floor: float,
    choice: tuple[Any, ...],
    **constants: int,
) -> None:
    lookups = [lookup for lookup, _ in walks]
    _propose[(len(texts.slots_B),)](
        texts, texts.token_ids_SL.stride(0), *_bounds(texts, lookups), *choice, tuple(map(_index, lookups)),
        tuple(out for _, out in walks), level_rates, floor, DRAFTERS=tuple(u.drafter for u in lookups), num_warps=1,
        MOST=num_looked_up(constants["K"]), **constants, **_shapes(lookups),
    )  # fmt: skip


def _number(value: float | torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """Returns two kernel arguments for one number, which are its value and a pointer.

    If `value` is a tensor, the kernel reads the number from it, and the first argument is 0. Otherwise the pointer is None.
    """
    return (0, value) if isinstance(value, torch.Tensor) else (value, None)


def _sizes(board: "DraftBoard") -> dict[str, int]:
    num_drafters, num_kinds, _ = board.tables.evidence_DE2.shape
    return {"D": num_drafters, "K": board.num_positions, "E": num_kinds}


def _bounds(texts: Texts, lookups: Sequence[Lookup]) -> tuple[int, int]:
    """Returns the number of request slots, and the largest number of tokens that a text can have."""
    num_slots, longest = texts.token_ids_SL.shape
    return min(num_slots, len(texts.total_len_S), *(len(lookup.learned_S) for lookup in lookups)), longest


def _index(lookup: Lookup) -> Index:
    index = lookup.index
    return Index(index.words, index.candidates, lookup.salts_S, lookup.learned_S, *index.listed)


def _shapes(lookups: Sequence[Lookup]) -> dict[str, tuple[int, ...]]:
    """Returns the compile-time constants of the indexes, each as a tuple with a value for each index."""
    orders = [lookup.index.orders for lookup in lookups]
    return {
        "ORDER_BITS": tuple(sum(1 << m for m in each) for each in orders),
        "NUM_ORDERS": tuple(map(len, orders)),
        "LANES": tuple(triton.next_power_of_2(each[-1]) for each in orders),
        "BUCKET_MASK": tuple(len(lookup.index.words) - 1 for lookup in lookups),
    }
