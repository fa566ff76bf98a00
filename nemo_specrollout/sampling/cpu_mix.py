# SPDX-License-Identifier: Apache-2.0
"""SplitMix64's output function for compiled CPU kernels (Steele, Lea, Flood 2014)."""

import numpy as np
from numba import njit

from nemo_specrollout.sampling import constants

_MIX_1, _MIX_2 = np.uint64(constants.MIX_1), np.uint64(constants.MIX_2)


@njit(cache=True, inline="always")
def mix64(z):  # type: ignore[no-untyped-def]
    """A bijection of 64 bits whose every output bit depends on all input bits."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
