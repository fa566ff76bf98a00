# SPDX-License-Identifier: Apache-2.0
"""Softmax statistics of blocks of a row of logits, which are the largest logit and the sum of exponentials relative to it."""

import numpy as np
from numba import njit

from lab.vllm_on_cpu.kernels.floats import (
    F32,
    LOWEST_KEY,
    NEGATIVE_INFINITY,
    exp_of_negative,
    order_key,
    value_of,
    value_of_key,
)


@njit(cache=True, error_model="numpy", fastmath={"reassoc"})
def _max_and_sumexp(logits_V, first, end, temperature):  # type: ignore[no-untyped-def]
    best = LOWEST_KEY
    for i in range(first, end):
        best = max(best, order_key(value_of(logits_V[i]) / temperature))
    largest = value_of_key(best)
    total = F32(0)
    if largest > NEGATIVE_INFINITY:
        for i in range(first, end):
            total += exp_of_negative(value_of(logits_V[i]) / temperature - largest)
    return largest, total


@njit(cache=True)
def block_stats(logits_V, temperature, block_size, max_B, sumexp_B):  # type: ignore[no-untyped-def]
    """Writes the largest logit and the sum of exponentials of each block of a row, after division by the temperature."""
    for block in range((len(logits_V) + block_size - 1) // block_size):
        end = min((block + 1) * block_size, len(logits_V))
        max_B[block], sumexp_B[block] = _max_and_sumexp(logits_V, block * block_size, end, F32(temperature))


@njit(cache=True, error_model="numpy")
def logsumexp(max_B, sumexp_B):  # type: ignore[no-untyped-def]
    """Returns the logarithm of the sum of a row's exponentials, from the statistics of its blocks."""
    largest = max_B.max()
    total = F32(0)
    for block in range(len(max_B)):
        total += sumexp_B[block] * np.exp(F32(max_B[block] - largest))
    return F32(largest + np.log(total))


@njit(cache=True, error_model="numpy")
def log_prob(logits_V, token, temperature, max_B, sumexp_B):  # type: ignore[no-untyped-def]
    """Returns a token's log-prob and the `logsumexp` of its row, from the statistics of the row's blocks."""
    log_sum = logsumexp(max_B, sumexp_B)
    return value_of(logits_V[token]) / F32(temperature) - log_sum, log_sum


@njit(cache=True)
def block_argmax(values_V, block_size, argmax_B, max_B):  # type: ignore[no-untyped-def]
    """Writes each block's largest value and its index. Of equal values the first one wins."""
    for block in range((len(values_V) + block_size - 1) // block_size):
        best = block * block_size
        for v in range(best, min((block + 1) * block_size, len(values_V))):
            if values_V[v] > values_V[best]:
                best = v
        argmax_B[block], max_B[block] = best, values_V[best]


@njit(cache=True)
def argmax_of_blocks(argmax_B, max_B):  # type: ignore[no-untyped-def]
    """Returns the token of the block with the largest maximum, or of the first such block. NaN counts as -inf."""
    best = 0
    for block in range(len(max_B)):
        if max_B[block] > max_B[best] or np.isnan(max_B[best]):
            best = block
    return argmax_B[best]
