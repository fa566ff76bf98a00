# SPDX-License-Identifier: Apache-2.0
"""The context index, which counts which token followed each context, in tensors of fixed size on one device.

One index serves all requests of an engine. A *salt* is a number that keeps texts apart which must not see each other. For
example, the requests of a group may share a salt. No token leaves the device, and the host never waits for the device. Tokens
are counted in the order of rows, positions and context lengths, on a GPU too. So the tables do not depend on the device, and
the same rollout finds the same drafts again. The kernels are in `index_triton.py`.

Shapes: B rows of the batch, S request slots, L longest sequence, K draft positions.

A *context* is a salt and the last m tokens of a text. The index maps each context to the tokens that followed it::

    words int64 [buckets, 8]       one word for each of the 8 contexts of a bucket (64 bytes: one cache line)
        bits 63..16  High 48 bits of the context's key. They tell the contexts of a bucket apart.
        bits 15..0   Rank, modulo 2^16. The context with the lowest rank of its bucket is replaced first.
        A word of 0 is a free slot.
    candidates int64 [buckets * 8, 4]   the four tokens that followed most often, with their counts
        bits 63..32  Token.
        bits 31..0   Count. A candidate of count 0 is unused.

**Key** of a context of tokens t_1 (the last one) to t_m: mix64(salt + sum over j of (t_j + 1) * GAMMA * MIX_2^(j-1)),
with the highest bit set so that no word is 0. The low bits of the key choose the bucket.

**Ranks.** A context that is counted gains `GAIN` ranks, but it is never more than `MAX_LEAD` above the lowest rank of its
bucket. A new context takes a free slot, or else the slot of the lowest rank, and starts one rank above the lowest. So new
contexts raise the lowest rank, and a context that is no longer counted is replaced at some point, even if it was popular. A
context that was counted twice outlives many that were counted once. The ranks of a bucket are at most MAX_LEAD + 1 apart, so
they can be compared modulo 2^16. Therefore ranks are never rescaled, and counting writes a single word.

**Counts.** A token that is not a candidate replaces the candidate of the lowest count. It starts from that count plus one
(space-saving, Metwally et al. 2005). When a count reaches `MAX_COUNT`, all four counts of the context are halved, so old text
counts less and less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from nemo_specrollout.drafters.base import NUM_LEVELS, Proposals, Texts
from nemo_specrollout.sampling.platforms import KernelModule, kernels_for

BUCKET_SLOTS = 8
"""Number of contexts in a bucket."""
NUM_CANDIDATES = 4
"""Number of candidates of a context."""
RANK_BITS = 16
"""Number of bits of a rank."""
RANK_MASK = (1 << RANK_BITS) - 1
"""Bits of a word that hold the rank."""
IN_USE = 1 << 63
"""The highest bit, which is set in every key."""
GAIN = 4
"""Ranks that a context gains when it is counted."""
MAX_LEAD = 16
"""Largest number of ranks that counting can put a context above the lowest of its bucket."""

NO_SALT = -(1 << 63)
"""Salt of a request for which nothing is looked up, because no index knows its texts."""
NO_RANK = 1 << 20
FREE = -1 << 20
OWN = -1 << 21
"""Artificial ranks outside the range of real ones. They order the slots of a bucket when one of them is chosen for a key.
`OWN` stands for the key's own slot, which comes first. `FREE` stands for a free slot, which comes before any that is taken.
`NO_RANK` is above all of them, and stands for no slot."""

COUNT_MASK = (1 << 32) - 1
"""Bits of a candidate that hold the count."""
MAX_COUNT = 16
"""The count at which all counts of a context are halved."""
MAX_LISTED = 1 << 14
"""Most text positions of all rows together that an index learns in a step. The others wait for the next step (`unread.py`)."""
FEWEST_SLOTS = 1 << 10
"""Number of contexts that the smallest index holds."""
MAX_SLOTS = 1 << 24
"""Most contexts that an index holds unless a user asks for more. Each one takes 40 bytes."""


def context_orders(shortest: int, longest: int) -> tuple[int, ...]:
    """Returns the lengths of the contexts that are counted, ascending.

    They are all lengths up to 2, and then every second one. The others would take time and improve drafts only a little.
    """
    return (*range(shortest, min(longest, 2) + 1), *range(4, longest + 1, 2))


def slots_for(max_num_seqs: int, max_model_len: int, orders: Sequence[int]) -> int:
    """Returns the number of contexts that an index should hold, a power of two.

    Every token creates one context of each length in `orders`. At least half of these contexts are shared by the rollouts of a
    group and by repetitions in them. So the index gets a slot for half of the contexts of `max_num_seqs` texts of full length,
    rounded up, but no more than `MAX_SLOTS`. A smaller index only drafts less, because it forgets earlier.
    """
    wanted = max(FEWEST_SLOTS, max_num_seqs * max_model_len * len(orders) // 2)
    return min(1 << (wanted - 1).bit_length(), MAX_SLOTS)


class ContextIndex:
    """A hash table from (salt, last m tokens) to the tokens that followed and their counts.

    Owns `words` and `candidates`, which the docstring of this module explains.

    Invariant: the first `learned_S[s]` tokens of request slot s have been counted.

    Example: in each step, call `index.learn(texts, salts_S, learned_S, max_new)`, and then `index.walk(texts, salts_S, ...)`.
    """

    def __init__(self, num_slots: int, orders: tuple[int, ...], device: torch.device) -> None:
        """Creates an empty index of `num_slots` contexts, a power of two. `orders` are the lengths of contexts, ascending."""
        assert num_slots.bit_count() == 1 and num_slots >= BUCKET_SLOTS
        self.orders = orders
        kernels = kernels_for(device.type, KernelModule.STEP)
        self.words = kernels.empty_table(num_slots // BUCKET_SLOTS, BUCKET_SLOTS, device)
        self.candidates = kernels.empty_table(num_slots, NUM_CANDIDATES, device)
        self.use_kernels(kernels)

    def use_kernels(self, kernels: ModuleType) -> None:
        """Calls the kernels of this module from now on, and makes the module's own buffers for what a step learns."""
        self._kernels = kernels
        self.listed = kernels.listing_buffers(len(self.orders), self.words.device)

    def learn(self, texts: Texts, salts_S: torch.Tensor, learned_S: torch.Tensor, max_new: int) -> None:
        """Counts the new tokens of each text as continuations of their contexts.

        Args:
            texts: the texts of the batch. Rows whose slot is outside 0..S-1 are skipped.
            salts_S: int64, the salt under which each request reads and writes contexts.
            learned_S: int32, how many tokens of each text were counted before. It is updated.
            max_new: most new tokens per text. The rest of a longer text waits for the next call. So do tokens beyond
                `MAX_LISTED` in all texts together.
        """
        self._kernels.learn(Lookup(self, salts_S, learned_S), texts, max_new)

    def walk(
        self, texts: Texts, salts_S: torch.Tensor, level_rates: torch.Tensor, floor: float, out: Proposals
    ) -> None:
        """Extends each text by the likeliest continuation of its longest known context, token by token.

        A walk ends where no context is known, or where the product of the tokens' acceptance rates falls below `floor`.
        `level_rates` are these rates by evidence level, float32 [NUM_LEVELS]. `texts` and `salts_S` are as for `learn`. Beyond
        the tokens that are found, the buffers in `out` are not changed.
        """
        assert len(level_rates) == NUM_LEVELS
        without_learning = Lookup(self, salts_S, learned_S=salts_S)  # a walk does not read `learned_S`
        self._kernels.walk(without_learning, texts, level_rates, floor, out)


@dataclass(frozen=True)
class Lookup:
    """The context index of a drafter, and what the kernels need to know to use the index for it."""

    index: ContextIndex
    salts_S: torch.Tensor
    """Salt of each request, int64."""
    learned_S: torch.Tensor
    """Number of tokens of each request that have been counted, int32."""
    drafter: int = 0
    """Number of the drafter on the draft board."""
    learns: bool = True
    """Whether the index learns the texts of the requests in each step."""
