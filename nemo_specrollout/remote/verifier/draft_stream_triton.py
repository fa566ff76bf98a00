# SPDX-License-Identifier: Apache-2.0
"""The GPU kernel of `draft_stream.py`, which computes the proposals of remote drafters, with one program per request."""

import torch
import triton
import triton.language as tl

from nemo_specrollout.remote.protocol import draft_buffers

_BASE, _COUNT, _TOKENS = (tl.constexpr(c) for c in (draft_buffers.BASE, draft_buffers.COUNT, draft_buffers.TOKENS))


@triton.jit
def _align(  # type: ignore[no-untyped-def]
    slots_ptr, total_len_ptr, token_ids_ptr, token_ids_stride, table_ptr, tokens_ptr, tokens_stride, levels_ptr,
    levels_stride, found_ptr, counts_ptr, MAX_AHEAD: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if slot < 0:
        tl.store(found_ptr + request, 0)
        return
    row = table_ptr + slot * (_TOKENS + 2 * MAX_AHEAD)
    base = tl.load(row + _BASE)
    count = tl.minimum(tl.load(row + _COUNT), MAX_AHEAD)
    offset = tl.load(total_len_ptr + slot) - base
    is_near = (base >= 0) & (offset >= 0) & (offset < count)
    i = tl.arange(0, BLOCK)
    token = tl.load(row + _TOKENS + i, mask=i < count, other=0)
    is_past = i < tl.where(is_near, offset, 0)
    text = tl.load(token_ids_ptr + slot * token_ids_stride + base + i, mask=is_past, other=0)
    is_right = tl.sum((is_past & (token != text)).to(tl.int32), axis=0) == 0
    found = tl.where(is_near & is_right, tl.minimum(count - offset, K), 0)
    k = i - offset
    is_draft = tl.where(k >= 0, k, K) < found
    tl.store(tokens_ptr + request * tokens_stride + k, token, mask=is_draft)
    level = tl.load(row + _TOKENS + MAX_AHEAD + i, mask=is_draft, other=0)
    tl.store(levels_ptr + request * levels_stride + k, level.to(tl.int8), mask=is_draft)
    tl.store(found_ptr + request, found)
    tl.atomic_add(counts_ptr, 1)
    tl.atomic_add(counts_ptr + 1, (found > 0).to(tl.int64))
    tl.atomic_add(counts_ptr + 2, found.to(tl.int64))


def align(
    slots_B: torch.Tensor,
    total_len_S: torch.Tensor,
    token_ids_SL: torch.Tensor,
    table_SX: torch.Tensor,
    tokens_BK: torch.Tensor,
    levels_BK: torch.Tensor,
    found_B: torch.Tensor,
    counts_3: torch.Tensor,
) -> None:
    """Writes up to K draft tokens of each request, their evidence levels, and how many they are.

    These go to `tokens_BK`, `levels_BK` and `found_B`. `table_SX` is the draft stream's table. Its tokens were drafted for an
    earlier, shorter text of the request. If the first of these tokens equal those that the request has sampled since, the rest
    of them is written. Otherwise the request gets no draft tokens. `counts_3` is increased (see `DraftStream.counts_3`).
    """
    most_ahead = (table_SX.shape[1] - draft_buffers.TOKENS) // 2
    _align[(len(slots_B),)](
        slots_B, total_len_S, token_ids_SL, token_ids_SL.stride(0), table_SX, tokens_BK, tokens_BK.stride(0), levels_BK,
        levels_BK.stride(0), found_B, counts_3, MAX_AHEAD=most_ahead, K=tokens_BK.shape[1],
        BLOCK=triton.next_power_of_2(most_ahead), num_warps=1,
    )  # fmt: skip
