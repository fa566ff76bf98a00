# SPDX-License-Identifier: Apache-2.0
"""CPU versions (bodies) of kernels that run after sampling.

They compute the log-probs of chosen tokens and their ranks (`sample/logprob.py`, `sample/prompt_logprob.py`), replay a trace,
and find the set of tokens that could have been sampled.

The exponentials of a row are added up in a fixed number of partial sums in float32. These are then added by halving their
number repeatedly. So the bits of the sum do not depend on the CPU or on other rows.

Shapes: R rows, V vocabulary, N tokens of a block.
"""

import numpy as np
from numba import njit

from lab.vllm_on_cpu.kernels.floats import (
    F32,
    NEGATIVE_INFINITY,
    decode,
    exp_of_negative,
    highest,
    row_of,
    value_of,
    value_of_key,
)
from lab.vllm_on_cpu.kernels.kernel_launch import numba_body

_NUM_LANES = 1024
"""Number of partial sums of a row, which is a power of two."""


@njit(cache=True, error_model="numpy")
def _add_exponentials(values_N, largest, sums_N):  # type: ignore[no-untyped-def]
    for i in range(len(values_N)):
        sums_N[i] += exp_of_negative(values_N[i] - largest)


@njit(cache=True, error_model="numpy")
def _total(sums_N):  # type: ignore[no-untyped-def]
    """Returns the sum of an array whose length is a power of two. Overwrites the array."""
    width = len(sums_N)
    while width > 1:
        width //= 2
        for i in range(width):
            sums_N[i] += sums_N[width + i]
    return sums_N[0]


@njit(cache=True, error_model="numpy")
def log_sum_exp(logits_V, values_N, sums_N):  # type: ignore[no-untyped-def]
    """Returns a row's largest logit and log(sum(exp(logit - largest))) as float32. The last two arrays are scratch."""
    size, largest = len(sums_N), NEGATIVE_INFINITY
    sums_N[:] = F32(0)
    for first in range(0, len(logits_V), size):
        part = logits_V[first : first + size]
        values = values_N[: len(part)]
        decode(part, values)
        top = value_of_key(highest(values))
        if top > largest:
            sums_N *= exp_of_negative(largest - top)
            largest = top
        if largest > NEGATIVE_INFINITY:
            _add_exponentials(values, largest, sums_N)
    return largest, F32(np.log(_total(sums_N)))


@numba_body("worker.gpu.sample.logprob._topk_log_softmax_kernel", error_model="numpy")
def topk_log_softmax(  # type: ignore[no-untyped-def]
    output_ptr, logits_ptr, logits_stride, topk_ids_ptr, topk_ids_stride, topk, vocab_size, BLOCK_SIZE, TOPK_BLOCK_SIZE
):
    """Computes the log-probs of the `topk` token ids of each row."""
    values_N, sums_N = np.empty(_NUM_LANES, np.float32), np.empty(_NUM_LANES, np.float32)
    for r in range(logits_ptr.shape[0]):
        row = row_of(logits_ptr, r, vocab_size)
        largest, rest = log_sum_exp(row, values_N, sums_N)
        for k in range(topk):
            output_ptr[r, k] = value_of(row[topk_ids_ptr[r, k]]) - largest - rest


@njit(cache=True, error_model="numpy")
def _num_at_least(logits_V, value):  # type: ignore[no-untyped-def]
    num = np.int32(0)
    for i in range(len(logits_V)):
        num += np.int32(value_of(logits_V[i]) >= value)
    return num


@numba_body("worker.gpu.sample.logprob._ranks_kernel", error_model="numpy")
def ranks(output_ptr, logits_ptr, logits_stride, token_ids_ptr, vocab_size, BLOCK_SIZE):  # type: ignore[no-untyped-def]
    """Writes the rank of each row's token, which is the number of logits that are at least as large as its own."""
    for r in range(logits_ptr.shape[0]):
        row = row_of(logits_ptr, r, vocab_size)
        output_ptr[r] = _num_at_least(row, value_of(row[token_ids_ptr[r]]))


@numba_body("worker.gpu.sample.logprob._fill_logprob_token_ids_kernel")
def fill_logprob_token_ids(  # type: ignore[no-untyped-def]
    out_token_ids_ptr, out_token_ids_stride, out_valid_mask_ptr, out_valid_mask_stride, sampled_token_ids_ptr,
    topk_indices_ptr, topk_indices_stride, expanded_idx_mapping_ptr, num_per_req_token_ids_ptr, per_req_token_ids_ptr,
    per_req_token_ids_stride, NUM_TOPK, PADDED_COLS,
):  # fmt: skip
    """Writes the token ids whose log-probs a row returns.

    The sampled token comes first. Then come the tokens that the request has named, or else the top k.
    """
    for r in range(out_token_ids_ptr.shape[0]):
        out_token_ids_ptr[r, 0] = sampled_token_ids_ptr[r]
        out_valid_mask_ptr[r, 0] = True
        request = expanded_idx_mapping_ptr[r]
        num_own = num_per_req_token_ids_ptr[request]
        for k in range(num_own if num_own > 0 else NUM_TOPK):
            own = num_own > 0
            out_token_ids_ptr[r, 1 + k] = per_req_token_ids_ptr[request, k] if own else topk_indices_ptr[r, k]
            out_valid_mask_ptr[r, 1 + k] = True


@numba_body("worker.gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(  # type: ignore[no-untyped-def]
    prompt_logprobs_token_ids_ptr, query_start_loc_ptr, idx_mapping_ptr, num_computed_tokens_ptr, all_token_ids_ptr,
    all_token_ids_stride, BLOCK_SIZE,
):  # fmt: skip
    """Writes for each prompt token of the engine step the token that follows it."""
    for b in range(len(idx_mapping_ptr)):
        request = idx_mapping_ptr[b]
        start, end = query_start_loc_ptr[b], query_start_loc_ptr[b + 1]
        first = num_computed_tokens_ptr[request] + 1
        for i in range(end - start):
            prompt_logprobs_token_ids_ptr[start + i] = all_token_ids_ptr[request, first + i]


# Replay of a trace, and possible tokens.


@numba_body("worker.gpu.sample.trace_replay._trace_replay_kernel")
def trace_replay(  # type: ignore[no-untyped-def]
    sampled_ptr, idx_mapping_ptr, trace_token_ids_ptr, trace_token_ids_stride, trace_len_ptr, total_len_ptr,
    prompt_len_ptr,
):  # fmt: skip
    """Replaces the sampled token of a request by the next token of its trace."""
    for b in range(len(idx_mapping_ptr)):
        request = idx_mapping_ptr[b]
        if request >= 0:
            step = total_len_ptr[request] - prompt_len_ptr[request]
            if 0 <= step < trace_len_ptr[request]:
                sampled_ptr[b] = trace_token_ids_ptr[request, step]


@njit(cache=True, error_model="numpy")
def _compact(logits_V, vocab_size, token_ids_K, max_num_kept, packed_mask_W):  # type: ignore[no-untyped-def]
    """Writes which tokens have a finite logit, and returns their number.

    `token_ids_K` gets the ids of the first `max_num_kept` of them. `packed_mask_W` gets a bit for each of them.
    """
    count = 0
    packed_mask_W[: (vocab_size + 7) // 8] = 0
    for v in range(vocab_size):
        if np.isfinite(value_of(logits_V[v])):
            if count < max_num_kept:
                token_ids_K[count] = v
            count += 1
            packed_mask_W[v >> 3] |= np.uint8(1 << (v & 7))
    return count


@numba_body("worker.gpu.sample.output._compact_sampling_mask_kernel")
def compact_sampling_mask(  # type: ignore[no-untyped-def]
    logits_ptr, logits_row_stride, logits_col_stride, cu_num_logits_ptr, num_sampled_tokens_ptr, token_ids_ptr,
    token_ids_row_stride, packed_mask_ptr, packed_mask_row_stride, counts_ptr, vocab_size, max_num_kept,
    ROWS_PER_REQUEST, BLOCK_SIZE,
):  # fmt: skip
    """Writes which tokens could have been sampled at the position of each sampled token, as ids and as bits."""
    for row in range(len(counts_ptr)):
        b, place = row // ROWS_PER_REQUEST, row % ROWS_PER_REQUEST
        counts_ptr[row] = 0
        if place < num_sampled_tokens_ptr[b]:
            logits_V = logits_ptr[cu_num_logits_ptr[b] + place]
            counts_ptr[row] = _compact(logits_V, vocab_size, token_ids_ptr[row], max_num_kept, packed_mask_ptr[row])
