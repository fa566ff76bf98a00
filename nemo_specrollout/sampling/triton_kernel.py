# SPDX-License-Identifier: Apache-2.0
"""The sampler's GPU kernel: noise and arg-max in one pass over the logits, bit-equal to `noise.py`, no noise stored.

Equal bits need three things of the compiler. Every product and sum rounds on its own, hence `enable_fp_fusion=False`.
Divisions are IEEE, hence `tl.div_rn`: a plain `/` of float32 becomes an approximate division, off by up to 2 ulp.
And nothing is flushed to zero, which Triton does not do; `tests/test_sampling.py` reads all three off the PTX.

A candidate is one int64: the score's rank (an int32 ordered like the scores) above the complement of its token id. The
largest candidate is then the arg-max with ties to the smallest id, in any order of reduction, however a row is split.

Shapes: R logits rows, V vocabulary, S splits of a row, N lanes of a program.
"""

import torch
import triton
import triton.language as tl

from nemo_specrollout.sampling import constants

_GAMMA = tl.constexpr(constants.GAMMA)
_MIX_1 = tl.constexpr(constants.MIX_1)
_MIX_2 = tl.constexpr(constants.MIX_2)
_LN2 = tl.constexpr(constants.LN2)
_SQRT_HALF = tl.constexpr(constants.SQRT_HALF)
_LOG_SQRT_HALF = tl.constexpr(constants.LOG_SQRT_HALF)
_T0, _T1, _T2, _T3, _T4 = (tl.constexpr(c) for c in constants.ATANH_THIRD)
_S0, _S1, _S2, _S3 = (tl.constexpr(c) for c in constants.ATANH_SIXTH)
_2_33 = tl.constexpr(2.0**-33)
_2_34 = tl.constexpr(2.0**-34)
_LOW_32 = tl.constexpr(0xFFFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_RANK_OF_NAN = tl.constexpr(0x7FFFFFFF)
_NO_CANDIDATE = tl.constexpr(-(1 << 63))

BLOCK = 1024
NUM_WARPS = 4
PROGRAMS_PER_SM = 8
PROGRAMS_IN_INTERPRETER = 8


@triton.jit
def _mix64(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _gumbel(h_N):  # type: ignore[no-untyped-def]
    """Gumbel noise from 64 random bits: `noise._exponential`, then `noise._negative_log`, operation by operation."""
    high = (((h_N >> 40) | 1).to(tl.int32)).to(tl.float32)
    halvings = (150 - (high.to(tl.int32, bitcast=True) >> 23)).to(tl.float32)
    x = (h_N & _LOW_32).to(tl.uint32).to(tl.float32) * _2_33 + _2_34
    s = tl.div_rn(x, 2.0 - x)
    t = s * s
    p = (((t * _T4 + _T3) * t + _T2) * t + _T1) * t + _T0
    bits = (p * s + halvings * _LN2).to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    s = tl.div_rn(mantissa - _SQRT_HALF, mantissa + _SQRT_HALF)
    t = s * s
    p = ((t * _S3 + _S2) * t + _S1) * t + _S0
    return -((p * s + _LOG_SQRT_HALF) + exponent * _LN2)


@triton.jit
def _candidates(scores_N, ids_N):  # type: ignore[no-untyped-def]
    """int64 that order by score, then by smaller id. As in torch's arg-max, 0.0 ties with -0.0 and NaN beats all."""
    bits = scores_N.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    ranks = tl.where(bits < 0, -magnitudes, magnitudes)
    ranks = tl.where(magnitudes > _INFINITY_BITS, _RANK_OF_NAN, ranks)
    return (ranks.to(tl.int64) << 32) | (ids_N.to(tl.int64) ^ _LOW_32)


@triton.jit
def _token_of(candidate):  # type: ignore[no-untyped-def]
    return (candidate & _LOW_32) ^ _LOW_32


@triton.jit(do_not_specialize=["blocks_per_split"])
def _best_of_split(  # type: ignore[no-untyped-def]
    logits_RV, row_stride, seeds_R, positions_R, greedy_R, best_RS, vocab_size, blocks_per_split, BLOCK: tl.constexpr
):
    """Program (r, s) writes the best candidate of the s-th run of blocks of row r."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    is_greedy = tl.load(greedy_R + row) != 0
    key = _mix64(tl.load(seeds_R + row).to(tl.uint64) + _GAMMA)
    key = _mix64(key + (tl.load(positions_R + row).to(tl.int64) + 1).to(tl.uint64) * _GAMMA)
    best_N = tl.full((BLOCK,), _NO_CANDIDATE, tl.int64)
    for block in range(blocks_per_split):
        ids_N = (split * blocks_per_split + block) * BLOCK + tl.arange(0, BLOCK)
        inside_N = ids_N < vocab_size
        scores_N = tl.load(logits_RV + row * row_stride + ids_N, mask=inside_N, other=0.0)
        if not is_greedy:
            scores_N = scores_N + _gumbel(_mix64(key + (ids_N + 1).to(tl.uint64) * _GAMMA))
        best_N = tl.maximum(best_N, tl.where(inside_N, _candidates(scores_N, ids_N), _NO_CANDIDATE))
    tl.store(best_RS + row * tl.num_programs(1) + split, tl.max(best_N, axis=0))


@triton.jit
def _token_of_row(best_RS, tokens_R, num_splits, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    splits_N = tl.arange(0, LANES)
    best_N = tl.load(best_RS + row * num_splits + splits_N, mask=splits_N < num_splits, other=_NO_CANDIDATE)
    tl.store(tokens_R + row, _token_of(tl.max(best_N, axis=0)))


def sample_rows_triton(
    logits_RV: torch.Tensor, seeds_R: torch.Tensor, positions_R: torch.Tensor, greedy_R: torch.Tensor
) -> torch.Tensor:
    """The sampled token of every row, int64 [R], bit-equal to `sampler.sample_tokens_torch`.

    Args as `sampler.sample_tokens`: float32 logits, int64 seeds and positions, bool greedy, all on one device. Rows
    may be strided. Few rows are each split over many programs, so that a small batch fills the device as well.
    """
    num_rows, vocab_size = logits_RV.shape
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    if num_rows == 0:
        return tokens_R
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    num_splits, blocks_per_split = split_row(num_rows, num_blocks, _programs_wanted(logits_RV.device))
    best_RS = torch.empty(num_rows, num_splits, dtype=torch.int64, device=logits_RV.device)
    _best_of_split[(num_rows, num_splits)](
        logits_RV,
        logits_RV.stride(0),
        seeds_R.contiguous(),
        positions_R.contiguous(),
        greedy_R.contiguous(),
        best_RS,
        vocab_size,
        blocks_per_split,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    _token_of_row[(num_rows,)](best_RS, tokens_R, num_splits, LANES=triton.next_power_of_2(num_splits), num_warps=1)
    return tokens_R


def split_row(num_rows: int, num_blocks: int, programs_wanted: int) -> tuple[int, int]:
    """Into how many splits a row of `num_blocks` blocks goes, and the blocks of each; no token depends on it."""
    at_most = max(1, min(num_blocks, programs_wanted // num_rows))
    blocks_per_split = triton.cdiv(num_blocks, at_most)
    return triton.cdiv(num_blocks, blocks_per_split), blocks_per_split


def _programs_wanted(device: torch.device) -> int:
    if device.type != "cuda":
        return PROGRAMS_IN_INTERPRETER
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
