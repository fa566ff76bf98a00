# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of `draft_sampling.py`. One finds the two best scores in each block of a row, and the other in the whole row.

The scores equal those of vLLM's `gumbel_sample` bit for bit (`noise_triton.py`). `row_sampling_triton.py` uses the same
functions to score the policy's rows. vLLM needs three launches to sample drafts, and these kernels need two.

Shapes: R rows of logits, V vocabulary, S request slots, K draft positions, N blocks of a row.
"""

import torch
import triton
import triton.language as tl

from nemo_specrollout.drafters.base import SCORE_GAP_EDGES
from nemo_specrollout.generation.drafting.noise_triton import noise_of

BLOCK = 1024
_EDGES = tl.constexpr(SCORE_GAP_EDGES)
_NUM_EDGES = tl.constexpr(len(SCORE_GAP_EDGES))
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def load_divided(logits_ptr, column, mask, temperature):  # type: ignore[no-untyped-def]
    """Returns logits in float32, divided by the temperature unless it is 0 or 1. They are -inf outside the mask."""
    values = tl.load(logits_ptr + column, mask=mask, other=float("-inf")).to(tl.float32)
    if (temperature != 0.0) & (temperature != 1.0):  # a branch, so that the quotient is rounded before noise is added
        values = values / temperature
    return values


@triton.jit
def add_noise(values, mask, temperature, seed, position, token):  # type: ignore[no-untyped-def]
    """Returns the scores of tokens, which are `values` plus noise. At temperature 0 they are `values` alone."""
    if temperature != 0.0:
        values = tl.where(mask, values + noise_of(seed, position, token), float("-inf"))
    return values


@triton.jit
def _best_two(scores):  # type: ignore[no-untyped-def]
    """Returns the best score, the first index that has it, and the second-best score."""
    best, index = tl.max(scores, axis=0, return_indices=True)
    others = tl.where(tl.arange(0, scores.shape[0]) == index, _NEVER, scores)
    return best, index, tl.max(others, axis=0)


@triton.jit
def _best_of_block(  # type: ignore[no-untyped-def]
    logits_ptr, logits_stride, slots_ptr, temperature_ptr, seeds_ptr, positions_ptr, ids_ptr, best_ptr, second_ptr, token_ptr,
    num_vocab, IS_REDUCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_vocab
    token = column
    if IS_REDUCED:
        token = tl.load(ids_ptr + column, mask=mask, other=0).to(tl.int32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    seed = tl.load(seeds_ptr + slot, mask=slot >= 0, other=0)
    position = tl.load(positions_ptr + row)
    scores = load_divided(logits_ptr + row * logits_stride, column, mask, temperature)
    scores = add_noise(scores, mask, temperature, seed, position, token)
    best, index, second = _best_two(scores)
    out = row * tl.num_programs(1) + block
    tl.store(best_ptr + out, best)
    tl.store(second_ptr + out, second)
    best_token = block * BLOCK + index
    if IS_REDUCED:
        best_token = tl.load(ids_ptr + best_token).to(tl.int32)
    tl.store(token_ptr + out, best_token)


@triton.jit
def _best_of_row(  # type: ignore[no-untyped-def]
    best_ptr, second_ptr, token_ptr, num_blocks, tokens_ptr, levels_ptr, levels_stride, column_ptr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    best, index, second = _best_two(tl.load(best_ptr + row * num_blocks + n, mask=n < num_blocks, other=float("-inf")))
    second = tl.maximum(second, tl.load(second_ptr + row * num_blocks + index))
    gap = best - second
    level = (gap > _EDGES[0]).to(tl.int32)
    for i in tl.static_range(1, _NUM_EDGES):
        level += (gap > _EDGES[i]).to(tl.int32)
    tl.store(tokens_ptr + row, tl.load(token_ptr + row * num_blocks + index).to(tl.int64))
    tl.store(levels_ptr + row * levels_stride + tl.load(column_ptr), level.to(tl.int8))


def sample_rows(
    logits_RV: torch.Tensor,
    slots_R: torch.Tensor,
    temperature_S: torch.Tensor,
    seeds_S: torch.Tensor,
    positions_R: torch.Tensor,
    tokens_R: torch.Tensor,
    levels_RK: torch.Tensor,
    column: torch.Tensor,
    token_ids_V: torch.Tensor,
) -> None:
    """Launches the kernels that write draft tokens and their evidence levels, for `draft_sampling.sample_with_score_gap`.

    If `token_ids_V` is empty, column v of the logits is token v.
    """
    num_rows, num_vocab = logits_RV.shape
    num_blocks = triton.cdiv(num_vocab, BLOCK)
    # If these were parts of one tensor, their alignment would depend on the number of rows, and Triton compiles a kernel for
    # each alignment.
    best_RN, second_RN = (logits_RV.new_empty(num_rows, num_blocks, dtype=torch.float32) for _ in range(2))
    token_RN = logits_RV.new_empty(num_rows, num_blocks, dtype=torch.int32)
    _best_of_block[(num_rows, num_blocks)](
        logits_RV, logits_RV.stride(0), slots_R.contiguous(), temperature_S, seeds_S, positions_R.contiguous(),
        token_ids_V, best_RN, second_RN, token_RN, num_vocab, IS_REDUCED=len(token_ids_V) > 0, BLOCK=BLOCK,
    )  # fmt: skip
    _best_of_row[(num_rows,)](
        best_RN, second_RN, token_RN, num_blocks, tokens_R, levels_RK, levels_RK.stride(0), column,
        BLOCK=triton.next_power_of_2(num_blocks), num_warps=1,
    )  # fmt: skip
