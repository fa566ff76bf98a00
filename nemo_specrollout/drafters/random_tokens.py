# SPDX-License-Identifier: Apache-2.0
"""A drafter that is always wrong, for measuring the worst case and for testing that outputs do not depend on drafts."""

import numpy as np

from nemo_specrollout.drafters.base import NUM_LEVELS, Batch, Demand, Drafter, DraftRequest, Proposal


class RandomDrafter(Drafter):
    """Proposes uniformly random tokens with the strongest evidence level; remembers nothing."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def open(self, lane: int, request: DraftRequest) -> None:
        pass

    def propose(self, batch: Batch, demand: Demand, out: Proposal) -> None:
        out.tokens_BK[:] = self._rng.integers(0, self._vocab_size, out.tokens_BK.shape, dtype=np.int32)
        out.levels_BK[:] = NUM_LEVELS - 1
        out.lengths_B[:] = out.tokens_BK.shape[1]
