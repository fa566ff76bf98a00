# SPDX-License-Identifier: Apache-2.0
"""Compares placements of verifying and drafting by measured times, for `specrollout-lab explain`. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.cli.tables import new_table
from lab.local.run_config import read_run_config
from lab.placement.cost_tables import CostTables
from lab.placement.planner import DECOUPLED, Option, Placement, counted, place
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.nemo_rl_config import effective_config
from nemo_specrollout.config.nemo_rl_tree import at, generating_gpus, runtime_of, size_at
from nemo_specrollout.config.strict import ConfigError, bounded, build

DEFAULT_ACCEPTANCE = 0.8
"""Assumed probability that a draft token is accepted if all before it are."""
MAX_LISTED = 8
"""Largest number of placements in the table."""


@dataclass(frozen=True)
class PlanRequest:
    """Describes the rollouts of a config, which the planner has to place on devices."""

    batch: int = bounded(low=1)
    """Number of requests that run at the same time."""
    devices: int = bounded(low=1)
    """Number of threads or GPUs that generate."""
    acceptance: float = bounded(low=0.0, high=1.0)
    """Probability that a draft token is right if all before it are."""
    max_k: int = bounded(low=1)
    """Largest number of draft tokens of a request in an engine step."""
    max_groups: int | None = None
    """Largest number of engines of the policy, or None for any number. For a local run it is 1."""
    policy: str = ""
    """The config's value of `policy.model_name`."""


@dataclass(frozen=True)
class Plan:
    """The planner's ranking of the placements of a config's rollouts."""

    placement: Placement
    tables: CostTables
    request: PlanRequest

    @classmethod
    def of(cls, tree: dict[str, Any], profile: Path, flags: Mapping[str, Any]) -> "Plan":
        """Returns the plan of a config, by the times in the file `profile`. Raises ConfigError for a file that is not valid.

        `flags` has values for fields of the `PlanRequest`. They replace what the config says, except where a value is None.
        """
        request = _request(tree, flags)
        tables = CostTables.read(profile, "--profile")
        shape = (request.batch, request.devices, request.acceptance, request.max_k, request.max_groups)
        return cls(place(tables, *shape), tables, request)

    def show(self, console: Console) -> None:
        """Prints the best placement, and a table of the best placements of all layouts."""
        for line in _lines(self.placement, self.tables, self.request):
            console.print(line)
        console.print(_table(self.placement, self.tables, boxed=console.is_terminal))


def _request(tree: dict[str, Any], flags: Mapping[str, Any]) -> PlanRequest:
    """Returns the planner's input for a config. Values of `flags` that are not None replace what the config says.

    In NeMo-RL all samples of a training step are assumed to run at the same time, even in an asynchronous run.
    """
    found: dict[str, Any]
    if runtime_of(tree) == "nemo_rl":
        batch = size_at(tree, "grpo.num_prompts_per_step") * size_at(tree, "grpo.num_generations_per_prompt")
        block = effective_config(tree) or SpecrolloutConfig()
        policy = str(at(tree, "policy.model_name", ""))
        found = {"batch": batch, "devices": generating_gpus(tree), "policy": policy}
    else:
        config, _ = read_run_config(tree)
        block = config.policy.generation.specrollout
        policy = config.policy.model_name
        found = {"batch": config.most_in_flight, "devices": os.cpu_count() or 1, "policy": policy, "max_groups": 1}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return build(PlanRequest, {**found, "max_k": block.num_speculative_tokens, **given}, "-")
    except ConfigError as error:
        raise ConfigError(str(error).replace("-.", "--", 1)) from error


def _lines(placement: Placement, tables: CostTables, request: PlanRequest) -> list[str]:
    best = placement.best
    lines = [
        f"best: {best.in_words(tables.unit)}: {best.tokens_per_s:.0f} tokens/s, {best.speedup:.2f}x plain (estimate)",
        f"for {request.batch} requests on {counted(request.devices, tables.unit)}, acceptance {request.acceptance:g}; times "
        f"of {tables.device}, policy {tables.policy}, draft model {tables.draft_model}",
    ]
    if best.mode == DECOUPLED:
        keys = f"num_speculative_tokens={best.k}, most_ahead={best.window} of its drafter of type remote"
        lines.insert(1, f"set: {BLOCK_PATH}: {keys}")
    if request.policy != tables.policy:
        lines.append(f"note: the times are of another policy than the config's, {request.policy}")
    measured = max(curve.counts[-1] for curve in tables.verify_s)
    if best.num_rows > measured:
        lines.append(
            f"note: {best.num_rows:.0f} rows per engine step, of which {measured} were measured; the rest is extrapolated"
        )
    return lines


def _table(placement: Placement, tables: CostTables, boxed: bool) -> Table:
    """Returns a table with the best option of each layout. Its column `supply` is the share of engine steps with a draft."""
    names = (
        "mode",
        "groups",
        f"{tables.unit}s",
        "batch",
        "k",
        "ahead",
        "tok/step",
        "supply",
        "step ms",
        "group tok/s",
        "tok/s",
        "vs plain",
        "bottleneck",
    )
    rows = map(_row, placement.layouts[:MAX_LISTED])
    return new_table(names, boxed=boxed, left=("mode", "bottleneck"), rows=rows)


def _row(o: Option) -> tuple[str, ...]:
    size = f"{o.verifier_size}+{o.drafter_size}" if o.drafter_size else str(o.verifier_size)
    rates = o.state.rates
    return (
        o.mode,
        str(o.num_groups),
        size,
        str(o.batch),
        str(o.k) if o.k else "-",
        str(o.window) if o.window else "-",
        f"{rates.num_tokens:.2f}",
        f"{rates.occupancy:.0%}" if o.k else "-",
        f"{1e3 * o.state.step_s:.1f}",
        f"{o.group_tokens_per_s:.0f}",
        f"{o.tokens_per_s:.0f}",
        f"{o.speedup:.2f}x",
        o.bottleneck,
    )
