# SPDX-License-Identifier: Apache-2.0
"""Of a fleet of engines, what each drafts with."""

from dataclasses import replace

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.scheduling.racing.draft_ladder import method_called


def worker_blocks(block: SpecrolloutConfig, num_workers: int) -> list[SpecrolloutConfig]:
    """The block of each worker's engine: the drafters that `fastest_of_n.methods` gives it, or all."""
    return [block_of_worker(block, worker) for worker in range(num_workers)]


def block_of_worker(block: SpecrolloutConfig, worker: int) -> SpecrolloutConfig:
    """That of one. A head is refreshed where it drafts."""
    kinds = block.drafters_of_workers
    own = replace(block, fastest_of_n=None, drafters=kinds[worker % len(kinds)])
    return own if own.head is not None else replace(own, draft_refresh=None)


def method_name(block: SpecrolloutConfig) -> str:
    """How the ladder calls the drafters of an engine."""
    return method_called([d.type for d in block.drafters])
