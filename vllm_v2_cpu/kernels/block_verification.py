# SPDX-License-Identifier: Apache-2.0
"""Bodies for what vLLM's block verification (Sun et al. 2024) computes ahead of its test."""

import numpy as np
from numba import njit

from vllm_v2_cpu.kernels.floats import F32, row_of, value_of
from vllm_v2_cpu.kernels.kernel_launch import as_kernel
from vllm_v2_cpu.kernels.softmax import log_prob, logsumexp


@as_kernel
@njit(cache=True)
def compute_cumulative_log_p(  # type: ignore[no-untyped-def]
    cumulative_log_p_ptr, target_logits_ptr, target_logits_stride, target_local_max_ptr, target_local_max_stride,
    target_local_sumexp_ptr, target_local_sumexp_stride, draft_sampled_ptr, draft_logits_ptr, draft_logits_stride_0,
    draft_logits_stride_1, draft_local_max_ptr, draft_local_max_stride, draft_local_sumexp_ptr,
    draft_local_sumexp_stride, cu_num_logits_ptr, idx_mapping_ptr, temp_ptr, vocab_num_blocks, PADDED_VOCAB_NUM_BLOCKS,
    HAS_DRAFT_LOGITS,
):  # fmt: skip
    """log p_i of block verification: the product so far of the drafts' probability ratios, capped at 1 each time."""
    for b in range(len(idx_mapping_ptr)):
        slot, start = idx_mapping_ptr[b], cu_num_logits_ptr[b]
        if temp_ptr[slot] == 0:
            continue
        log_p = F32(0)
        for i in range(cu_num_logits_ptr[b + 1] - start - 1):
            row, token = start + i, draft_sampled_ptr[start + i + 1]
            if token >= 0:
                ratio, _ = log_prob(
                    target_logits_ptr[row], token, F32(1), target_local_max_ptr[row], target_local_sumexp_ptr[row]
                )
                if draft_logits_ptr is not None:
                    draft_log_p, _ = log_prob(
                        draft_logits_ptr[slot, i], token, temp_ptr[slot], draft_local_max_ptr[row],
                        draft_local_sumexp_ptr[row],
                    )  # fmt: skip
                    ratio -= draft_log_p
                log_p = min(log_p + ratio, F32(0))
            cumulative_log_p_ptr[row] = log_p


@as_kernel
@njit(cache=True)
def compute_local_residual_mass(  # type: ignore[no-untyped-def]
    local_residual_mass_ptr, local_residual_mass_stride, cumulative_log_p_ptr, target_logits_ptr, target_logits_stride,
    target_local_max_ptr, target_local_max_stride, target_local_sumexp_ptr, target_local_sumexp_stride,
    draft_logits_ptr, draft_logits_stride_0, draft_logits_stride_1, draft_local_max_ptr, draft_local_max_stride,
    draft_local_sumexp_ptr, draft_local_sumexp_stride, draft_sampled_ptr, expanded_idx_mapping_ptr,
    expanded_local_pos_ptr, temp_ptr, vocab_size, num_speculative_steps, vocab_num_blocks, BLOCK_SIZE,
    PADDED_VOCAB_NUM_BLOCKS,
):  # fmt: skip
    """The sum of max(p_i p(x) - q(x), 0) over each block, for every draft but a request's first."""
    for row in range(len(expanded_idx_mapping_ptr) - 1):
        step, slot = expanded_local_pos_ptr[row], expanded_idx_mapping_ptr[row]
        if step == 0 or step >= num_speculative_steps or draft_sampled_ptr[row + 1] < 0 or temp_ptr[slot] == 0:
            continue
        target_V = row_of(target_logits_ptr, row, vocab_size)
        draft_V = row_of(draft_logits_ptr[slot], step, vocab_size)
        target_sum = logsumexp(target_local_max_ptr[row], target_local_sumexp_ptr[row]) - cumulative_log_p_ptr[row - 1]
        draft_sum = logsumexp(draft_local_max_ptr[row], draft_local_sumexp_ptr[row])
        local_residual_mass_ptr[row] = 0
        for v in range(vocab_size):
            scaled_p = np.exp(F32(value_of(target_V[v]) - target_sum))
            q = np.exp(F32(value_of(draft_V[v]) / F32(temp_ptr[slot]) - draft_sum))
            local_residual_mass_ptr[row, v // BLOCK_SIZE] += max(scaled_p - q, F32(0))


_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils."
KERNELS = {
    _UTILS + "_compute_cumulative_log_p_kernel": compute_cumulative_log_p,
    _UTILS + "_compute_local_residual_mass_kernel": compute_local_residual_mass,
}
