# SPDX-License-Identifier: Apache-2.0
"""Rings of tokens chained by prefix hashes: both sides keep the last positions of each request's text in one.

The prefix hash of a position covers the request's seed and all tokens before that position. Each side computes it from its own
text, so equal hashes mean equal texts.
"""

import numpy as np
from numba import from_dtype, njit

from nemo_specrollout.sampling.numba_common import mix64
from nemo_specrollout.sampling.seeds import GAMMA

ENTRY = np.dtype([("prefix_hash", np.uint64), ("token", np.int32), ("level", np.int8)], align=True)
"""One position of a text: hash of all tokens before it, its token, and the evidence level if the token was drafted."""
RINGS = from_dtype(ENTRY)[:, ::1]
"""Type of rings in the signature of a kernel."""
_GAMMA = np.uint64(GAMMA)


def new_rings(num_rows: int, least_size: int) -> np.ndarray:
    """Returns empty rings [num_rows, size]; `size` is the power of two above `least_size`."""
    return np.zeros((num_rows, 1 << least_size.bit_length()), ENTRY)


@njit("uint64(uint64, int64)", cache=True)
def extend(prefix_hash, token):  # type: ignore[no-untyped-def]
    """Returns the hash of a text and one more token: SplitMix64's output function of their sum."""
    return mix64(prefix_hash + _GAMMA * np.uint64(token + 1))


@njit("uint64(uint64, int32[:])", cache=True)
def _extend_all(prefix_hash, tokens):  # type: ignore[no-untyped-def]
    for token in tokens:
        prefix_hash = extend(prefix_hash, token)
    return prefix_hash


def text_hash(seed: int, tokens: np.ndarray) -> int:
    """Returns the prefix hash after int32 `tokens`, the whole text of a request with this seed."""
    return int(_extend_all(np.uint64(seed), tokens))


@njit(cache=True)
def put(ring, position, token, level):  # type: ignore[no-untyped-def]
    """Writes a token into a ring, and with it the prefix hash of the next position."""
    mask = len(ring) - 1
    entry = ring[position & mask]
    entry.token, entry.level = token, level
    ring[(position + 1) & mask].prefix_hash = extend(entry.prefix_hash, token)
