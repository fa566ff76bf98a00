# SPDX-License-Identifier: Apache-2.0
"""Text drafters, which have no weights and propose tokens that they find in texts on the engine's device.

Shapes: S request slots, B entries of the batch.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_specrollout.config.drafter_configs import (
    AheadDrafterConfig,
    LookupDrafterConfig,
    RandomDrafterConfig,
    SuffixDrafterConfig,
    TextDrafterConfig,
)
from nemo_specrollout.drafters.ahead import AheadText
from nemo_specrollout.drafters.base import NUM_LEVELS, Proposals, Texts
from nemo_specrollout.drafters.device_index import ContextIndex, Lookup, context_orders, slots_for
from nemo_specrollout.drafters.participant import Drafter, Put
from nemo_specrollout.drafters.unread import UnreadTokens


class LookupDrafter(Drafter):
    """Finds a request's last tokens in earlier texts with the same salt, and proposes the tokens that followed them there.

    Requests with different salts do not see each other's texts. Owns the context index, and `unread`, which bounds how many
    tokens the index has yet to read.
    """

    shortest_context: int
    """Number of tokens of the shortest contexts that the index counts."""

    def __init__(self, config: LookupDrafterConfig, num_slots: int, max_model_len: int, device: torch.device) -> None:
        orders = context_orders(self.shortest_context, config.max_order)
        self.index = ContextIndex(config.num_slots or slots_for(num_slots, max_model_len, orders), orders, device)
        self._salts_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._learned_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.unread = UnreadTokens(num_slots)

    @abstractmethod
    def start_of(self, identity: Any, num_tokens: int) -> tuple[int, int]:
        """Returns a new request's salt, and how many tokens at the beginning of its text the index does not count.

        Only requests with the same salt see each other's texts. `identity` is the request's `RequestIdentity`, and
        `num_tokens` is the length of its text.
        """

    def open(self, slots: torch.Tensor, requests: Sequence[Any], put: Put) -> None:
        salts, learned = zip(*(self.start_of(r.identity, r.num_tokens) for r in requests), strict=True)
        self._salts_S[slots] = put(salts, np.int64)
        self._learned_S[slots] = put(learned, np.int32)
        num_unread = [r.num_tokens - start for r, start in zip(requests, learned, strict=True)]
        self.unread.open([r.slot for r in requests], num_unread)

    def close(self, slots: Sequence[int]) -> None:
        self.unread.close(slots)

    def lookup(self, drafter: int) -> Lookup:
        return Lookup(self.index, self._salts_S, self._learned_S, drafter)


class SuffixLookup(LookupDrafter):
    """Finds a request's last tokens in all responses to the same prompt, its own included, and proposes what followed there.

    The idea is that of SuffixDecoding (arXiv 2411.04975). All requests with the same prompt share their contexts. Each sampled
    token is counted at once. So a request that lags behind gets drafts from samples that are ahead of it. The salt depends on
    the prompt alone. So responses of past epochs are remembered until the index needs the room.
    """

    name = "suffix"
    shortest_context = 1

    def start_of(self, identity: Any, num_tokens: int) -> tuple[int, int]:
        return identity.group, num_tokens


class NgramLookup(LookupDrafter):
    """Proposes the tokens that followed a request's last tokens earlier in its own text (prompt lookup, Saxena 2023).

    The text is the prompt and the response so far.
    """

    name = "ngram"
    shortest_context = 2

    def start_of(self, identity: Any, num_tokens: int) -> tuple[int, int]:
        return identity.seed, 0


class RandomTokens(Drafter):
    """Proposes random tokens, to measure the worst case and to test that outputs do not depend on drafts."""

    name = "random"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, texts: Texts, out: Proposals) -> None:
        num_requests = len(texts.slots_B)
        out.tokens_BK[:num_requests].random_(0, self._vocab_size)
        out.levels_BK[:num_requests] = NUM_LEVELS - 1
        out.found_B[:num_requests] = out.tokens_BK.shape[1]


def build_text_drafter(
    config: TextDrafterConfig,
    num_slots: int,
    max_model_len: int,
    vocab_size: int,
    device: torch.device,
    most_paths: int = 1,
) -> Drafter:
    """Returns the text drafter that `config` names, for an engine with `num_slots` request slots.

    `most_paths` is the largest number of texts that a request can bring along for the drafter `ahead`.
    """
    if isinstance(config, RandomDrafterConfig):
        return RandomTokens(vocab_size)
    if isinstance(config, AheadDrafterConfig):
        return AheadText(num_slots, max_model_len, vocab_size, device, most_paths)
    assert isinstance(config, LookupDrafterConfig)
    lookup = SuffixLookup if isinstance(config, SuffixDrafterConfig) else NgramLookup
    return lookup(config, num_slots, max_model_len, device)
