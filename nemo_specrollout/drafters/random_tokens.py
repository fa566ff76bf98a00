# SPDX-License-Identifier: Apache-2.0
"""A drafter that is always wrong, for measuring the worst case and for testing that outputs do not depend on drafts."""

import numpy as np

from nemo_specrollout.drafters.base import NUM_LEVELS, Batch, Drafter, Proposal


class RandomDrafter(Drafter):
    """Proposes uniformly random tokens with the strongest evidence level; remembers nothing."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def open(self, lane: int, request_key: int, group_key: int, prompt: np.ndarray) -> None:
        pass

    def observe(self, batch: Batch) -> None:
        pass

    def propose(self, batch: Batch, max_tokens: int) -> Proposal:
        shape = (len(batch.lanes_B), max_tokens)
        tokens_BK = self._rng.integers(0, self._vocab_size, shape, dtype=np.int32)
        levels_BK = np.full(shape, NUM_LEVELS - 1, np.int8)
        return Proposal(tokens_BK, np.full(shape[0], max_tokens, np.int64), levels_BK)
