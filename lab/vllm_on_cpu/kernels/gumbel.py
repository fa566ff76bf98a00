# SPDX-License-Identifier: Apache-2.0
"""CPU versions (bodies) of the kernels of vLLM's `sample/gumbel.py`, which sample by Gumbel-max and apply the temperature.

A row of logits is processed in blocks, as in the kernel. Exact noise needs logarithms, so it is computed only for a block that
can have a better token than the blocks before it. A cheap bound on the noise (`gumbel_bound`) rules out most blocks. The token
of a row does not depend on other rows.

Shapes: R rows, V vocabulary, B blocks of a row, N tokens of a block.
"""

import numpy as np
from numba import njit

from lab.vllm_on_cpu.kernels.floats import (
    F32,
    LOWEST_KEY,
    NEGATIVE_INFINITY,
    U32,
    highest,
    order_key,
    row_of,
    stored,
    value_of,
    value_of_key,
)
from lab.vllm_on_cpu.kernels.kernel_launch import numba_body
from lab.vllm_on_cpu.kernels.noise import (
    DRAFT_SALT,
    gumbel64,
    gumbel_bound,
    gumbel_of,
    row_state,
    token_bits,
    uniform_of,
)


@njit(cache=True, error_model="numpy")
def _read(logits_N, divisor, scores_N):  # type: ignore[no-untyped-def]
    """Writes logits / divisor to `scores_N`. Adding 0 turns -0 into 0."""
    for i in range(len(scores_N)):
        scores_N[i] = value_of(logits_N[i]) + F32(0)
    if divisor != F32(1):
        for i in range(len(scores_N)):
            scores_N[i] /= divisor


@njit(cache=True, error_model="numpy")
def _draw(state, first, scores_N, bits_N):  # type: ignore[no-untyped-def]
    """Writes each token's random bits to `bits_N`. Returns an upper bound on the best score with noise, as an order key."""
    best = LOWEST_KEY
    for i in range(len(scores_N)):
        bits_N[i] = token_bits(state, np.add(first, U32(i)))
        best = max(best, order_key(scores_N[i] + gumbel_bound(bits_N[i])))
    return best


@njit(cache=True, error_model="numpy")
def _add_noise(bits_N, scores_N):  # type: ignore[no-untyped-def]
    best = LOWEST_KEY
    for i in range(len(scores_N)):
        scores_N[i] += gumbel_of(uniform_of(bits_N[i]))
        best = max(best, order_key(scores_N[i]))
    return best


@njit(cache=True)
def _find(scores_N, key):  # type: ignore[no-untyped-def]
    for i in range(len(scores_N)):
        if order_key(scores_N[i]) == key:
            return i
    return 0


@njit(cache=True, error_model="numpy")
def _sample_row(logits_V, divisor, state, is_noisy, scores_N, bits_N, tokens_B, maxima_B):  # type: ignore[no-untyped-def]
    """Writes the best token and its score of each block that has a better score than all blocks before it.

    The other blocks get a score of -inf.
    """
    num_vocab, size = len(logits_V), len(scores_N)
    best = LOWEST_KEY
    for b in range(len(maxima_B)):
        first = b * size
        scores = scores_N[: min(size, num_vocab - first)]
        tokens_B[b], maxima_B[b] = first, NEGATIVE_INFINITY
        _read(logits_V[first : first + size], divisor, scores)
        top = _draw(state, U32(first), scores, bits_N) if is_noisy else highest(scores)
        if is_noisy and top > best:
            top = _add_noise(bits_N, scores)
        if top > best:
            best = top
            tokens_B[b], maxima_B[b] = first + _find(scores, top), value_of_key(top)


@njit(cache=True, error_model="numpy")
def _sample_row64(logits_V, divisor, seed, position, is_noisy, tokens_B, maxima_B):  # type: ignore[no-untyped-def]
    size = (len(logits_V) + len(maxima_B) - 1) // len(maxima_B)
    for b in range(len(maxima_B)):
        tokens_B[b], maxima_B[b] = b * size, -np.inf
        for v in range(b * size, min((b + 1) * size, len(logits_V))):
            score = np.float64(value_of(logits_V[v]) / divisor)
            if is_noisy:
                score += gumbel64(seed, position, v)
            if score > maxima_B[b]:
                tokens_B[b], maxima_B[b] = v, score


@njit(cache=True)
def _keep_logits(source_V, num_vocab, kept_V):  # type: ignore[no-untyped-def]
    for v in range(num_vocab):
        kept_V[v] = source_V[v]


@numba_body("worker.gpu.sample.gumbel._gumbel_sample_kernel", error_model="numpy")
def gumbel_sample(  # type: ignore[no-untyped-def]
    local_argmax_ptr, local_argmax_stride, local_max_ptr, local_max_stride, logits_cache_ptr, logits_cache_stride_0,
    logits_cache_stride_1, logits_cache_col_ptr, logits_cache_source_ptr, logits_cache_source_stride, logits_ptr,
    logits_stride, expanded_idx_mapping_ptr, seeds_ptr, pos_ptr, temp_ptr, vocab_size, BLOCK_SIZE, IS_DRAFTING,
    APPLY_TEMPERATURE, USE_FP64, PER_TOKEN_COL,
):  # fmt: skip
    """Writes arg-max(logits / temperature + noise) of each row and block, or arg-max(logits) at temperature 0.

    Of equal scores the first one wins. Rows without a request (-1) are greedy. With a cache, the raw logits are stored at
    [request, column]. The result of a row with NaN is undefined.
    """
    scores_N, bits_N = np.empty(BLOCK_SIZE, np.float32), np.empty(BLOCK_SIZE, np.uint32)
    for r in range(logits_ptr.shape[0]):
        request = np.int64(expanded_idx_mapping_ptr[r])
        has_request = request >= 0
        temperature = F32(temp_ptr[request]) if has_request else F32(0)
        seed = seeds_ptr[request] if has_request else np.int64(0)
        position = np.int64(pos_ptr[r]) + (DRAFT_SALT if IS_DRAFTING else 0)
        is_noisy = temperature != F32(0)
        divisor = temperature if is_noisy and APPLY_TEMPERATURE else F32(1)
        if logits_cache_ptr is not None and has_request:
            column = logits_cache_col_ptr.ravel()[r if PER_TOKEN_COL else 0]
            _keep_logits(logits_cache_source_ptr[r], vocab_size, logits_cache_ptr[request, column])
        row = row_of(logits_ptr, r, vocab_size)
        if USE_FP64:
            _sample_row64(row, divisor, seed, position, is_noisy, local_argmax_ptr[r], local_max_ptr[r])
        else:
            state = row_state(seed, position)
            _sample_row(row, divisor, state, is_noisy, scores_N, bits_N, local_argmax_ptr[r], local_max_ptr[r])


@numba_body("worker.gpu.sample.gumbel._temperature_kernel", error_model="numpy")
def temperature(  # type: ignore[no-untyped-def]
    logits_ptr, logits_stride, expanded_idx_mapping_ptr, temperature_ptr, vocab_size, BLOCK_SIZE
):
    """Divides each row of logits by the temperature of its request, unless that is 0 or 1."""
    for r in range(logits_ptr.shape[0]):
        divisor = F32(temperature_ptr[expanded_idx_mapping_ptr[r]])
        if divisor != F32(0) and divisor != F32(1):
            row = row_of(logits_ptr, r, vocab_size)
            for v in range(vocab_size):
                row[v] = stored(value_of(row[v]) / divisor, row)
