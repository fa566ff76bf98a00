# SPDX-License-Identifier: Apache-2.0
"""A speculation policy that decides everything at random, to test that tokens do not depend on its decisions."""

from dataclasses import replace
from typing import Any

import numpy as np

from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.speculation.policy import FixedPolicy

RANDOM = BudgetConfig("random")
"""Budget that selects the random speculation policy in the block of a `RolloutEngine`. Users cannot write it in a config."""


class RandomPolicy(FixedPolicy):
    """Decides at random how many drafts are verified, how far a model drafts ahead, and when drafting pauses or is dormant."""

    def __init__(self, num_positions: int) -> None:
        super().__init__(num_positions, num_positions)
        self._rng = np.random.default_rng(1)
        self._is_paused = False

    def num_drafts(self, num_requests: int, most: int) -> int:
        return int(self._rng.integers(0, super().num_drafts(num_requests, max(most, 0)) + 1))

    def plan(self, num_requests: int, num_followed: int) -> int:
        self.is_dormant = bool(self._rng.random() < (3 / 4 if self.is_dormant else 1 / 512))
        return int(self._rng.integers(0, self.most_drafts + 1))

    def ends_step(self, num_requests: int, num_followed: int) -> bool:
        self._is_paused ^= bool(self._rng.random() < 1 / 4)
        return self._is_paused


def to_start_with(block: SpecrolloutConfig) -> SpecrolloutConfig:
    """Returns `block` in a form with which an engine can start.

    The budget `RANDOM` is replaced by a fixed budget of `num_speculative_tokens` drafts. Any other block is returned as it is.
    """
    return replace(block, budget=BudgetConfig("fixed", k=block.num_speculative_tokens)) if is_random(block) else block


def is_random(block: SpecrolloutConfig) -> bool:
    """Returns whether the block selects the random speculation policy."""
    return block.budget == RANDOM


def randomise(worker: Any) -> None:
    """Gives the random speculation policy to the vLLM worker of a running engine."""
    router = worker.specrollout_router
    if router is not None:
        router.policy = RandomPolicy(worker.specrollout_config.num_speculative_tokens)
