# SPDX-License-Identifier: Apache-2.0
"""The GPU kernel of the drafter `ahead`, with one program for each request. `ahead.py` says what it computes.

In the kernel, `t` are the `PathTables`. Shapes are as in `ahead.py`.
"""

import triton
import triton.language as tl

from nemo_specrollout.drafters import ahead
from nemo_specrollout.drafters.ahead import PathTables
from nemo_specrollout.drafters.base import NUM_LEVELS, Proposals, Texts

_ENOUGH = tl.constexpr(ahead.ENOUGH)
_FARTHEST = tl.constexpr(ahead.FARTHEST)
_NUM_LEVELS = tl.constexpr(NUM_LEVELS)
_WINDOW = tl.constexpr(ahead.WINDOW)
_NUM_OFFSETS = tl.constexpr(triton.next_power_of_2(2 * ahead.FARTHEST + 1))


@triton.jit
def _read(t, path, place, longest):  # type: ignore[no-untyped-def]
    """Returns the tokens of a path at the positions `place`, or -1 at positions where the path has no token."""
    is_known = (place >= tl.load(t.begin_SP + path)) & (place < tl.load(t.end_SP + path))
    return tl.load(t.tokens_SPL + path * longest + place, mask=is_known, other=-1)


@triton.jit(do_not_specialize=["row_stride", "num_slots"])
def _follow_path(  # type: ignore[no-untyped-def]
    texts, row_stride, num_slots, t, longest, out, most, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(texts.slots_B + row).to(tl.int64)
    num_paths = tl.load(t.num_paths_S + slot, mask=(slot >= 0) & (slot < num_slots), other=0)
    if num_paths == 0:
        tl.store(out.found_B + row, 0)
        return
    length = tl.load(texts.total_len_S + slot).to(tl.int64)
    w = tl.arange(0, _WINDOW)
    column_W = length - 1 - w  # the latest token first
    latest_W = tl.load(texts.token_ids_SL + slot * row_stride + column_W, mask=column_W >= 0, other=-2)
    current = tl.load(t.path_S + slot).to(tl.int64)
    here_W = _read(t, slot * P + current, column_W + tl.load(t.shift_SP + slot * P + current), longest)
    run = tl.min(tl.where(here_W == latest_W, _WINDOW, w), axis=0)
    for p in tl.static_range(P):
        if p < num_paths:
            path = slot * P + p
            there_W = _read(t, path, column_W + tl.load(t.shift_SP + path), longest)
            run_there = tl.min(tl.where(there_W == latest_W, _WINDOW, w), axis=0)
            current = tl.where(run_there > run, p, current)
            run = tl.maximum(run, run_there)
    path = slot * P + current
    shift = tl.load(t.shift_SP + path)
    offset_O = tl.arange(0, _NUM_OFFSETS) - _FARTHEST
    around_OW = _read(t, path, (column_W + shift)[None, :] + offset_O[:, None], longest)
    run_O = tl.min(tl.where(around_OW == latest_W[None, :], _WINDOW, w[None, :]), axis=1)
    score_O = tl.where(offset_O <= _FARTHEST, run_O * (_FARTHEST + 1) - tl.abs(offset_O), -_FARTHEST - 1)
    best = tl.max(score_O, axis=0, return_indices=True)[1] - _FARTHEST
    best_run = tl.max(tl.where(offset_O == best, run_O, 0), axis=0)
    moved = tl.where(best_run - 2 * run >= _ENOUGH, best, 0)
    shift += moved
    tl.debug_barrier()  # all lanes have read the path and its shift
    tl.store(t.path_S + slot, current.to(tl.int32))
    tl.store(t.shift_SP + path, shift)
    agrees_W = _read(t, path, column_W + shift, longest) == latest_W
    level = tl.minimum(tl.maximum(tl.sum(agrees_W.to(tl.int32), axis=0) - 1, 0), _NUM_LEVELS - 1)
    first = length + shift
    found = tl.minimum(tl.maximum(tl.load(t.end_SP + path) - first, 0), most)
    tl.store(out.found_B + row, found.to(tl.int32))
    for start in range(0, most, BLOCK):
        k = start + tl.arange(0, BLOCK)
        tl.store(out.tokens_BK + row * most + k, _read(t, path, first + k, longest), mask=k < most)
        tl.store(out.levels_BK + row * most + k, tl.zeros_like(k).to(tl.int8) + level.to(tl.int8), mask=k < most)


def propose(tables: PathTables, texts: Texts, out: Proposals) -> None:
    """Launches the kernel that writes the proposals of the drafter `ahead` to `out`, for `AheadText.launch`."""
    most = out.tokens_BK.shape[1]
    num_slots, num_paths, longest = tables.tokens_SPL.shape
    _follow_path[(len(texts.slots_B),)](
        texts, texts.token_ids_SL.stride(0), num_slots, tables, longest, out, most, P=num_paths,
        BLOCK=min(triton.next_power_of_2(most), 128), num_warps=1,
    )  # fmt: skip
