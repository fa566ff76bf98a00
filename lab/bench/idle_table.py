# SPDX-License-Identifier: Apache-2.0
"""Simulates what idle engines of an 8B policy should do, which is to take over stragglers, to make texts ahead, or both.

    python -m lab.bench.idle_table --out DIR [--engines 2,4,8] [--requests 8,32,128] [--seeds 3] [--ahead 2] [--dear]

Each engine is an H200 with `--requests` requests of a training step, in shards as NeMo-RL deals them. Engines make texts of
`--ahead` coming steps, and an update of the weights changes one token in 30,000. With `--dear` each request makes an engine
step much longer, and responses are shorter. The policy trains on the same GPUs, so engines make texts only while a rollout
drains. The ways are those of `lab.bench.idle_bench`, which measures them in real engines.
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
from lab.simulation.run_ahead import rolling_steps
from lab.simulation.scenario import Scenario
from lab.simulation.setting import PLAIN, Fleet, Setting, Variant
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.config.strict import build

MOVING = FastestOfNConfig(max_racers=1)
STAYING = replace(MOVING, min_gain=1.0)
"""Config under which no request moves, because a move would have to save all of the remaining time. Engines still end their
turns at the same moments as with moves."""
WAYS = {
    "nothing": (Variant("", PLAIN, STAYING), False),
    "moving": (Variant("", PLAIN, MOVING), False),
    "run_ahead": (Variant("", PLAIN, STAYING), True),
    "both, unpriced": (Variant("", PLAIN, MOVING, is_blind=True), True),
    "both": (Variant("", PLAIN, MOVING), True),
}
"""The config of moves and races of each way, and whether its engines make texts of coming steps."""


def rows(
    engines: Sequence[int], requests: Sequence[int], seeds: range, num_ahead: int, *, is_dear: bool
) -> Iterator[dict[str, Any]]:
    """Yields a row for each combination of a number of engines and a number of requests per engine.

    A row has the seconds of a rollout in each way, as means over the seeds.
    """
    for num_engines, num_requests in product(engines, requests):
        make = dear if is_dear else cheap
        fleets = [Fleet(make(num_engines, num_requests, seed)) for seed in seeds]
        found = {
            way: [rolling_steps(Setting(fleet, variant), num_ahead if makes_texts else 0) for fleet in fleets]
            for way, (variant, makes_texts) in WAYS.items()
        }
        yield {
            "engines": num_engines,
            "requests": num_requests,
            "rollout_s": {way: mean(step.rollout_s for step in steps) for way, steps in found.items()},
            "seeds_s": {way: [step.rollout_s for step in steps] for way, steps in found.items()},
            "moves": {way: mean(step.moves for step in steps) for way, steps in found.items()},
            "made": {way: mean(step.early.made for step in steps) for way, steps in found.items()},
        }


def cheap(num_engines: int, num_requests: int, seed: int) -> Scenario:
    """Returns a scenario with engines of an 8B policy, in which more requests hardly make an engine step longer."""
    one = scenario(num_engines * num_requests, False, UPDATES["small"], seed)
    return replace(one, cluster=replace(one.cluster, num_gpus=num_engines))


def dear(num_engines: int, num_requests: int, seed: int) -> Scenario:
    """Returns a scenario in which each request makes an engine step much longer."""
    built = build(
        Scenario,
        {
            "title": "dear rows",
            "model": "Qwen3-8B",
            "cluster": {"device": "none", "num_gpus": num_engines},
            "batch": {"num_prompts": num_engines * num_requests // 4, "num_samples": 4, "prompt_tokens": 16},
            "lengths": {"median": 300, "sigma": 1.0, "max_tokens": 2000, "group_share": 1.0},
            "drafting": {"methods": [{"name": "head", "acceptance": 0.7}]},
            "costs": {"kind": "linear", "linear": {"verify_fixed_s": 0.005, "verify_row_s": 0.002}},
            "seed": seed,
        },
        "",
    )
    return replace(built, training=replace(built.training, run_ahead=UPDATES["small"]))


def table_of(found: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the rows, with the seconds if idle engines do nothing, and every other way's speedup over that."""
    table = new_table("rollouts by what idle engines do, over doing nothing; moves of the last two ways")
    for name in ("engines", "requests each", "nothing, s", *list(WAYS)[1:], "moves", "unpriced moves"):
        table.add_column(name, justify="right")
    for row in found:
        seconds = row["rollout_s"]
        ratios = [f"{seconds['nothing'] / seconds[way]:.3f}" for way in list(WAYS)[1:]]
        moves = (f"{row['moves'][way]:.1f}" for way in ("both", "both, unpriced"))
        table.add_row(str(row["engines"]), str(row["requests"]), f"{seconds['nothing']:.1f}", *ratios, *moves)
    return table


def main() -> int:
    """Simulates all rows. Prints a table and writes its rows to `idle_table.json` in the folder `--out`, after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", default="2,4,8")
    parser.add_argument("--requests", default="8,32,128", help="of each engine")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ahead", type=int, default=2, help="coming steps with texts")
    parser.add_argument("--dear", action="store_true", help="each request makes a step longer")
    options = parser.parse_args()
    engines, requests = (list(map(int, numbers.split(","))) for numbers in (options.engines, options.requests))
    found = []
    for row in rows(engines, requests, range(options.seeds), options.ahead, is_dear=options.dear):
        found.append(row)
        log_console().print(table_of(found[-1:]))
        write_facts(options.out / "idle_table.json", found)
    log_console().print(table_of(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
