# SPDX-License-Identifier: Apache-2.0
"""Drafters that read text, on the engine's device: what every one of them is, and each of them.

Shapes: S request slots, B requests of the batch, K draft positions, L longest sequence, E evidence levels.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch

from nemo_specrollout.drafters.base import NUM_LEVELS
from nemo_specrollout.drafters.device_index import ContextIndex, context_orders

SMALLEST_SHARE = 0.02
"""A draft token less likely than that is not looked up."""


class TextDrafter(ABC):
    """Proposes continuations of the requests' texts; owns whatever it remembers of texts.

    Invariant: nothing that a drafter does can change a request's output, only when it arrives.
    """

    name: str

    @abstractmethod
    def start_of(self, identity: Any, prompt_length: int, num_tokens: int) -> tuple[int, int]:
        """The salt of a request that comes, and how much of its text needs no learning."""

    @abstractmethod
    def open(self, slots: torch.Tensor, salts: torch.Tensor, learned: torch.Tensor) -> None:
        """Requests take `slots`."""

    @abstractmethod
    def propose(
        self,
        slots_B: torch.Tensor,
        total_len_S: torch.Tensor,
        token_ids_SL: torch.Tensor,
        most_new: int,
        rates_E: torch.Tensor,
        tokens_BK: torch.Tensor,
        levels_BK: torch.Tensor,
        found_B: torch.Tensor,
    ) -> None:
        """Learns the requests' new tokens, `most_new` at most, then writes up to K draft tokens, int32, their evidence
        levels, int8, and how many they are. `rates_E`: which share of each level's tokens comes true."""


class LookupDrafter(TextDrafter):
    """Proposes what followed the request's last tokens before, in texts of its salt; owns the index of contexts."""

    shortest_context: int

    def __init__(self, num_slots: int, max_order: int, index_slots: int, device: torch.device) -> None:
        self.index = ContextIndex(index_slots, context_orders(self.shortest_context, max_order), device)
        self._salts_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._learned_S = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def open(self, slots: torch.Tensor, salts: torch.Tensor, learned: torch.Tensor) -> None:
        self._salts_S[slots] = salts
        self._learned_S[slots] = learned

    def propose(
        self,
        slots_B: torch.Tensor,
        total_len_S: torch.Tensor,
        token_ids_SL: torch.Tensor,
        most_new: int,
        rates_E: torch.Tensor,
        tokens_BK: torch.Tensor,
        levels_BK: torch.Tensor,
        found_B: torch.Tensor,
    ) -> None:
        self.index.learn(slots_B, self._salts_S, self._learned_S, total_len_S, token_ids_SL, most_new)
        self.index.walk(
            slots_B, self._salts_S, total_len_S, token_ids_SL, rates_E, SMALLEST_SHARE, tokens_BK, levels_BK, found_B
        )


class SuffixLookup(LookupDrafter):
    """What the request's siblings, and earlier rollouts of its prompt, wrote after the same last tokens.

    A group shares its contexts, filled as tokens arrive, so that a straggler drafts from those that ran ahead. The group's
    key is its prompt, so past epochs are remembered until the index needs their room (after SuffixDecoding,
    arXiv 2411.04975).
    """

    name = "suffix"
    shortest_context = 1

    def start_of(self, identity: Any, prompt_length: int, num_tokens: int) -> tuple[int, int]:
        return identity.group, num_tokens


class NgramLookup(LookupDrafter):
    """What followed the request's last tokens where it wrote them before, prompt included (prompt lookup, Saxena 2023)."""

    name = "ngram"
    shortest_context = 2

    def start_of(self, identity: Any, prompt_length: int, num_tokens: int) -> tuple[int, int]:
        return identity.seed, 0


class RandomTokens(TextDrafter):
    """Always wrong: for measuring the worst case, and for testing that outputs do not depend on drafts."""

    name = "random"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def start_of(self, identity: Any, prompt_length: int, num_tokens: int) -> tuple[int, int]:
        return 0, 0

    def open(self, slots: torch.Tensor, salts: torch.Tensor, learned: torch.Tensor) -> None:
        """Remembers nothing."""

    def propose(
        self,
        slots_B: torch.Tensor,
        total_len_S: torch.Tensor,
        token_ids_SL: torch.Tensor,
        most_new: int,
        rates_E: torch.Tensor,
        tokens_BK: torch.Tensor,
        levels_BK: torch.Tensor,
        found_B: torch.Tensor,
    ) -> None:
        num_requests = len(slots_B)
        tokens_BK[:num_requests].random_(0, self._vocab_size)
        levels_BK[:num_requests] = NUM_LEVELS - 1
        found_B[:num_requests] = tokens_BK.shape[1]
