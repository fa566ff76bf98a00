# SPDX-License-Identifier: Apache-2.0
"""Numbers of drafts at random, for a block with the fixed budget `NUM_DRAFTS`: no config can ask for them."""

from types import ModuleType
from typing import Any

NUM_DRAFTS = 8


def draw(policy: ModuleType) -> None:
    """Makes the builder of policies return a random one where it would return the fixed one of `NUM_DRAFTS`."""
    build = policy.build_policy

    def built(config: Any, *args: Any) -> Any:
        if (config.policy, config.k) != ("fixed", NUM_DRAFTS):
            return build(config, *args)
        from lab.local.random_budgets import RandomPolicy

        return RandomPolicy(NUM_DRAFTS)

    policy.build_policy = built  # type: ignore[attr-defined]
