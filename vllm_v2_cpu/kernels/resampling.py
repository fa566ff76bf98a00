# SPDX-License-Identifier: Apache-2.0
"""Bodies for the last part of vLLM's rejection sampler: the token after the accepted drafts, from the residual."""

import numpy as np
from numba import njit

from vllm_v2_cpu.kernels.floats import (
    F32,
    NEGATIVE_INFINITY,
    U32,
    exp_of_negative,
    log,
    row_of,
    value_of,
)
from vllm_v2_cpu.kernels.kernel_launch import numba_body
from vllm_v2_cpu.kernels.noise import gumbel64, gumbel_of, row_state, token_bits, uniform_of
from vllm_v2_cpu.kernels.softmax import argmax_of_blocks, block_argmax


@njit(cache=True, error_model="numpy")
def _residual(target_V, target_sum, draft_V, draft_sum, temperature, scores_V):  # type: ignore[no-untyped-def]
    """Writes log(max(p - q, 0)) as log p + log(1 - q / p)."""
    for v in range(len(scores_V)):
        log_p = value_of(target_V[v]) - target_sum
        rest = F32(1) - exp_of_negative(value_of(draft_V[v]) / temperature - draft_sum - log_p)
        # The exponential is valid only below 0. The comparison is also false where both are -inf.
        below = value_of(draft_V[v]) / temperature - draft_sum < log_p
        scores_V[v] = log_p + log(rest) if below and rest > 0 else NEGATIVE_INFINITY


@njit(cache=True, error_model="numpy")
def _add_noise(seed, position, use_fp64, scores_V):  # type: ignore[no-untyped-def]
    state = row_state(seed, position)
    if use_fp64:
        for v in range(len(scores_V)):
            scores_V[v] += gumbel64(seed, position, v)
    else:
        for v in range(len(scores_V)):
            scores_V[v] += gumbel_of(uniform_of(token_bits(state, U32(v))))


@numba_body("worker.gpu.spec_decode.rejection_sampler_utils._resample_kernel", error_model="numpy")
def resample(  # type: ignore[no-untyped-def]
    resampled_local_argmax_ptr, resampled_local_argmax_stride, resampled_local_max_ptr, resampled_local_max_stride,
    target_logits_ptr, target_logits_stride, target_rejected_logsumexp_ptr, draft_logits_ptr, draft_logits_stride_0,
    draft_logits_stride_1, draft_rejected_logsumexp_ptr, rejected_step_ptr, cu_num_logits_ptr, expanded_idx_mapping_ptr,
    draft_sampled_ptr, temp_ptr, seed_ptr, pos_ptr, cumulative_log_p_ptr, contexts_ptr, contexts_stride,
    watermarking_ptr, watermarking_skip_mask_ptr, watermark_key_0, watermark_key_1, vocab_size, BLOCK_SIZE,
    HAS_DRAFT_LOGITS, USE_FP64, USE_BLOCK_VERIFICATION, CONTEXT_WIDTH, WATERMARK, DEDUPLICATE_CONTEXTS,
):  # fmt: skip
    """Samples by Gumbel-max with the target's noise. Raises NotImplementedError if watermarks are asked for."""
    if WATERMARK:
        raise NotImplementedError("watermarks have no body for a CPU")
    scores_V = np.empty(vocab_size, resampled_local_max_ptr.dtype)
    for b in range(len(rejected_step_ptr)):
        step = rejected_step_ptr[b]
        row = cu_num_logits_ptr[b] + step
        slot, is_bonus = expanded_idx_mapping_ptr[row], row == cu_num_logits_ptr[b + 1] - 1
        temperature, target_V = F32(temp_ptr[slot]), row_of(target_logits_ptr, row, vocab_size)
        if temperature == 0 and not is_bonus:
            continue
        for v in range(vocab_size):
            scores_V[v] = value_of(target_V[v])
        rejected = -1 if is_bonus else draft_sampled_ptr[row + 1]
        if rejected >= 0 and draft_logits_ptr is None:
            scores_V[rejected] = NEGATIVE_INFINITY
        if rejected >= 0 and draft_logits_ptr is not None:
            target_sum = target_rejected_logsumexp_ptr[b]
            if cumulative_log_p_ptr is not None and step > 0:
                target_sum -= cumulative_log_p_ptr[row - 1]
            draft_V = row_of(draft_logits_ptr[slot], step, vocab_size)
            _residual(target_V, target_sum, draft_V, draft_rejected_logsumexp_ptr[b], temperature, scores_V)
        if temperature != 0:
            _add_noise(seed_ptr[slot], pos_ptr[row], USE_FP64, scores_V)
        block_argmax(scores_V, BLOCK_SIZE, resampled_local_argmax_ptr[b], resampled_local_max_ptr[b])


@numba_body("worker.gpu.spec_decode.rejection_sampler_utils._insert_resampled_kernel")
def insert_resampled(  # type: ignore[no-untyped-def]
    sampled_ptr, sampled_stride, num_sampled_ptr, resampled_local_argmax_ptr, resampled_local_argmax_stride,
    resampled_local_max_ptr, resampled_local_max_stride, resample_num_blocks, cu_num_logits_ptr,
    expanded_idx_mapping_ptr, temp_ptr, PADDED_RESAMPLE_NUM_BLOCKS,
):  # fmt: skip
    for b in range(len(num_sampled_ptr)):
        num_accepted = num_sampled_ptr[b]
        row = cu_num_logits_ptr[b] + num_accepted
        num_sampled_ptr[b] = num_accepted + 1
        if temp_ptr[expanded_idx_mapping_ptr[row]] != 0 or row == cu_num_logits_ptr[b + 1] - 1:
            sampled_ptr[b, num_accepted] = argmax_of_blocks(resampled_local_argmax_ptr[b], resampled_local_max_ptr[b])
