# SPDX-License-Identifier: Apache-2.0
"""The `specrollout` block of each engine, where engines draft in different ways."""

from dataclasses import replace

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.scheduling.racing.draft_ladder import ladder_method


def block_of_engine(block: SpecrolloutConfig, engine: int) -> SpecrolloutConfig:
    """Returns the block of one engine: with the drafters that `fastest_of_n.methods` gives it, or with all drafters.

    An engine without a draft head does not refresh one.
    """
    methods = block.drafters_of_engines
    own = replace(block, fastest_of_n=None, drafters=methods[engine % len(methods)])
    return own if own.head is not None else replace(own, draft_refresh=None)


def blocks_of_engines(block: SpecrolloutConfig, num_engines: int) -> list[SpecrolloutConfig]:
    """Returns the blocks of engines 0 to `num_engines - 1`."""
    return [block_of_engine(block, engine) for engine in range(num_engines)]


def method_name(block: SpecrolloutConfig) -> str:
    """Returns the draft ladder's name for an engine's drafters."""
    return ladder_method([d.type for d in block.drafters])
