# SPDX-License-Identifier: Apache-2.0
"""What the CPU body does to one context: find its slot, claim one, count what followed, read it.

Tables are flat here and indexed with unsigned numbers: numba would check signed ones for being negative.
"""

import numpy as np
from numba import njit

from nemo_specrollout.drafters import index_layout as layout

_BUCKET_SLOTS = layout.BUCKET_SLOTS
_NUM_CANDIDATES = layout.NUM_CANDIDATES
_RANK_BITS = np.int64(layout.RANK_BITS)
_RANK_MASK = np.int64(layout.RANK_MASK)
_COUNT_MASK = np.int64(layout.COUNT_MASK)
_MAX_COUNT = layout.MAX_COUNT
_GAIN = layout.GAIN
_MAX_LEAD = layout.MAX_LEAD
# Beyond all ranks: no slot, a free one, and the key's own.
_NONE = np.int64(1 << 20)
_FREE = np.int64(-1 << 20)
_OWN = np.int64(-1 << 21)


@njit(cache=True, inline="always")
def line_of(words, key):  # type: ignore[no-untyped-def]
    """Where the bucket of `key` begins."""
    return np.uint64(key) * np.uint64(_BUCKET_SLOTS) & np.uint64(len(words) - 1)


@njit(cache=True, inline="always")
def candidate_at(slot, c):  # type: ignore[no-untyped-def]
    """Where candidate c of a slot is."""
    return np.uint64(slot) * np.uint64(_NUM_CANDIDATES) + np.uint64(c)


@njit(cache=True, inline="always")
def _rank(word, reference):  # type: ignore[no-untyped-def]
    """By how many ranks a word is above another of its bucket."""
    return np.int64(np.int16(word - reference))


@njit(cache=True)
def find(words, key):  # type: ignore[no-untyped-def]
    """The slot of `key`, or -1."""
    line = line_of(words, key)
    for i in range(_BUCKET_SLOTS):
        if (words[line + np.uint64(i)] ^ key) >> _RANK_BITS == 0:
            return np.int64(line + np.uint64(i))
    return np.int64(-1)


@njit(cache=True)
def claim(words, candidates, key):  # type: ignore[no-untyped-def]
    """The slot of `key`, which gains by it: its own, else a free one, else that of the lowest rank of its bucket."""
    line = line_of(words, key)
    reference = words[line]
    least = _NONE
    best = _NONE * _BUCKET_SLOTS
    for i in range(_BUCKET_SLOTS):
        word = words[line + np.uint64(i)]
        rank = _rank(word, reference)
        least = min(least, _NONE if word == 0 else rank)
        cost = _OWN if (word ^ key) >> _RANK_BITS == 0 else _FREE if word == 0 else rank
        best = min(best, cost * _BUCKET_SLOTS + i)
    least = np.int64(0) if least == _NONE else least
    slot = line + np.uint64(best & (_BUCKET_SLOTS - 1))
    if best < (_OWN + 1) * _BUCKET_SLOTS:
        rank = _rank(words[slot], reference)
        rank = max(rank, min(rank + _GAIN, least + _MAX_LEAD))
    else:
        rank = least + 1
        for c in range(_NUM_CANDIDATES):
            candidates[candidate_at(slot, c)] = 0
    words[slot] = (key & ~_RANK_MASK) | ((reference + rank) & _RANK_MASK)
    return slot


@njit(cache=True)
def count(candidates, slot, token):  # type: ignore[no-untyped-def]
    """Counts `token` among the candidates of a slot, in place of the rarest if need be."""
    chosen = candidate_at(slot, 0)
    least = _COUNT_MASK
    for c in range(_NUM_CANDIDATES):
        candidate = candidates[candidate_at(slot, c)]
        if candidate >> 32 == token:
            chosen = candidate_at(slot, c)
            break
        if candidate & _COUNT_MASK < least:
            least = candidate & _COUNT_MASK
            chosen = candidate_at(slot, c)
    num = (candidates[chosen] & _COUNT_MASK) + 1
    candidates[chosen] = (np.int64(token) << 32) | num
    if num >= _MAX_COUNT:
        for c in range(_NUM_CANDIDATES):
            candidate = candidates[candidate_at(slot, c)]
            candidates[candidate_at(slot, c)] = (candidate & ~_COUNT_MASK) | ((candidate & _COUNT_MASK) >> 1)


@njit(cache=True)
def likeliest(candidates, slot, order):  # type: ignore[no-untyped-def]
    """The commonest candidate, the first of equals, and the evidence for it in 16 grades: four by the context's length,
    four by the candidate's share, shrunk by one. No evidence: -1."""
    total = np.int64(0)
    best = np.int64(0)
    token = np.int64(0)
    for c in range(_NUM_CANDIDATES):
        candidate = candidates[candidate_at(slot, c)]
        num = candidate & _COUNT_MASK
        total += num
        if num > best:
            best = num
            token = candidate >> 32
    by_share = int(20 * best >= 9 * (total + 1)) + int(5 * best >= 3 * (total + 1)) + int(4 * best >= 3 * (total + 1))
    by_order = int(order > 2) + int(order > 4) + int(order > 6)
    return token, by_order * 4 + by_share if best > 0 else -1
