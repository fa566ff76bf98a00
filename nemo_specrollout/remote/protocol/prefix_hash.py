# SPDX-License-Identifier: Apache-2.0
"""A 64-bit hash of a request's seed and first tokens, extended token by token: says which text a draft goes on from.

Both sides compute it alone, so a message is understood by itself: one that is late, doubled or out of order names a text
that its receiver does not have at that position, and is dropped.
"""

import numpy as np
from numba import njit

from nemo_specrollout.sampling.constants import GAMMA
from nemo_specrollout.sampling.cpu_mix import mix64

_GAMMA = np.uint64(GAMMA)


@njit("uint64(uint64, int64)", cache=True)
def extend(prefix_hash, token):  # type: ignore[no-untyped-def]
    """The hash of a text and one more token: SplitMix64's output function over their sum."""
    return mix64(prefix_hash + _GAMMA * np.uint64(token + 1))


@njit("uint64(uint64, int32[:])", cache=True)
def extend_all(prefix_hash, tokens):  # type: ignore[no-untyped-def]
    """The hash of a text and all of `tokens` after it."""
    for token in tokens:
        prefix_hash = extend(prefix_hash, token)
    return prefix_hash


def of_text(seed: int, tokens: np.ndarray) -> int:
    """The hash of int32 `tokens`, all of a request's text, under its seed."""
    return int(extend_all(np.uint64(seed), tokens))
