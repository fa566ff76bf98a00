# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of `equality.py`, which accepts draft tokens. It has one program for each request.

The kernel of `row_sampling_triton.py` calls the same function `accept_request`.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def accept_request(  # type: ignore[no-untyped-def]
    request, sampled_ptr, inputs_ptr, starts_ptr, emitted_ptr, counts_ptr, K1: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the tokens that one request gets in an engine step to `emitted_ptr`, and their number to `counts_ptr`.

    Both results are those of `equality.accept_by_equality`, which also explains the first arguments. `K1` is K + 1, where K is
    the maximum number of draft tokens of a request. `BLOCK` is a power of two of at least K + 1.
    """
    start = tl.load(starts_ptr + request)
    num_rows = tl.load(starts_ptr + request + 1) - start
    k = tl.arange(0, BLOCK)
    sampled = tl.load(sampled_ptr + start + k, mask=k < num_rows, other=0)
    draft = tl.load(inputs_ptr + start + k + 1, mask=k + 1 < num_rows, other=-1).to(tl.int64)
    last = tl.min(tl.where((sampled == draft) & (k + 1 < num_rows), BLOCK, k), axis=0)
    tl.store(emitted_ptr + request * K1 + k, tl.where(k <= last, sampled, 0), mask=k < K1)
    tl.store(counts_ptr + request, tl.minimum(last + 1, num_rows).to(tl.int32))


@triton.jit
def _accept_rows(sampled_ptr, inputs_ptr, starts_ptr, emitted_ptr, counts_ptr, K1: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    request = tl.program_id(0).to(tl.int64)
    accept_request(request, sampled_ptr, inputs_ptr, starts_ptr, emitted_ptr, counts_ptr, K1, BLOCK)


def accept_rows(
    sampled_R: torch.Tensor,
    inputs_R: torch.Tensor,
    starts_B1: torch.Tensor,
    emitted_BK: torch.Tensor,
    counts_B: torch.Tensor,
) -> None:
    """Writes the results of `equality.accept_by_equality` into `emitted_BK` and `counts_B`, by a Triton kernel."""
    num_requests, width = emitted_BK.shape
    block = triton.next_power_of_2(width)
    _accept_rows[(num_requests,)](
        sampled_R, inputs_R, starts_B1, emitted_BK, counts_B, K1=width, BLOCK=block, num_warps=1
    )
