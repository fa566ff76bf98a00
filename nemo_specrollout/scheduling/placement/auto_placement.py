# SPDX-License-Identifier: Apache-2.0
"""Automatic placement: keeps a remote drafter, moves it into the policy's engine, or removes it."""

from dataclasses import dataclass, replace

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DrafterConfig, DraftModelDrafterConfig, RemoteDrafterConfig
from nemo_specrollout.scheduling.placement.cost_tables import CostCurve, CostTables
from nemo_specrollout.scheduling.placement.planner import COUPLED, DECOUPLED, Option, place


@dataclass(frozen=True)
class Machine:
    """Resources of a run."""

    num_requests: int
    """Requests in flight at a time."""
    threads: int
    """Threads of the policy's process."""
    cores: int
    """Cores of the machine."""


def choose(block: SpecrolloutConfig, tables: CostTables, machine: Machine) -> Option:
    """Returns the best option for a run. Raises ConfigError if the cores are too few for every measured verifier."""
    assert block.remote is not None
    own = replace(
        tables,
        verify_s=_of_size(tables.verify_s, machine.threads) or tables.verify_s,
        coupled_draft_s=_of_size(tables.coupled_draft_s, machine.threads) if block.model_drafter is None else (),
        draft_s=_of_size(tables.draft_s, 1),  # A drafter process has one thread.
    )
    requests, k = machine.num_requests, block.num_speculative_tokens
    return place(own, requests, machine.cores, block.remote.acceptance, k, max_groups=1).best


def placed(block: SpecrolloutConfig, option: Option) -> SpecrolloutConfig:
    """Returns the block with its remote drafter placed as in `option`."""
    remote = block.remote
    assert remote is not None
    where: list[DrafterConfig] = []
    if option.mode == DECOUPLED:
        where = [replace(remote, placement="as_written", profile=None, most_ahead=max(option.window, option.k))]
    elif option.mode == COUPLED:
        where = [DraftModelDrafterConfig(model=remote.model, sampling=remote.sampling)]
    others = [d for d in block.drafters if not isinstance(d, RemoteDrafterConfig)]
    return replace(block, drafters=(*others, *where))


def _of_size(curves: tuple[CostCurve, ...], size: int) -> tuple[CostCurve, ...]:
    return tuple(curve for curve in curves if curve.size == size)
