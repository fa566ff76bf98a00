# SPDX-License-Identifier: Apache-2.0
"""SplitMix64's output function for GPU kernels (Steele, Lea, Flood 2014)."""

import triton
import triton.language as tl

from nemo_specrollout.sampling import constants

_MIX_1 = tl.constexpr(constants.MIX_1)
_MIX_2 = tl.constexpr(constants.MIX_2)


@triton.jit
def mix64(z):  # type: ignore[no-untyped-def]
    """A bijection of 64 bits, uint64, whose every output bit depends on all input bits."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)
