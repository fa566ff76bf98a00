# SPDX-License-Identifier: Apache-2.0
"""CPU versions (bodies) of the kernels of vLLM's own rejection sampler.

The sampler has the ratio test (Leviathan et al. 2023) and block verification (Sun et al. 2024). Our own verification launches
only the first two kernels. The others serve comparisons with vLLM's speculation.

A request has a row of logits for each draft, and one for the token after the last draft. Row r judges draft r + 1. The
statistics of a row are given for blocks of the vocabulary.
"""

import numpy as np
from numba import njit

from lab.vllm_on_cpu.kernels.floats import F32, NEGATIVE_INFINITY, U32, exp_of_negative, log, row_of, value_of
from lab.vllm_on_cpu.kernels.kernel_launch import numba_body
from lab.vllm_on_cpu.kernels.noise import gumbel64, gumbel_of, row_state, token_bits, uniform_of
from lab.vllm_on_cpu.kernels.softmax import argmax_of_blocks, block_argmax, block_stats, log_prob, logsumexp

_ROUND_A, _ROUND_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_A, _KEY_B = U32(0x9E3779B9), U32(0xBB67AE85)
_SMALLEST_UNIFORM = F32(4.6566127342e-10)


@numba_body("worker.gpu.spec_decode.rejection_sampler._flatten_sampled_kernel")
def flatten_sampled(  # type: ignore[no-untyped-def]
    flat_sampled_ptr, sampled_ptr, sampled_stride, num_sampled_ptr, cu_num_logits_ptr
):
    for b in range(len(num_sampled_ptr)):
        start, num_sampled = cu_num_logits_ptr[b], num_sampled_ptr[b]
        flat_sampled_ptr[start : start + num_sampled] = sampled_ptr[b, :num_sampled]


@numba_body("worker.gpu.spec_decode.rejection_sampler._gather_draft_sampled_kernel")
def gather_draft_sampled(  # type: ignore[no-untyped-def]
    draft_sampled_ptr, pos_ptr, input_ids_ptr, positions_ptr, logits_indices_ptr, expanded_idx_mapping_ptr,
    expanded_local_pos_ptr, prefill_len_ptr, num_logits, BLOCK_SIZE,
):  # fmt: skip
    """Writes the draft token of each row. The placeholder of a request that has not sampled yet becomes -1."""
    for row in range(num_logits):
        index, local = logits_indices_ptr[row], expanded_local_pos_ptr[row]
        position = positions_ptr[index]
        has_sampled = position - local >= prefill_len_ptr[expanded_idx_mapping_ptr[row]]
        draft_sampled_ptr[row] = input_ids_ptr[index] if local == 0 or has_sampled else -1
        pos_ptr[row] = position


@njit(cache=True)
def philox_uniform(seed, position):  # type: ignore[no-untyped-def]
    """Returns Triton's `tl.rand` for an int64 seed and position, which is never zero.

    It is Philox 4x32-10 (Salmon et al. 2011).
    """
    key_0, key_1 = U32(seed & 0xFFFFFFFF), U32((seed >> 32) & 0xFFFFFFFF)
    c0, c1, c2, c3 = U32(position & 0xFFFFFFFF), U32((position >> 32) & 0xFFFFFFFF), U32(0), U32(0)
    for _ in range(10):
        a, b = np.uint64(c0) * _ROUND_A, np.uint64(c2) * _ROUND_B
        c0, c1 = U32(U32(b >> np.uint64(32)) ^ c1 ^ key_0), U32(b)
        c2, c3 = U32(U32(a >> np.uint64(32)) ^ c3 ^ key_1), U32(a)
        key_0, key_1 = U32(key_0 + _KEY_A), U32(key_1 + _KEY_B)
    signed = np.int32(c0)
    return max(F32(~signed if signed < 0 else signed) * _SMALLEST_UNIFORM, _SMALLEST_UNIFORM)


@numba_body("worker.gpu.spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel")
def compute_local_logits_stats(  # type: ignore[no-untyped-def]
    target_local_argmax_ptr, target_local_argmax_stride, target_local_max_ptr, target_local_max_stride,
    target_local_sumexp_ptr, target_local_sumexp_stride, draft_local_max_ptr, draft_local_max_stride,
    draft_local_sumexp_ptr, draft_local_sumexp_stride, target_logits_ptr, target_logits_stride, draft_logits_ptr,
    draft_logits_stride_0, draft_logits_stride_1, expanded_idx_mapping_ptr, expanded_local_pos_ptr, temp_ptr, vocab_size,
    num_speculative_steps, BLOCK_SIZE, HAS_DRAFT_LOGITS,
):  # fmt: skip
    values_V = np.empty(vocab_size, np.float32)
    for row in range(len(expanded_idx_mapping_ptr)):
        step, slot = expanded_local_pos_ptr[row], expanded_idx_mapping_ptr[row]
        if step >= num_speculative_steps:
            continue
        logits_V = row_of(target_logits_ptr, row, vocab_size)
        if temp_ptr[slot] == 0:
            for v in range(vocab_size):
                values_V[v] = value_of(logits_V[v])
            block_argmax(values_V, BLOCK_SIZE, target_local_argmax_ptr[row], target_local_max_ptr[row])
            continue
        block_stats(logits_V, F32(1), BLOCK_SIZE, target_local_max_ptr[row], target_local_sumexp_ptr[row])
        if draft_logits_ptr is not None:
            draft_V = row_of(draft_logits_ptr[slot], step, vocab_size)
            block_stats(draft_V, temp_ptr[slot], BLOCK_SIZE, draft_local_max_ptr[row], draft_local_sumexp_ptr[row])


@njit(cache=True)
def _residual_mass(  # type: ignore[no-untyped-def]
    joint_ratio, residual_mass_RB, target_logits, target_max_RB, target_sumexp_RB, token, row
):
    """Returns the sum of max(r p(x) - q(x), 0) over the tokens x of a row (Sun et al. 2024).

    r is the joint ratio, p(x) the target model's probability of a token, and q(x) the draft model's.
    """
    if residual_mass_RB is not None:
        return residual_mass_RB[row].sum()
    log_p, _ = log_prob(target_logits[row], token, F32(1), target_max_RB[row], target_sumexp_RB[row])
    return joint_ratio * (F32(1) - np.exp(log_p))


@numba_body("worker.gpu.spec_decode.rejection_sampler_utils._rejection_kernel", error_model="numpy")
def reject(  # type: ignore[no-untyped-def]
    sampled_ptr, sampled_stride, rejected_steps_ptr, target_rejected_logsumexp_ptr, draft_rejected_logsumexp_ptr,
    target_logits_ptr, target_logits_stride, target_local_argmax_ptr, target_local_argmax_stride, target_local_max_ptr,
    target_local_max_stride, target_local_sumexp_ptr, target_local_sumexp_stride, draft_sampled_ptr, draft_logits_ptr,
    draft_logits_stride_0, draft_logits_stride_1, draft_local_max_ptr, draft_local_max_stride, draft_local_sumexp_ptr,
    draft_local_sumexp_stride, cu_num_logits_ptr, idx_mapping_ptr, temp_ptr, seed_ptr, pos_ptr,
    synthetic_conditional_rates_ptr, cumulative_log_p_ptr, local_residual_mass_ptr, local_residual_mass_stride,
    vocab_num_blocks, PADDED_VOCAB_NUM_BLOCKS, HAS_DRAFT_LOGITS, SYNTHETIC_MODE, USE_BLOCK_VERIFICATION,
):  # fmt: skip
    """Writes the accepted drafts of each request and their number.

    Where a greedy request rejects a draft, the target model's arg-max is written.
    """
    for b in range(len(idx_mapping_ptr)):
        slot, start = idx_mapping_ptr[b], cu_num_logits_ptr[b]
        num_drafts, temperature = cu_num_logits_ptr[b + 1] - start - 1, F32(temp_ptr[slot])
        num_accepted = 0
        target_sum = draft_sum = F32(0)
        for i in range(num_drafts):
            row, token = start + i, draft_sampled_ptr[start + i + 1]
            if temperature != 0 and token < 0:
                break
            uniform = philox_uniform(seed_ptr[slot], pos_ptr[row])
            sampled_ptr[b, i] = token
            if temperature == 0:
                best = argmax_of_blocks(target_local_argmax_ptr[row], target_local_max_ptr[row])
                accepts = token == best
            elif cumulative_log_p_ptr is not None:
                joint_ratio = threshold = np.exp(F32(cumulative_log_p_ptr[row]))
                following = draft_sampled_ptr[row + 2] if i < num_drafts - 1 else -1
                if following >= 0:
                    mass = _residual_mass(
                        joint_ratio, local_residual_mass_ptr, target_logits_ptr, target_local_max_ptr,
                        target_local_sumexp_ptr, following, row + 1,
                    )  # fmt: skip
                    whole = mass + F32(1) - joint_ratio
                    threshold = mass / whole if whole > 0 else F32(1)
                if uniform <= threshold:
                    num_accepted = i + 1
                continue
            else:
                target_log_p, target_sum = log_prob(
                    target_logits_ptr[row], token, F32(1), target_local_max_ptr[row], target_local_sumexp_ptr[row]
                )
                draft_log_p = F32(0)
                if draft_logits_ptr is not None:
                    draft_log_p, draft_sum = log_prob(
                        draft_logits_ptr[slot, i], token, temperature, draft_local_max_ptr[row],
                        draft_local_sumexp_ptr[row],
                    )  # fmt: skip
                accepts = target_log_p > np.log(uniform) + draft_log_p
            if synthetic_conditional_rates_ptr is not None:
                accepts = uniform < synthetic_conditional_rates_ptr[i] and token >= 0
            if not accepts:
                if temperature == 0:
                    sampled_ptr[b, i] = best
                break
            num_accepted += 1
        rejected_steps_ptr[b] = num_accepted
        if cumulative_log_p_ptr is not None and temperature != 0 and num_accepted < num_drafts:
            row = start + num_accepted
            target_sum = logsumexp(target_local_max_ptr[row], target_local_sumexp_ptr[row])
            if draft_logits_ptr is not None:
                draft_sum = logsumexp(draft_local_max_ptr[row], draft_local_sumexp_ptr[row])
        target_rejected_logsumexp_ptr[b] = target_sum
        draft_rejected_logsumexp_ptr[b] = draft_sum


@numba_body("worker.gpu.spec_decode.rejection_sampler_utils._compute_cumulative_log_p_kernel")
def compute_cumulative_log_p(  # type: ignore[no-untyped-def]
    cumulative_log_p_ptr, target_logits_ptr, target_logits_stride, target_local_max_ptr, target_local_max_stride,
    target_local_sumexp_ptr, target_local_sumexp_stride, draft_sampled_ptr, draft_logits_ptr, draft_logits_stride_0,
    draft_logits_stride_1, draft_local_max_ptr, draft_local_max_stride, draft_local_sumexp_ptr,
    draft_local_sumexp_stride, cu_num_logits_ptr, idx_mapping_ptr, temp_ptr, vocab_num_blocks, PADDED_VOCAB_NUM_BLOCKS,
    HAS_DRAFT_LOGITS,
):  # fmt: skip
    """Computes log p_i for each draft i.

    p_i is the running product of the drafts' probability ratios, capped at 1 after each draft.
    """
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


@numba_body("worker.gpu.spec_decode.rejection_sampler_utils._compute_local_residual_mass_kernel")
def compute_local_residual_mass(  # type: ignore[no-untyped-def]
    local_residual_mass_ptr, local_residual_mass_stride, cumulative_log_p_ptr, target_logits_ptr, target_logits_stride,
    target_local_max_ptr, target_local_max_stride, target_local_sumexp_ptr, target_local_sumexp_stride,
    draft_logits_ptr, draft_logits_stride_0, draft_logits_stride_1, draft_local_max_ptr, draft_local_max_stride,
    draft_local_sumexp_ptr, draft_local_sumexp_stride, draft_sampled_ptr, expanded_idx_mapping_ptr,
    expanded_local_pos_ptr, temp_ptr, vocab_size, num_speculative_steps, vocab_num_blocks, BLOCK_SIZE,
    PADDED_VOCAB_NUM_BLOCKS,
):  # fmt: skip
    """Sums max(p_i p(x) - q(x), 0) over the tokens x of each block, for every draft except a request's first.

    p_i is the exponential of what `compute_cumulative_log_p` writes for the draft before. p(x) is the target model's
    probability of a token, and q(x) the draft model's.
    """
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


# The functions below sample the token after the accepted drafts from the residual.


@njit(cache=True, error_model="numpy")
def _residual(target_V, target_sum, draft_V, draft_sum, temperature, scores_V):  # type: ignore[no-untyped-def]
    """Writes log(max(p - q, 0)) of each token, as log p + log(1 - q / p).

    p is the target model's probability of the token, and q the draft model's.
    """
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
    """Samples the token after the accepted drafts by Gumbel-max, with the target model's noise.

    Raises NotImplementedError if watermarks are asked for.
    """
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
