# SPDX-License-Identifier: Apache-2.0
"""A function that our Triton kernels share. It tells whether a program is the last one to arrive at a counter."""

import triton
import triton.language as tl


@triton.jit
def is_last(counter_ptr, num):  # type: ignore[no-untyped-def]
    """Returns whether this program is the last of the `num` programs that use a counter. Then all their stores are visible."""
    tl.debug_barrier()  # one thread counts for the program, after the stores of all its threads
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num - 1
