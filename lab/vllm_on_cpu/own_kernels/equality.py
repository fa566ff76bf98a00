# SPDX-License-Identifier: Apache-2.0
"""The kernel that accepts drafts by equality with the sampled tokens, on a CPU (`sampling/equality.py`)."""

from numba import njit

from lab.vllm_on_cpu.own_kernels.tensors import on_tensors


@on_tensors
@njit(cache=True, nogil=True)
def accept_rows(sampled_R, inputs_R, starts_B1, emitted_BK, counts_B):  # type: ignore[no-untyped-def]
    for b in range(len(counts_B)):
        emitted_BK[b] = 0
        count = 0
        for row in range(starts_B1[b], starts_B1[b + 1]):
            emitted_BK[b, count] = sampled_R[row]
            count += 1
            if row + 1 == starts_B1[b + 1] or inputs_R[row + 1] != sampled_R[row]:
                break
        counts_B[b] = count
