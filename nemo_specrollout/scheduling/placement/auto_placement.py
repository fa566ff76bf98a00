# SPDX-License-Identifier: Apache-2.0
"""What `placement: auto` makes of a run's block: the drafter stays beside the policy's engine, goes into it, or goes."""

from dataclasses import dataclass, replace

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DrafterConfig, DraftModelDrafterConfig, RemoteDrafterConfig
from nemo_specrollout.scheduling.placement.cost_tables import CostCurve, CostTables
from nemo_specrollout.scheduling.placement.planner import COUPLED, DECOUPLED, Option, place


@dataclass(frozen=True)
class Machine:
    """What a run has: requests at a time, threads of its own process, cores in all."""

    num_requests: int
    threads: int
    cores: int


def choose(block: SpecrolloutConfig, tables: CostTables, machine: Machine) -> Option:
    """The best option of a run whose verifier has its process's threads. Raises ConfigError if those were not measured."""
    assert block.remote is not None
    own = replace(
        tables,
        verify_s=_of_size(tables.verify_s, machine.threads) or tables.verify_s,
        coupled_draft_s=_of_size(tables.coupled_draft_s, machine.threads) if block.model_drafter is None else (),
        draft_s=_of_size(tables.draft_s, 1),  # what a drafter process gets
    )
    requests, k = machine.num_requests, block.num_speculative_tokens
    return place(own, requests, machine.cores, block.remote.acceptance, k, max_groups=1).best


def placed(block: SpecrolloutConfig, option: Option) -> SpecrolloutConfig:
    """`block`, with its remote drafter where `option` has it; nothing is left to be placed."""
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
