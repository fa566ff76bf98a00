# SPDX-License-Identifier: Apache-2.0
"""CPU versions (bodies) of the kernels that change or inspect logits.

They apply penalties, min-p, top-k, top-p, bad words, biases and grammars, and count NaNs. The last ones force the end of
reasoning when its budget of tokens is used up (vLLM's thinking budget). To rule a token out means to set its logit to -inf.

Shapes: R rows, V vocabulary, W words of 32 bits, T tokens of a text, P drafts that a row's request has before the row,
A tokens of a list, M tokens of a marker that begins or ends reasoning.
"""

import numpy as np
import torch
from numba import njit

from lab.vllm_on_cpu.kernels.floats import (
    F32,
    LOWEST_KEY,
    NEGATIVE_INFINITY,
    order_key,
    row_of,
    stored,
    value_of,
    value_of_key,
)
from lab.vllm_on_cpu.kernels.kernel_launch import numba_body, torch_body


@njit(cache=True, error_model="numpy")
def _highest_of(row_V):  # type: ignore[no-untyped-def]
    best = LOWEST_KEY
    for v in range(len(row_V)):
        best = max(best, order_key(value_of(row_V[v])))
    return value_of_key(best)


@njit(cache=True)
def _unpack(words_W, flags_V):  # type: ignore[no-untyped-def]
    """Writes the 32 bits of each word as flags, and zeros where words are missing."""
    num_words = min(len(words_W), len(flags_V) // 32)
    flags_V[32 * num_words :] = 0
    for w in range(num_words):
        word, flags_32 = np.uint32(words_W[w]), flags_V[32 * w : 32 * w + 32]
        for bit in range(32):
            flags_32[bit] = np.bitwise_and(np.right_shift(word, np.uint32(bit)), np.uint32(1))


@njit(cache=True)
def _flags(vocab_size):  # type: ignore[no-untyped-def]
    return np.empty((vocab_size + 31) // 32 * 32, np.int32)


@njit(cache=True, error_model="numpy")
def _penalise(row_V, in_prompt_V, counts_V, repetition, frequency, presence):  # type: ignore[no-untyped-def]
    """Applies the penalties to one row of logits, for tokens that are in the request's prompt or output."""
    inverse = F32(1) / repetition
    for v in range(len(row_V)):
        value, count = value_of(row_V[v]), counts_V[v]
        factor = inverse if value > F32(0) else repetition
        value *= factor if np.bitwise_or(in_prompt_V[v], count) != 0 else F32(1)
        value -= frequency * F32(count)
        row_V[v] = stored(value - (presence if count != 0 else F32(0)), row_V)


@numba_body("worker.gpu.sample.penalties._penalties_kernel", error_model="numpy")
def penalties(  # type: ignore[no-untyped-def]
    logits_ptr, logits_stride, expanded_idx_mapping_ptr, token_ids_ptr, expanded_local_pos_ptr, repetition_penalty_ptr,
    frequency_penalty_ptr, presence_penalty_ptr, prompt_bin_mask_ptr, prompt_bin_mask_stride, output_bin_counts_ptr,
    output_bin_counts_stride, vocab_size, BLOCK_SIZE,
):  # fmt: skip
    """Applies repetition, frequency and presence penalties. The drafts before a row count as output."""
    counts_V, in_prompt_V = np.empty(vocab_size, np.int32), _flags(vocab_size)
    for r in range(logits_ptr.shape[0]):
        request = expanded_idx_mapping_ptr[r]
        repetition = F32(repetition_penalty_ptr[request])
        frequency, presence = F32(frequency_penalty_ptr[request]), F32(presence_penalty_ptr[request])
        if repetition != F32(1) or frequency != F32(0) or presence != F32(0):
            counts_V[:] = output_bin_counts_ptr[request, :vocab_size]
            for draft in token_ids_ptr[r - expanded_local_pos_ptr[r] + 1 : r + 1]:
                counts_V[draft] += 1
            _unpack(prompt_bin_mask_ptr[request], in_prompt_V)
            row = row_of(logits_ptr, r, vocab_size)
            _penalise(row, in_prompt_V, counts_V, repetition, frequency, presence)


@numba_body("worker.gpu.sample.penalties._bincount_kernel")
def bincount(  # type: ignore[no-untyped-def]
    expanded_idx_mapping_ptr, all_token_ids_ptr, all_token_ids_stride, prompt_len_ptr, prefill_len_ptr,
    prompt_bin_mask_ptr, prompt_bin_mask_stride, output_bin_counts_ptr, output_bin_counts_stride, BLOCK_SIZE,
):  # fmt: skip
    """Marks which tokens are in each new request's prompt, and counts each token in the output that it already has.

    For example, a request that is resumed after preemption already has output.
    """
    for request in expanded_idx_mapping_ptr:
        for i in range(prompt_len_ptr[request]):
            token = all_token_ids_ptr[request, i]
            bit = np.int32(np.uint32(1 << (token & 31)))
            prompt_bin_mask_ptr[request, token >> 5] |= bit
        for i in range(prompt_len_ptr[request], prefill_len_ptr[request]):
            output_bin_counts_ptr[request, all_token_ids_ptr[request, i]] += 1


@numba_body("worker.gpu.sample.min_p._min_p_kernel", error_model="numpy")
def min_p(logits_ptr, logits_stride, expanded_idx_mapping_ptr, min_p_ptr, vocab_size, BLOCK_SIZE):  # type: ignore[no-untyped-def]
    """Rules out tokens that are less likely than `min_p` times the likeliest token of the row."""
    for r in range(logits_ptr.shape[0]):
        ratio = F32(min_p_ptr[expanded_idx_mapping_ptr[r]])
        if ratio != F32(0):
            row = row_of(logits_ptr, r, vocab_size)
            threshold = _highest_of(row) + F32(np.log(ratio))
            nothing = stored(NEGATIVE_INFINITY, row)
            for v in range(vocab_size):
                row[v] = nothing if value_of(row[v]) < threshold else row[v]


@njit(cache=True)
def _ends_with(prefix, tokens_T, num_tokens, drafts_P):  # type: ignore[no-untyped-def]
    """Returns whether a text ends with `prefix`. The text is the first `num_tokens` of `tokens_T`, followed by drafts."""
    first = num_tokens + len(drafts_P) - len(prefix)
    if first < 0:
        return False
    for i in range(len(prefix)):
        at = first + i
        if prefix[i] != (tokens_T[at] if at < num_tokens else drafts_P[at - num_tokens]):
            return False
    return True


@numba_body("worker.gpu.sample.bad_words._bad_words_kernel", error_model="numpy")
def bad_words(  # type: ignore[no-untyped-def]
    logits_ptr, logits_stride, expanded_idx_mapping_ptr, bad_word_token_ids_ptr, bad_word_token_ids_stride,
    bad_word_offsets_ptr, bad_word_offsets_stride, num_bad_words_ptr, all_token_ids_ptr, all_token_ids_stride,
    prompt_len_ptr, total_len_ptr, input_ids_ptr, expanded_local_pos_ptr,
):  # fmt: skip
    """Rules out the last token of a bad word in rows whose output ends with the word's other tokens.

    The output of a row includes the request's drafts that come before the row.
    """
    nothing = stored(NEGATIVE_INFINITY, logits_ptr)
    for r in range(logits_ptr.shape[0]):
        request = expanded_idx_mapping_ptr[r]
        drafts_P = input_ids_ptr[r - expanded_local_pos_ptr[r] + 1 : r + 1]
        output_T = all_token_ids_ptr[request, prompt_len_ptr[request] :]
        num_tokens = total_len_ptr[request] - prompt_len_ptr[request]
        for w in range(num_bad_words_ptr[request]):
            start, end = bad_word_offsets_ptr[request, w], bad_word_offsets_ptr[request, w + 1]
            word = bad_word_token_ids_ptr[request, start:end]
            if _ends_with(word[:-1], output_T, num_tokens, drafts_P):
                logits_ptr[r, word[-1]] = nothing


@njit(cache=True, error_model="numpy")
def _keep_only(row_V, tokens_A):  # type: ignore[no-untyped-def]
    kept = np.empty(len(tokens_A), row_V.dtype)
    for i in range(len(tokens_A)):
        kept[i] = row_V[tokens_A[i]]
    row_V[:] = stored(NEGATIVE_INFINITY, row_V)
    for i in range(len(tokens_A)):
        row_V[tokens_A[i]] = kept[i]


@njit(cache=True, error_model="numpy")
def _forbid(row_V, tokens_A, unless_nothing_is_left):  # type: ignore[no-untyped-def]
    """Rules tokens out. If no other token is left and `unless_nothing_is_left` is set, their logits are restored."""
    before = np.empty(len(tokens_A), row_V.dtype)
    for i in range(len(tokens_A)):
        before[i] = row_V[tokens_A[i]]
    for i in range(len(tokens_A)):
        row_V[tokens_A[i]] = stored(NEGATIVE_INFINITY, row_V)
    if unless_nothing_is_left and _highest_of(row_V) == NEGATIVE_INFINITY:
        for i in range(len(tokens_A)):
            if np.isfinite(value_of(before[i])):
                row_V[tokens_A[i]] = before[i]


@numba_body("worker.gpu.sample.logit_bias._bias_kernel", error_model="numpy")
def bias(  # type: ignore[no-untyped-def]
    logits_ptr, logits_stride, vocab_size, expanded_idx_mapping_ptr, num_allowed_token_ids_ptr, allowed_token_ids_ptr,
    allowed_token_ids_stride, num_logit_bias_ptr, bias_token_ids_ptr, bias_token_ids_stride, bias_ptr, bias_stride,
    pos_ptr, min_lens_ptr, num_stop_token_ids_ptr, restore_when_all_masked_ptr, stop_token_ids_ptr,
    stop_token_ids_stride, BLOCK_SIZE, LOGITS_BLOCK_SIZE, CHECK_ALL_MASKED_ROWS,
):  # fmt: skip
    """Rules out tokens that are not allowed, adds biases, and rules out stop tokens before the minimum length."""
    for r in range(logits_ptr.shape[0]):
        request = expanded_idx_mapping_ptr[r]
        row = row_of(logits_ptr, r, vocab_size)
        num_allowed, num_stops = num_allowed_token_ids_ptr[request], num_stop_token_ids_ptr[request]
        if num_allowed > 0:
            _keep_only(row, allowed_token_ids_ptr[request, :num_allowed])
        for i in range(num_logit_bias_ptr[request]):
            token = bias_token_ids_ptr[request, i]
            row[token] = stored(value_of(row[token]) + bias_ptr[request, i], row)
        if num_stops > 0 and pos_ptr[r] + 1 < min_lens_ptr[request]:
            may_restore = CHECK_ALL_MASKED_ROWS and restore_when_all_masked_ptr[request] != 0
            _forbid(row, stop_token_ids_ptr[request, :num_stops], may_restore)


@numba_body("worker.gpu.structured_outputs._apply_grammar_bitmask_kernel", error_model="numpy")
def apply_grammar_bitmask(  # type: ignore[no-untyped-def]
    logits_ptr, logits_stride, logits_indices_ptr, cu_num_logits_ptr, bitmask_ptr, bitmask_stride, vocab_size,
    MASK_STRIDE, BLOCK_SIZE,
):  # fmt: skip
    """Rules out the tokens whose bit in a grammar's mask is 0. Skips masks of draft positions that were cut off."""
    allowed_V = _flags(vocab_size)
    for m in range(len(logits_indices_ptr)):
        request, position = divmod(np.int64(logits_indices_ptr[m]), np.int64(MASK_STRIDE))
        r = cu_num_logits_ptr[request] + position
        if r < cu_num_logits_ptr[request + 1]:
            row = row_of(logits_ptr, r, vocab_size)
            nothing = stored(NEGATIVE_INFINITY, row)
            _unpack(bitmask_ptr[m], allowed_V)
            for v in range(vocab_size):
                row[v] = row[v] if allowed_V[v] != 0 else nothing


@numba_body("worker.gpu.metrics.logits._num_nans_kernel")
def num_nans(logits_ptr, logits_stride, num_nans_ptr, vocab_size, BLOCK_SIZE):  # type: ignore[no-untyped-def]
    """Counts the logits of each row that are not a number."""
    for r in range(logits_ptr.shape[0]):
        row = row_of(logits_ptr, r, vocab_size)
        num = 0
        for v in range(vocab_size):
            num += np.isnan(value_of(row[v]))
        num_nans_ptr[r] = num


@torch_body("sample.ops.topk_topp_triton._topk_topp_kernel")
def top_k_top_p(
    LOGITS: torch.Tensor,
    LOGITS_STRIDE_0: int,
    BUFFER: torch.Tensor,
    PERCENTILE_TO_STD_TABLE: torch.Tensor,
    NORMAL_CDF_TO_SIGMA_TABLE: torch.Tensor,
    K: torch.Tensor | None,
    P: torch.Tensor | None,
    BATCH_SIZE: int,
    VOCAB_SIZE: int,
    MASK_VALUE: float,
    BLOCK_SIZE: int,
    BLOCK_SIZE_TRUNC: int,
    TOPK_ENABLED: bool,
    TOPP_ENABLED: bool,
    SPLIT_COVERS_PONLY: bool,
) -> None:
    """Rules out the tokens that top-k and top-p leave out, by vLLM's own sort. Rows do not affect each other."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    top_k, top_p = (K if TOPK_ENABLED else None), (P if TOPP_ENABLED else None)
    LOGITS.copy_(apply_top_k_top_p_pytorch(LOGITS, top_k, top_p, allow_cpu_sync=True))


# Bodies for `sample/thinking_budget.py`, which find where a text last started and stopped reasoning, and force the end.


_FORCED = F32(1e9)
"""Logit of a forced token."""


@njit(cache=True)
def _is_at(marker_M, place, tokens_T, num_tokens, drafts_P):  # type: ignore[no-untyped-def]
    """Returns whether a marker begins at index `place` of a text.

    The text is the first `num_tokens` of `tokens_T`, followed by drafts.
    """
    for i in range(len(marker_M)):
        at = place + i
        if marker_M[i] != (tokens_T[at] if at < num_tokens else drafts_P[at - num_tokens]):
            return False
    return True


@njit(cache=True)
def _last_place(marker_M, start, stop, tokens_T, num_tokens, drafts_P, otherwise):  # type: ignore[no-untyped-def]
    """Returns the last index in [start, stop) at which the whole marker is in the text, or `otherwise` if there is none."""
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
    """Finds where reasoning last started and last ended in the committed text of each request, and stores both positions.

    Only tokens that came since the last call are searched. A new text is searched block by block, from its end.
    """
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
    """Returns how many tokens of the forced end marker, from its first on, are at the end of the text.

    A whole marker at the end of the text does not count.
    """
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
    """Forces the next token of the end marker in rows whose text has used its reasoning budget.

    The text of a row includes the request's drafts that come before the row.
    """
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
