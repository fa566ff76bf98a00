# SPDX-License-Identifier: Apache-2.0
"""Drafters that read text (`text.py`), and the board on which the proposals of all drafters meet (`board.py`)."""

from typing import TYPE_CHECKING

from nemo_specrollout.config.drafter_configs import (
    NgramDrafterConfig,
    RandomDrafterConfig,
    SuffixDrafterConfig,
    TextDrafterConfig,
)

if TYPE_CHECKING:
    import torch

    from nemo_specrollout.drafters.text import TextDrafter


def build_text_drafter(
    config: TextDrafterConfig, num_slots: int, max_model_len: int, vocab_size: int, device: "torch.device"
) -> "TextDrafter":
    """Returns the text drafter that `config` names, for `num_slots` concurrent requests on the engine's device."""
    from nemo_specrollout.drafters.device_index import context_orders, slots_for
    from nemo_specrollout.drafters.text import NgramLookup, RandomTokens, SuffixLookup

    if isinstance(config, RandomDrafterConfig):
        return RandomTokens(vocab_size)
    if not isinstance(config, SuffixDrafterConfig | NgramDrafterConfig):
        raise TypeError(f"no text drafter for {type(config).__name__}")
    cls = SuffixLookup if isinstance(config, SuffixDrafterConfig) else NgramLookup
    index_slots = config.num_slots or slots_for(
        num_slots, max_model_len, context_orders(cls.shortest_context, config.max_order)
    )
    return cls(num_slots, config.max_order, index_slots, device)
