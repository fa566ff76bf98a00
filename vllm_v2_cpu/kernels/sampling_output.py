# SPDX-License-Identifier: Apache-2.0
"""Bodies for what may happen to sampled tokens: a trace put in their place, and the tokens that could have been sampled.

Shapes: R rows, V vocabulary.
"""

import numpy as np
from numba import njit

from vllm_v2_cpu.kernels.floats import value_of
from vllm_v2_cpu.kernels.kernel_launch import as_kernel


@njit(cache=True)
def trace_replay(  # type: ignore[no-untyped-def]
    sampled_ptr, idx_mapping_ptr, trace_token_ids_ptr, trace_token_ids_stride, trace_len_ptr, total_len_ptr,
    prompt_len_ptr,
):  # fmt: skip
    """Puts the next token of a request's trace in the place of its sampled one."""
    for b in range(len(idx_mapping_ptr)):
        request = idx_mapping_ptr[b]
        if request >= 0:
            step = total_len_ptr[request] - prompt_len_ptr[request]
            if 0 <= step < trace_len_ptr[request]:
                sampled_ptr[b] = trace_token_ids_ptr[request, step]


@njit(cache=True, error_model="numpy")
def _compact(logits_V, vocab_size, token_ids_K, max_num_kept, packed_mask_W):  # type: ignore[no-untyped-def]
    """Writes the first ids with a finite logit, and a bit for each id; returns how many there are."""
    count = 0
    packed_mask_W[: (vocab_size + 7) // 8] = 0
    for v in range(vocab_size):
        if np.isfinite(value_of(logits_V[v])):
            if count < max_num_kept:
                token_ids_K[count] = v
            count += 1
            packed_mask_W[v >> 3] |= np.uint8(1 << (v & 7))
    return count


@njit(cache=True)
def compact_sampling_mask(  # type: ignore[no-untyped-def]
    logits_ptr, logits_row_stride, logits_col_stride, cu_num_logits_ptr, num_sampled_tokens_ptr, token_ids_ptr,
    token_ids_row_stride, packed_mask_ptr, packed_mask_row_stride, counts_ptr, vocab_size, max_num_kept,
    ROWS_PER_REQUEST, BLOCK_SIZE,
):  # fmt: skip
    """The tokens that could have been sampled, for each sampled token."""
    for row in range(len(counts_ptr)):
        b, place = row // ROWS_PER_REQUEST, row % ROWS_PER_REQUEST
        counts_ptr[row] = 0
        if place < num_sampled_tokens_ptr[b]:
            logits_V = logits_ptr[cu_num_logits_ptr[b] + place]
            counts_ptr[row] = _compact(logits_V, vocab_size, token_ids_ptr[row], max_num_kept, packed_mask_ptr[row])


_MODULE = "vllm.v1.worker.gpu.sample."
KERNELS = {
    f"{_MODULE}trace_replay._trace_replay_kernel": as_kernel(trace_replay),
    f"{_MODULE}output._compact_sampling_mask_kernel": as_kernel(compact_sampling_mask),
}
