# SPDX-License-Identifier: Apache-2.0
"""SplitMix64's output function for our Triton kernels."""

import triton
import triton.language as tl

from nemo_specrollout.sampling.seeds import MIX_1, MIX_2

_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


@triton.jit
def mix64(z):  # type: ignore[no-untyped-def]
    """Returns a bijection of a uint64 whose every output bit depends on all input bits."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)
