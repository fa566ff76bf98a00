# SPDX-License-Identifier: Apache-2.0
"""The output function of the random number generator SplitMix64, for numba kernels."""

import numpy as np
from numba import njit

from nemo_specrollout.sampling.seeds import MIX_1, MIX_2

_MIX_1 = np.uint64(MIX_1)
_MIX_2 = np.uint64(MIX_2)


@njit(cache=True, inline="always")
def mix64(z):  # type: ignore[no-untyped-def]
    """Applies the output function of SplitMix64 to a uint64, and returns the result.

    The function is a bijection, and every bit of its result depends on all bits of `z`.
    """
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
