# SPDX-License-Identifier: Apache-2.0
"""Bodies for `sample/thinking_budget.py`: find where a text last started and stopped reasoning, and force the end.

Shapes: R rows, T tokens of a request, P drafts of a request before a row, M tokens of a marker.
"""

from numba import njit

from vllm_v2_cpu.kernels.floats import F32, stored
from vllm_v2_cpu.kernels.kernel_launch import numba_body

_FORCED = F32(1e9)
"""Logit of a forced token."""


@njit(cache=True)
def _is_at(marker_M, place, tokens_T, num_tokens, drafts_P):  # type: ignore[no-untyped-def]
    """Returns whether the marker is at a place of the text: `num_tokens` of `tokens_T`, then the drafts."""
    for i in range(len(marker_M)):
        at = place + i
        if marker_M[i] != (tokens_T[at] if at < num_tokens else drafts_P[at - num_tokens]):
            return False
    return True


@njit(cache=True)
def _last_place(marker_M, start, stop, tokens_T, num_tokens, drafts_P, otherwise):  # type: ignore[no-untyped-def]
    """Returns the last place in [start, stop) at which the whole marker is in the text, or `otherwise`."""
    stop = min(stop, num_tokens + len(drafts_P) - len(marker_M) + 1)
    for place in range(stop - 1, start - 1, -1):
        if _is_at(marker_M, place, tokens_T, num_tokens, drafts_P):
            return place
    return otherwise


@numba_body("worker.gpu.sample.thinking_budget._update_committed_marker_cache_kernel")
def update_committed_marker_cache(  # type: ignore[no-untyped-def]
    req_ids_ptr, thinking_token_budget_ptr, all_token_ids_ptr, all_token_ids_stride, total_len_ptr,
    cached_last_start_ptr, cached_last_end_ptr, cached_scan_pos_ptr, reasoning_start_token_ids_ptr,
    natural_reasoning_end_token_ids_ptr, START_LEN, NATURAL_END_LEN, MAX_LEN, BLOCK,
):  # fmt: skip
    """Updates the last places of both markers in the committed text. A new text is searched block by block from its end."""
    for request in req_ids_ptr:
        if thinking_token_budget_ptr[request] < 0:
            continue
        tokens_T, total = all_token_ids_ptr[request], total_len_ptr[request]
        scanned = cached_scan_pos_ptr[request]
        start, end = cached_last_start_ptr[request], cached_last_end_ptr[request]
        if scanned > total:
            scanned, start, end = 0, -1, -1
        is_new = scanned == 0 and start < 0 and end < 0
        stop, low = total, max(total - BLOCK, 0) if is_new else scanned
        while True:
            nothing = tokens_T[:0]
            start = _last_place(reasoning_start_token_ids_ptr, low, stop, tokens_T, total, nothing, start)
            end = _last_place(natural_reasoning_end_token_ids_ptr, low, stop, tokens_T, total, nothing, end)
            if not is_new or low == 0 or start >= 0 or end >= 0:
                break
            stop, low = low, max(low - BLOCK, 0)
        cached_last_start_ptr[request], cached_last_end_ptr[request] = start, end
        cached_scan_pos_ptr[request] = max(total - MAX_LEN + 1, 0)


@njit(cache=True)
def _num_forced(end_M, tokens_T, num_tokens, drafts_P):  # type: ignore[no-untyped-def]
    """Returns how many tokens of the forced end, but not all, the text ends with."""
    length = num_tokens + len(drafts_P)
    for num in range(min(len(end_M) - 1, length), 0, -1):
        if _is_at(end_M[:num], length - num, tokens_T, num_tokens, drafts_P):
            return num
    return 0


@numba_body("worker.gpu.sample.thinking_budget._thinking_budget_kernel", error_model="numpy")
def thinking_budget(  # type: ignore[no-untyped-def]
    logits_ptr, logits_stride, expanded_idx_mapping_ptr, thinking_token_budget_ptr, all_token_ids_ptr,
    all_token_ids_stride, total_len_ptr, input_ids_ptr, expanded_local_pos_ptr, cached_last_start_ptr,
    cached_last_end_ptr, reasoning_start_token_ids_ptr, natural_reasoning_end_token_ids_ptr,
    reasoning_end_token_ids_ptr, START_LEN, NATURAL_END_LEN, END_LEN,
):  # fmt: skip
    """Forces the next token of the end if the text, including drafts before the row, has used its reasoning budget."""
    for r in range(logits_ptr.shape[0]):
        request = expanded_idx_mapping_ptr[r]
        budget, total = thinking_token_budget_ptr[request], total_len_ptr[request]
        if budget < 0:
            continue
        drafts_P = input_ids_ptr[r - expanded_local_pos_ptr[r] + 1 : r + 1]
        tokens_T, length = all_token_ids_ptr[request], total + len(drafts_P)
        start, end = cached_last_start_ptr[request], cached_last_end_ptr[request]
        first = max(total - START_LEN + 1, 0)
        start = _last_place(reasoning_start_token_ids_ptr, first, length, tokens_T, total, drafts_P, start)
        first = max(total - NATURAL_END_LEN + 1, 0)
        end = _last_place(natural_reasoning_end_token_ids_ptr, first, length, tokens_T, total, drafts_P, end)
        if start >= 0 and start > end and length - start - START_LEN >= budget:
            forced = reasoning_end_token_ids_ptr[_num_forced(reasoning_end_token_ids_ptr, tokens_T, total, drafts_P)]
            logits_ptr[r, forced] = stored(_FORCED, logits_ptr)
