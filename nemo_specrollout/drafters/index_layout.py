# SPDX-License-Identifier: Apache-2.0
"""What the bodies of the context index agree on, bit for bit: an index that one wrote, the other reads.

Key of a context, 64 bits: mix64(salt + sum over j = 1..m of (token j from the end + 1) * GAMMA * MIX_2^(j-1)), highest
bit set. Its low bits choose a bucket of eight contexts; its high 48 bits tell the contexts of a bucket apart.

Word of a context: those 48 bits above 16 bits of rank. Zero: free. Who is counted gains `GAIN` ranks, but is never more
than `MAX_LEAD` above the lowest of its bucket. Who is new takes a free slot or that of the lowest, and ranks one above
the lowest. So every newcomer raises the floor: a context that is not asked for sinks, however popular it was, one that was
seen twice outlives many that were seen once, and neither needs a clock. Ranks count modulo 2^16 (in a bucket they are at
most MAX_LEAD + 1 apart), hence nothing has to be scaled down, and to count writes one word.

Candidates of a context: four of token * 2^32 + count. A token that is not among them replaces the rarest and takes over
its count plus one (space-saving, Metwally et al. 2005). A count that reaches `MAX_COUNT` halves all four: what a policy
wrote long ago weighs less and less.

Who changes a number here deletes `__pycache__`: numba's cache sees changes only of the file that it compiles.
"""

BUCKET_SLOTS = 8
NUM_CANDIDATES = 4
SLOT_BYTES = 8 * (1 + NUM_CANDIDATES)

RANK_BITS = 16
RANK_MASK = (1 << RANK_BITS) - 1
IN_USE = 1 << 63
GAIN = 4
MAX_LEAD = 16

COUNT_MASK = (1 << 32) - 1
MAX_COUNT = 16
