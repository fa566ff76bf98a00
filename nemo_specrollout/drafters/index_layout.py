# SPDX-License-Identifier: Apache-2.0
"""Layout of the context index, on which its numba and Triton bodies agree bit for bit.

A *context* is a salt and the last m tokens of a text. The index maps each context to the tokens that followed it::

    words int64 [buckets, 8]       one word for each of the 8 contexts of a bucket (64 bytes: one cache line)
        bits 63..16  High 48 bits of the context's key. They tell the contexts of a bucket apart.
        bits 15..0   Rank, modulo 2^16. The context of the lowest rank is replaced first.
        A word of 0 is a free slot.
    candidates int64 [buckets * 8, 4]   the four tokens that followed most often, with their counts
        bits 63..32  Token.
        bits 31..0   Count. A candidate of count 0 is unused.

**Key** of a context of tokens t_1 (the last one) to t_m: mix64(salt + sum over j of (t_j + 1) * GAMMA * MIX_2^(j-1)),
with the highest bit set so that no word is 0. The low bits of the key choose the bucket.

**Ranks.** A context that is counted gains `GAIN` ranks, but it is never more than `MAX_LEAD` above the lowest rank of its
bucket. A new context takes a free slot, or the slot of the lowest rank. It starts one rank above the lowest. So each new
context raises the floor, and a context that is no longer counted is replaced however popular it was. A context that was
counted twice outlives many that were counted once. The ranks of a bucket are at most MAX_LEAD + 1 apart, so comparing them
modulo 2^16 is safe. Nothing needs rescaling, and counting writes a single word.

**Counts.** A token that is not a candidate replaces the candidate of the lowest count. It starts from that count plus one
(space-saving, Metwally et al. 2005). When a count reaches `MAX_COUNT`, all four are halved, so old text counts less and less.

Delete `__pycache__` after changing a number here: numba's cache notices only changes of the file that it compiles.
"""

BUCKET_SLOTS = 8
"""Contexts in a bucket."""
NUM_CANDIDATES = 4
"""Candidates of a context."""
SLOT_BYTES = 8 * (1 + NUM_CANDIDATES)
"""Bytes of a context: its word and its candidates."""

RANK_BITS = 16
"""Bits of a rank."""
RANK_MASK = (1 << RANK_BITS) - 1
"""Bits of a word that hold the rank."""
IN_USE = 1 << 63
"""The bit that every key has set."""
GAIN = 4
"""Ranks that a context gains when it is counted."""
MAX_LEAD = 16
"""Largest number of ranks that counting can put a context above the lowest of its bucket."""

COUNT_MASK = (1 << 32) - 1
"""Bits of a candidate that hold the count."""
MAX_COUNT = 16
"""The count at which all counts of a context are halved."""
