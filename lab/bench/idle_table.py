# SPDX-License-Identifier: Apache-2.0
"""Simulates what idle engines of an 8B policy should do: take over stragglers, make texts of coming steps, or both.

    python -m lab.bench.idle_table --out DIR [--engines 2,4,8] [--requests 8,32,128] [--seeds 3]

Each engine is an H200 with so many requests of a step, in shards as NeMo-RL deals them. Two steps ahead have texts, and an
update changes a token of 30,000. The policy trains on the same GPUs, so engines make texts only while a rollout drains. The
ways are those of `lab.bench.idle_bench`, which measures them in real engines.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from lab.bench.bench_command import write_facts
from lab.bench.bench_tables import new_table
from lab.bench.rolling_table import UPDATES, scenario
from lab.simulation.run_ahead import RollingResult, rolling_steps
from lab.simulation.setting import PLAIN, Fleet, Setting, Variant
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.block import FastestOfNConfig

MOVING = FastestOfNConfig(max_racers=1)
STAYING = replace(MOVING, min_gain=1.0)
"""No move saves more time than there is. So these engines stop at the same moments as those whose requests move."""
STEPS_AHEAD = 2
WAYS = {
    "nothing": (Variant("", PLAIN, STAYING), 0),
    "moving": (Variant("", PLAIN, MOVING), 0),
    "run_ahead": (Variant("", PLAIN, STAYING), STEPS_AHEAD),
    "both, unpriced": (Variant("", PLAIN, MOVING, is_blind=True), STEPS_AHEAD),
    "both": (Variant("", PLAIN, MOVING), STEPS_AHEAD),
}
"""What engines do, and the coming steps with texts, by name."""


def rows(engines: Sequence[int], requests: Sequence[int], seeds: range) -> Iterator[dict[str, Any]]:
    """Yields the seconds of a rollout of each way, means over the seeds."""
    for num_engines, num_requests in product(engines, requests):
        found = {way: [_steps(num_engines, num_requests, way, seed) for seed in seeds] for way in WAYS}
        yield {
            "engines": num_engines,
            "requests": num_requests,
            "rollout_s": {way: mean(step.rollout_s for step in steps) for way, steps in found.items()},
            "moves": {way: mean(step.moves for step in steps) for way, steps in found.items()},
            "made": {way: mean(step.early.made for step in steps) for way, steps in found.items()},
        }


def _steps(num_engines: int, num_requests: int, way: str, seed: int) -> RollingResult:
    variant, steps_ahead = WAYS[way]
    one = scenario(num_engines * num_requests, False, UPDATES["small"], seed)
    fleet = Fleet(replace(one, cluster=replace(one.cluster, num_gpus=num_engines)))
    return rolling_steps(Setting(fleet, variant), steps_ahead)


def table_of(found: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the rows: seconds of doing nothing, and how many times as fast each way is."""
    table = new_table("rollouts of Qwen3-8B by what idle engines do, over doing nothing; moves of the last way")
    for name in ("engines", "requests each", "nothing, s", *list(WAYS)[1:], "moves", "unpriced moves"):
        table.add_column(name, justify="right")
    for row in found:
        seconds = row["rollout_s"]
        ratios = [f"{seconds['nothing'] / seconds[way]:.3f}" for way in list(WAYS)[1:]]
        moves = (f"{row['moves'][way]:.1f}" for way in ("both", "both, unpriced"))
        table.add_row(str(row["engines"]), str(row["requests"]), f"{seconds['nothing']:.1f}", *ratios, *moves)
    return table


def main() -> int:
    """Prints the table and writes its rows to DIR/idle_table.json after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", default="2,4,8")
    parser.add_argument("--requests", default="8,32,128", help="of each engine")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    engines, requests = (list(map(int, numbers.split(","))) for numbers in (options.engines, options.requests))
    found = []
    for row in rows(engines, requests, range(options.seeds)):
        found.append(row)
        log_console().print(table_of(found[-1:]))
        write_facts(options.out / "idle_table.json", found)
    log_console().print(table_of(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
