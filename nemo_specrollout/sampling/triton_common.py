# SPDX-License-Identifier: Apache-2.0
"""A function that our Triton kernels share, which tells whether a program is the last one to arrive."""

import triton
import triton.language as tl


@triton.jit
def is_last(counter_ptr, num):  # type: ignore[no-untyped-def]
    """Returns whether the other `num - 1` programs that use this counter have arrived. If so, their stores are visible."""
    tl.debug_barrier()  # one thread counts for the program, after the stores of all its threads
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num - 1
