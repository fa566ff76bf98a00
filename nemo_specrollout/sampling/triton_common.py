# SPDX-License-Identifier: Apache-2.0
"""A function that this package's Triton kernels share. It tells a program of a kernel whether it is the last one to finish."""

import triton
import triton.language as tl


@triton.jit
def is_last(counter_ptr, num):  # type: ignore[no-untyped-def]
    """Tells whether this program is the last of `num` programs to call this function. If so, it sees all stores of the others.

    `counter_ptr` points to a counter in memory that the programs share. It must be 0 at first.
    """
    tl.debug_barrier()  # one thread counts for the program, after the stores of all its threads
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num - 1
