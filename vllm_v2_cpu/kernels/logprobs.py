# SPDX-License-Identifier: Apache-2.0
"""Bodies of `sample/logprob.py` and `sample/prompt_logprob.py`: log-probabilities of chosen tokens, and their ranks.

A row's sum of exponentials is taken in a fixed number of lanes and then lane by lane in halves, in float32: its bits do
not depend on the CPU or on other rows.

Shapes: R rows, V vocabulary, N tokens of a block.
"""

import numpy as np
from numba import njit

from vllm_v2_cpu.kernels.floats import (
    F32,
    NEGATIVE_INFINITY,
    decode,
    exp_of_negative,
    highest,
    row_of,
    value_of,
    value_of_key,
)
from vllm_v2_cpu.kernels.kernel_launch import as_kernel

_NUM_LANES = 1024


@njit(cache=True, error_model="numpy")
def _add_exponentials(values_N, largest, sums_N):  # type: ignore[no-untyped-def]
    for i in range(len(values_N)):
        sums_N[i] += exp_of_negative(values_N[i] - largest)


@njit(cache=True, error_model="numpy")
def _total(sums_N):  # type: ignore[no-untyped-def]
    """The sum of as many numbers as a power of 2, which it overwrites."""
    width = len(sums_N)
    while width > 1:
        width //= 2
        for i in range(width):
            sums_N[i] += sums_N[width + i]
    return sums_N[0]


@njit(cache=True, error_model="numpy")
def log_sum_exp(logits_V, values_N, sums_N):  # type: ignore[no-untyped-def]
    """(largest, log of the sum of exp(logit - largest)) of a row, float32; the two arrays are scratch."""
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


@njit(cache=True, error_model="numpy")
def topk_log_softmax(  # type: ignore[no-untyped-def]
    output_ptr, logits_ptr, logits_stride, topk_ids_ptr, topk_ids_stride, topk, vocab_size, BLOCK_SIZE, TOPK_BLOCK_SIZE
):
    """Log-probabilities of the `topk` token ids of each row."""
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


@njit(cache=True, error_model="numpy")
def ranks(output_ptr, logits_ptr, logits_stride, token_ids_ptr, vocab_size, BLOCK_SIZE):  # type: ignore[no-untyped-def]
    """How many logits of a row are at least that of its token, the token's own among them."""
    for r in range(logits_ptr.shape[0]):
        row = row_of(logits_ptr, r, vocab_size)
        output_ptr[r] = _num_at_least(row, value_of(row[token_ids_ptr[r]]))


@njit(cache=True)
def fill_logprob_token_ids(  # type: ignore[no-untyped-def]
    out_token_ids_ptr, out_token_ids_stride, out_valid_mask_ptr, out_valid_mask_stride, sampled_token_ids_ptr,
    topk_indices_ptr, topk_indices_stride, expanded_idx_mapping_ptr, num_per_req_token_ids_ptr, per_req_token_ids_ptr,
    per_req_token_ids_stride, NUM_TOPK, PADDED_COLS,
):  # fmt: skip
    """The token ids whose log-probabilities a row returns: the sampled one, then the request's own or the top k."""
    for r in range(out_token_ids_ptr.shape[0]):
        out_token_ids_ptr[r, 0] = sampled_token_ids_ptr[r]
        out_valid_mask_ptr[r, 0] = True
        request = expanded_idx_mapping_ptr[r]
        num_own = num_per_req_token_ids_ptr[request]
        for k in range(num_own if num_own > 0 else NUM_TOPK):
            own = num_own > 0
            out_token_ids_ptr[r, 1 + k] = per_req_token_ids_ptr[request, k] if own else topk_indices_ptr[r, k]
            out_valid_mask_ptr[r, 1 + k] = True


@njit(cache=True)
def prompt_logprobs_token_ids(  # type: ignore[no-untyped-def]
    prompt_logprobs_token_ids_ptr, query_start_loc_ptr, idx_mapping_ptr, num_computed_tokens_ptr, all_token_ids_ptr,
    all_token_ids_stride, BLOCK_SIZE,
):  # fmt: skip
    """The token that follows each prompt token of the step."""
    for b in range(len(idx_mapping_ptr)):
        request = idx_mapping_ptr[b]
        start, end = query_start_loc_ptr[b], query_start_loc_ptr[b + 1]
        first = num_computed_tokens_ptr[request] + 1
        for i in range(end - start):
            prompt_logprobs_token_ids_ptr[start + i] = all_token_ids_ptr[request, first + i]


_MODULE = "vllm.v1.worker.gpu.sample."
KERNELS = {
    f"{_MODULE}logprob._topk_log_softmax_kernel": as_kernel(topk_log_softmax),
    f"{_MODULE}logprob._ranks_kernel": as_kernel(ranks),
    f"{_MODULE}logprob._fill_logprob_token_ids_kernel": as_kernel(fill_logprob_token_ids),
    f"{_MODULE}prompt_logprob._prompt_logprobs_token_ids_kernel": as_kernel(prompt_logprobs_token_ids),
}
