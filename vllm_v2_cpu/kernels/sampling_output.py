# SPDX-License-Identifier: Apache-2.0
"""Bodies for kernels that run after sampling: replay of a trace, and the set of tokens that could have been sampled.

Shapes: R rows, V vocabulary.
"""

import numpy as np
from numba import njit

from vllm_v2_cpu.kernels.floats import value_of
from vllm_v2_cpu.kernels.kernel_launch import numba_body


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
    """Writes the first ids with a finite logit, and a bit for each such id; returns their number."""
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
    """Writes the tokens that could have been sampled instead of each sampled token."""
    for row in range(len(counts_ptr)):
        b, place = row // ROWS_PER_REQUEST, row % ROWS_PER_REQUEST
        counts_ptr[row] = 0
        if place < num_sampled_tokens_ptr[b]:
            logits_V = logits_ptr[cu_num_logits_ptr[b] + place]
            counts_ptr[row] = _compact(logits_V, vocab_size, token_ids_ptr[row], max_num_kept, packed_mask_ptr[row])
