# SPDX-License-Identifier: Apache-2.0
"""CPU versions (bodies) of the kernels of vLLM's acceptance estimator.

The estimator is a logistic regression of acceptance on the draft's log-odds.
"""

import numpy as np

from lab.vllm_on_cpu.kernels.floats import row_of
from lab.vllm_on_cpu.kernels.kernel_launch import numba_body
from lab.vllm_on_cpu.kernels.softmax import block_stats


@numba_body("worker.gpu.spec_decode.acceptance_estimator._accumulate_kernel")
def accumulate(  # type: ignore[no-untyped-def]
    info_ptr, grad_ptr, idx_mapping_ptr, num_sampled_ptr, num_rejected_ptr, features_ptr, features_stride, pred_ptr,
    pred_stride, counts_ptr, num_reqs, BLOCK_R,
):  # fmt: skip
    """Adds the drafts of the last engine step, up to the first rejected one, to the sums of the next Newton step."""
    num_steps = len(counts_ptr)
    for b in range(num_reqs):
        num_accepted = max(num_sampled_ptr[b] - 1, 0)
        for k in range(min(num_accepted + 1, num_accepted + num_rejected_ptr[b], num_steps)):
            feature, predicted = features_ptr[idx_mapping_ptr[b], k], pred_ptr[idx_mapping_ptr[b], k]
            weight = predicted * (1 - predicted)
            residual = (1 if k < num_accepted else 0) - predicted
            info_ptr[k, 0] += weight * feature * feature
            info_ptr[k, 1] += weight * feature
            info_ptr[k, 2] += weight
            grad_ptr[k, 0] += residual * feature
            grad_ptr[k, 1] += residual
            counts_ptr[k] += 1


@numba_body("worker.gpu.spec_decode.acceptance_estimator._refit_kernel", error_model="numpy")
def refit(  # type: ignore[no-untyped-def]
    slope_ptr, intercepts_ptr, info_ptr, info_row_stride, grad_ptr, grad_row_stride, counts_ptr, NUM_SPECULATIVE_STEPS,
    L2, DAMPING, BLOCK,
):  # fmt: skip
    """Takes a damped Newton step for the slope and for the intercept of each draft position, and then clears the sums."""
    couplings, masses = info_ptr[:, 1], info_ptr[:, 2] + L2
    slope_gradient, gradients = grad_ptr[:, 0].sum(), grad_ptr[:, 1]
    rest = slope_gradient - (couplings * gradients / masses).sum()
    step = rest / (info_ptr[:, 0].sum() + L2 - (couplings * couplings / masses).sum())
    num_all = counts_ptr.sum()
    step *= num_all / (num_all + DAMPING)
    if not slope_ptr[0] + step >= 0:
        step = 0.0
    slope_ptr[0] += step
    for k in range(NUM_SPECULATIVE_STEPS):
        change = (gradients[k] - couplings[k] * step) / masses[k] * (counts_ptr[k] / (counts_ptr[k] + DAMPING))
        intercepts_ptr[k] += 0.0 if np.isnan(change) else change
    info_ptr[:] = 0
    grad_ptr[:] = 0
    counts_ptr[:] = 0


@numba_body("worker.gpu.spec_decode.acceptance_estimator._local_max_sumexp_kernel")
def local_max_sumexp(  # type: ignore[no-untyped-def]
    local_max_ptr, local_max_stride, local_sumexp_ptr, local_sumexp_stride, logits_ptr, logits_stride, idx_mapping_ptr,
    idx_mapping_stride, temperature_ptr, num_tokens, vocab_size, BLOCK_SIZE,
):  # fmt: skip
    for row in range(num_tokens):
        if idx_mapping_ptr[row] < 0:
            local_max_ptr[row, :] = -np.inf
            local_sumexp_ptr[row, :] = 0
            continue
        temperature = temperature_ptr[idx_mapping_ptr[row]]
        if temperature <= 0:
            temperature = np.float32(1)
        logits_V = row_of(logits_ptr, row, vocab_size)
        block_stats(logits_V, temperature, BLOCK_SIZE, local_max_ptr[row], local_sumexp_ptr[row])


@numba_body("worker.gpu.spec_decode.acceptance_estimator._predict_kernel")
def predict(  # type: ignore[no-untyped-def]
    features_ptr, features_stride, pred_ptr, pred_stride, conf_ptr, conf_stride, slope_ptr, intercepts_ptr,
    local_max_ptr, local_max_stride, local_sumexp_ptr, local_sumexp_stride, idx_mapping_ptr, idx_mapping_stride,
    step_ptr, num_tokens, vocab_num_blocks, per_token_step, NUM_SPECULATIVE_STEPS, MAX_LOG_ODDS,
    PADDED_VOCAB_NUM_BLOCKS,
):  # fmt: skip
    """Computes the log-odds of the likeliest token of each draft distribution. From them, predicts the acceptance rate."""
    for row in range(num_tokens):
        slot = idx_mapping_ptr[row]
        if slot < 0:
            continue
        step = step_ptr.flat[row if per_token_step else 0]
        b = row // NUM_SPECULATIVE_STEPS if per_token_step else row
        largest, sums = local_max_ptr[row, :vocab_num_blocks], local_sumexp_ptr[row, :vocab_num_blocks]
        others = max((sums * np.exp(largest - largest.max())).sum() - np.float32(1), np.float32(0))
        feature = min(max(-np.log(others), -MAX_LOG_ODDS), MAX_LOG_ODDS)
        probability = 1 / (1 + np.exp(-(slope_ptr[0] * feature + intercepts_ptr[step])))
        features_ptr[slot, step] = feature
        pred_ptr[slot, step] = probability
        conf_ptr[b, step] = probability
