# SPDX-License-Identifier: Apache-2.0
"""The sampler's CPU kernel: noise and arg-max in one pass over a row, compiled by numba, bit-equal to `noise.py`.

Sixty small torch operations cost more than a step of a small model; this is one call. Each loop is simple enough
for LLVM to vectorise, and neither fuses nor reorders float32 operations (numba's default, `fastmath=False`). Signatures
are given, so that compilation happens at import, once per installation, and never in the middle of a rollout.

Shapes: R logits rows, V vocabulary.
"""

import numpy as np
from numba import njit

from nemo_specrollout.sampling import constants
from nemo_specrollout.sampling.cpu_mix import mix64

_GAMMA = np.uint64(constants.GAMMA)
_LN2 = np.float32(constants.LN2)
_SQRT_HALF = np.float32(constants.SQRT_HALF)
_LOG_SQRT_HALF = np.float32(constants.LOG_SQRT_HALF)
_T0, _T1, _T2, _T3, _T4 = (np.float32(c) for c in constants.ATANH_THIRD)
_S0, _S1, _S2, _S3 = (np.float32(c) for c in constants.ATANH_SIXTH)
_TWO = np.float32(2.0)
_2_33 = np.float32(2.0**-33)
_2_34 = np.float32(2.0**-34)


@njit(cache=True, error_model="numpy")
def _row_noise(key, high_V, high_bits_V, exp_V, exp_bits_V):  # type: ignore[no-untyped-def]
    """Leaves the row's Gumbel noise in `exp_V`; `*_bits_V` are int32 views of the float32 scratch rows."""
    num_vocab = exp_V.shape[0]
    for v in range(num_vocab):
        h = mix64(key + np.uint64(v + 1) * _GAMMA)
        high_V[v] = np.float32(np.int32(((h >> np.uint64(40)) & np.uint64(0xFFFFFF)) | np.uint64(1)))
        exp_V[v] = np.float32(np.uint32(h & np.uint64(0xFFFFFFFF))) * _2_33 + _2_34
    for v in range(num_vocab):
        x = exp_V[v]
        s = x / (_TWO - x)
        t = s * s
        p = (((t * _T4 + _T3) * t + _T2) * t + _T1) * t + _T0
        halvings = np.float32(np.int32(150) - (high_bits_V[v] >> np.int32(23)))
        exp_V[v] = p * s + halvings * _LN2
    for v in range(num_vocab):
        bits = exp_bits_V[v]
        high_V[v] = np.float32((bits >> np.int32(23)) - np.int32(126))
        exp_bits_V[v] = (bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000)
    for v in range(num_vocab):
        mantissa = exp_V[v]
        s = (mantissa - _SQRT_HALF) / (mantissa + _SQRT_HALF)
        t = s * s
        p = ((t * _S3 + _S2) * t + _S1) * t + _S0
        exp_V[v] = -((p * s + _LOG_SQRT_HALF) + high_V[v] * _LN2)


@njit(cache=True, error_model="numpy", inline="always")
def _noise_of(seed, position, is_greedy, high_V, high_bits_V, noise_V, noise_bits_V):  # type: ignore[no-untyped-def]
    if is_greedy:
        noise_V[:] = np.float32(0.0)
    else:
        key = mix64(np.uint64(seed) + _GAMMA)
        key = mix64(key + np.uint64(position + 1) * _GAMMA)
        _row_noise(key, high_V, high_bits_V, noise_V, noise_bits_V)


@njit("void(float32[:,:], int64[:], int64[:], boolean[:], int64[:])", cache=True, error_model="numpy")
def sample_rows(logits_RV, seeds_R, positions_R, greedy_R, tokens_R):  # type: ignore[no-untyped-def]
    """Writes arg-max(logits + noise) of each row, or arg-max(logits) where `greedy_R`, to int64 `tokens_R`.

    `logits_RV` is float32, already processed and divided by the temperature; seeds and positions are int64.
    """
    num_rows, num_vocab = logits_RV.shape
    high_V = np.empty(num_vocab, np.float32)
    noise_V = np.empty(num_vocab, np.float32)
    high_bits_V = high_V.view(np.int32)
    noise_bits_V = noise_V.view(np.int32)
    for r in range(num_rows):
        _noise_of(seeds_R[r], positions_R[r], greedy_R[r], high_V, high_bits_V, noise_V, noise_bits_V)
        best = np.float32(-np.inf)
        token = 0
        for v in range(num_vocab):
            score = logits_RV[r, v] + noise_V[v]
            if not score <= best:
                best = score
                token = v
                if np.isnan(score):  # the arg-max, as in torch
                    break
        tokens_R[r] = token


@njit("void(float32[:,:], int64[:], int64[:], boolean[:], int64[:], float32[:])", cache=True, error_model="numpy")
def sample_rows_with_margin(logits_RV, seeds_R, positions_R, greedy_R, tokens_R, margins_R):  # type: ignore[no-untyped-def]
    """`sample_rows`; also writes by how much each token beat the runner-up, float32, inf where there is none."""
    num_rows, num_vocab = logits_RV.shape
    high_V = np.empty(num_vocab, np.float32)
    noise_V = np.empty(num_vocab, np.float32)
    high_bits_V = high_V.view(np.int32)
    noise_bits_V = noise_V.view(np.int32)
    for r in range(num_rows):
        _noise_of(seeds_R[r], positions_R[r], greedy_R[r], high_V, high_bits_V, noise_V, noise_bits_V)
        best = np.float32(-np.inf)
        second = np.float32(-np.inf)
        token = 0
        for v in range(num_vocab):
            score = logits_RV[r, v] + noise_V[v]
            if not score <= best:
                second = best
                best = score
                token = v
                if np.isnan(score):
                    break
            elif score > second:
                second = score
        tokens_R[r] = token
        margins_R[r] = best - second


@njit([f"void(int64[:], {ids}[:], int64[:], int64[:,:], int64[:,:])" for ids in ("int32", "int64")], cache=True)
def accept_rows(tokens_R, drafts_D, num_drafts_B, emitted_BS, rows_BS):  # type: ignore[no-untyped-def]
    """`acceptance.accept_by_equality` for arrays: fills `emitted_BS` and `rows_BS`."""
    row = 0
    draft = 0
    for b in range(len(num_drafts_B)):
        alive = True
        for s in range(emitted_BS.shape[1]):
            rows_BS[b, s] = min(row + s, len(tokens_R) - 1)
            emitted_BS[b, s] = -1
            if alive and s <= num_drafts_B[b]:
                emitted_BS[b, s] = tokens_R[row + s]
                alive = s < num_drafts_B[b] and drafts_D[draft + s] == tokens_R[row + s]
        row += num_drafts_B[b] + 1
        draft += num_drafts_B[b]
