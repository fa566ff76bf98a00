# SPDX-License-Identifier: Apache-2.0
"""Who proposes: one file per method, one interface (`base.py`)."""

from nemo_specrollout.config.block import DrafterConfig
from nemo_specrollout.drafters.base import Drafter


def build_drafter(config: DrafterConfig, num_lanes: int, vocab_size: int) -> Drafter:
    """The drafter that `config` names, for at most `num_lanes` requests at a time."""
    if config.type == "ngram":
        from nemo_specrollout.drafters.ngram import NgramDrafter

        return NgramDrafter(num_lanes, config.max_order, config.num_slots)
    if config.type == "suffix":
        from nemo_specrollout.drafters.suffix import SuffixDrafter

        return SuffixDrafter(num_lanes, config.max_order, config.num_slots)
    if config.type == "random":
        from nemo_specrollout.drafters.random_tokens import RandomDrafter

        return RandomDrafter(vocab_size)
    raise ValueError(f"unknown drafter {config.type!r}")
