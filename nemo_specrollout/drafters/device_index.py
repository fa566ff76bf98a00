# SPDX-License-Identifier: Apache-2.0
"""The context index, which counts which token followed each context, in tensors of fixed size on the engine's device.

A *context* is the last m tokens of a text together with a salt. A *salt* is a number that keeps texts apart which must not see
each other. For example, all requests with the same prompt may share a salt. One index serves all requests of an engine. No
token leaves the device, and the host never waits for the device. Also on a GPU, tokens are counted in the order of requests,
positions and context lengths. So the tables do not depend on the type of device, and the same rollout finds the same drafts
again. The kernels are in `index_triton.py`.

Shapes: B entries of the batch, S request slots, L longest text, K draft positions.

The index maps each context to the tokens that followed it::

    words int64 [buckets, 8]       one word for each of the 8 contexts of a bucket (64 bytes: one cache line)
        bits 63..16  High 48 bits of the context's key. They tell the contexts of a bucket apart.
        bits 15..0   Rank, modulo 2^16. The context with the lowest rank of its bucket is replaced first.
        A word of 0 is a free slot.
    candidates int64 [buckets * 8, 4]   the four tokens that followed most often, with their counts
        bits 63..32  Token.
        bits 31..0   Count. A candidate of count 0 is unused.

**Key** of a context with the tokens t_1 (the last one) to t_m: mix64(salt + sum over j of (t_j + 1) * GAMMA * MIX_2^(j-1)).
Its highest bit is set, so that no word is 0. The low bits of the key choose the bucket.

**Ranks.** A context that is counted gains `GAIN` ranks, but its rank is never more than `MAX_LEAD` above the lowest rank of
its bucket. A new context takes a free slot, or else the slot with the lowest rank. It starts one rank above the lowest. So new
contexts raise the lowest rank, and a context that is no longer counted is replaced at some point, even if it was popular. A
context that was counted twice outlives many that were counted once. The ranks of a bucket are at most MAX_LEAD + 1 apart, so
they can be compared modulo 2^16. Therefore ranks never need to be rescaled, and counting writes a single word.

**Counts.** A token that is not a candidate replaces the candidate with the lowest count. It starts from that count plus one
(space-saving, Metwally et al. 2005). When a count reaches `MAX_COUNT`, all four counts of the context are halved. So old text
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
"""Number of tokens that the index remembers for a context, which are those that followed it most often."""
RANK_BITS = 16
"""Number of bits of a word that hold the context's rank."""
RANK_MASK = (1 << RANK_BITS) - 1
"""Mask of the bits of a word that hold the context's rank."""
IN_USE = 1 << 63
"""The highest bit of a key. It is set in every key, so that the word of a context is never 0."""
GAIN = 4
"""Number by which the rank of a context rises each time the context is counted."""
MAX_LEAD = 16
"""Largest number by which a context's rank can be above the lowest rank of its bucket."""

NO_SALT = -(1 << 63)
"""Salt of a request for which nothing is looked up, because the index knows no texts for it."""
NO_RANK = 1 << 20
FREE = -1 << 20
OWN = -1 << 21
"""Numbers that stand in for ranks when a slot of a bucket is chosen for a key. The slot with the smallest number is chosen.
`OWN` is for the slot that already has the key, and is the smallest. `FREE` is for a free slot, and is below every rank.
`NO_RANK` is above every rank. It stands for the lowest rank of a bucket while a bucket has no contexts."""

COUNT_MASK = (1 << 32) - 1
"""Mask of the bits of a candidate that hold its count."""
MAX_COUNT = 16
"""Count at which all counts of a context are halved."""
MAX_LISTED = 1 << 14
"""Largest number of tokens that an index learns in an engine step, over all texts together. Further tokens wait for the next
engine step (`unread.py`)."""
FEWEST_SLOTS = 1 << 10
"""Number of contexts for which the smallest index has room."""
MAX_SLOTS = 1 << 24
"""Largest number of contexts for which an index has room, unless a user asks for more. Each context takes 40 bytes."""


def context_orders(shortest: int, longest: int) -> tuple[int, ...]:
    """Returns the lengths of the contexts that an index counts, in tokens and ascending.

    These are the lengths from `shortest` to 2, and the even lengths from 4 to `longest`. Counting other lengths too would take
    time and improve drafts only a little.
    """
    return (*range(shortest, min(longest, 2) + 1), *range(4, longest + 1, 2))


def slots_for(max_num_seqs: int, max_model_len: int, orders: Sequence[int]) -> int:
    """Returns the number of contexts for which an index should have room. It is a power of two.

    Each token of a text adds one context of each length in `orders`. At least half of these contexts repeat within a response
    or in other responses to the same prompt. So the result is half the number of contexts of `max_num_seqs` texts of full
    length, rounded up, but at most `MAX_SLOTS`. A smaller index forgets earlier and so drafts less, but does no other harm.
    """
    wanted = max(FEWEST_SLOTS, max_num_seqs * max_model_len * len(orders) // 2)
    return min(1 << (wanted - 1).bit_length(), MAX_SLOTS)


class ContextIndex:
    """A hash table that maps a context to the tokens that followed it and their counts.

    A context is a salt and the last m tokens of a text. Owns the tensors `words` and `candidates`, which the docstring of this
    module explains.

    Invariant: for the text in request slot s, the first `learned_S[s]` tokens have been counted.

    Example: in each engine step, call `index.learn(texts, salts_S, learned_S, max_new)`, and then `index.walk(texts, salts_S,
    ...)`.
    """

    def __init__(self, num_slots: int, orders: tuple[int, ...], device: torch.device) -> None:
        """Creates an empty index with room for `num_slots` contexts, which must be a power of two.

        `orders` are the lengths of the contexts that it counts, in tokens and ascending.
        """
        assert num_slots.bit_count() == 1 and num_slots >= BUCKET_SLOTS
        self.orders = orders
        kernels = kernels_for(device.type, KernelModule.STEP)
        self.words = kernels.empty_table(num_slots // BUCKET_SLOTS, BUCKET_SLOTS, device)
        self.candidates = kernels.empty_table(num_slots, NUM_CANDIDATES, device)
        self.use_kernels(kernels)

    def use_kernels(self, kernels: ModuleType) -> None:
        """Makes the index call the kernels in the Python module `kernels` from now on.

        These kernels need buffers for the tokens to learn, which become the attribute `listed`.
        """
        self._kernels = kernels
        self.listed = kernels.listing_buffers(len(self.orders), self.words.device)

    def learn(self, texts: Texts, salts_S: torch.Tensor, learned_S: torch.Tensor, max_new: int) -> None:
        """Counts the new tokens of each text as tokens that followed their contexts.

        Args:
            texts: the texts of the batch. An entry whose slot is not within 0..S-1 is skipped.
            salts_S: salt of each request, int64. Requests with different salts share no contexts.
            learned_S: number of tokens of each text that were counted before, int32. The call updates it.
            max_new: largest number of new tokens of a text that are counted in this call. Further tokens wait for the next
                call. The same holds for tokens beyond the first `MAX_LISTED` of all texts together.
        """
        self._kernels.learn(Lookup(self, salts_S, learned_S), texts, max_new)

    def walk(
        self, texts: Texts, salts_S: torch.Tensor, level_rates: torch.Tensor, floor: float, out: Proposals
    ) -> None:
        """Proposes a continuation of each text, token by token.

        Each proposed token is the one that most often followed the longest context that is known. A proposal ends where no
        context is known, or where the product of its tokens' acceptance rates falls below `floor`. `level_rates` has the
        acceptance rate of each evidence level, float32 [NUM_LEVELS]. `texts` and `salts_S` are as for `learn`. The buffers in
        `out` are not changed beyond the tokens that are proposed.
        """
        assert len(level_rates) == NUM_LEVELS
        without_learning = Lookup(self, salts_S, learned_S=salts_S)  # a walk does not read `learned_S`
        self._kernels.walk(without_learning, texts, level_rates, floor, out)


@dataclass(frozen=True)
class Lookup:
    """The context index of a drafter, and the tensors and settings with which the kernels use it."""

    index: ContextIndex
    salts_S: torch.Tensor
    """Salt of the request in each slot, int64."""
    learned_S: torch.Tensor
    """Number of tokens of the text in each slot that the index has counted, int32."""
    drafter: int = 0
    """Index of the drafter on the draft board."""
    learns: bool = True
    """Whether the index counts the new tokens of the requests in each engine step."""
