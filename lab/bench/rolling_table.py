# SPDX-License-Identifier: Apache-2.0
"""Simulates training steps of an 8B policy with texts made ahead for coming steps, and compares them with asynchronous steps.

    python -m lab.bench.rolling_table --out DIR [--requests 32,128] [--seeds 3]

One engine on an H200 has 32, 128 or 256 requests of a training step. The policy trains on the same GPU, or on another one.
There is no drafter except the texts made ahead. Samples of asynchronous steps are one or two updates off policy. All others
are on policy.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import log
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from lab.bench.bench_command import write_facts
from lab.bench.bench_tables import new_table
from lab.simulation.compare import simulate_step
from lab.simulation.event_loop import StepResult
from lab.simulation.run_ahead import AUTO, rolling_steps
from lab.simulation.scenario import AheadConfig, Scenario
from lab.simulation.setting import PLAIN, Fleet, Setting, Variant
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.strict import build

MEAN_TOKENS = 1_280.0
"""Mean length of the responses."""
AHEAD = {"one": 1, "two": 2, "auto": AUTO}
LEAST_PROBABILITY = 0.2
"""A near-tie gets a branch if an update of the weights flips it with at least this probability."""


def update(tokens_to_flip: float, *, has_branches: bool) -> AheadConfig:
    """Returns the config of an update of the weights that changes one token in `tokens_to_flip`.

    With `has_branches`, texts have the branches that `FlipModel` would choose. A near-tie gets a branch if it flips with a
    probability of at least p = `LEAST_PROBABILITY`. If the score gap is g times the update's scale, this probability is
    1 / (1 + exp(g)). Small gaps of all sizes are equally frequent. So there are log(1 / p - 1) / log(2) branches for each
    flip, and a share of 1 + log(1 - p) / log(2) of all flips has one.
    """
    if not has_branches:
        return AheadConfig(tokens_to_flip)
    p = LEAST_PROBABILITY
    num_flips = MEAN_TOKENS / tokens_to_flip
    branches = num_flips * log(1.0 / p - 1.0) / log(2.0)
    return AheadConfig(tokens_to_flip, branches=branches, foreseen=1.0 + log(1.0 - p) / log(2.0))


UPDATES = {
    "small": update(30_000, has_branches=False),
    "small, branches": update(30_000, has_branches=True),
    "larger": update(6_000, has_branches=False),
    "larger, branches": update(6_000, has_branches=True),
}
"""Updates that change one token in 30,000 or in 6,000, with and without branches."""


def scenario(num_requests: int, is_apart: bool, ahead: AheadConfig, seed: int, lag: int = 1) -> Scenario:
    """Returns a scenario with one engine. If `is_apart` is true, the policy trains on another GPU with asynchronous steps.

    `lag` is the lag of these steps. `ahead` says how updates change early texts.
    """
    training = {"mode": "async", "lag": lag, "num_steps": 16} if is_apart else {"mode": "sync"}
    tree = {
        "title": "an engine of Qwen3-8B on an H200",
        "model": "Qwen3-8B",
        "cluster": {"device": "H200", "num_gpus": 1 + is_apart, "train_gpus": int(is_apart)},
        "batch": {"num_prompts": num_requests // 8, "num_samples": 8, "max_requests": 512},
        "lengths": {"median": 1000, "sigma": 0.9, "max_tokens": 8192},
        "drafting": {"methods": [{"name": "head", "acceptance_length": 2.77}]},
        "training": {**training, "refit_s": 1.0},
        "seed": seed,
    }
    built = build(Scenario, tree, "")
    return replace(built, training=replace(built.training, run_ahead=ahead))


def asynchronous(num_requests: int, is_apart: bool, lag: int, seed: int) -> StepResult:
    """Simulates an asynchronous training step. `is_apart` says whether the policy trains on a GPU of its own.

    If it does not, rollouts of several training steps share the engine, which stops while the policy trains.
    """
    setting = _setting(scenario(num_requests, is_apart, UPDATES["small"], seed, lag))
    return simulate_step(setting) if is_apart else rolling_steps(setting, lag, is_exact=False)


def rows(sizes: Sequence[int], seeds: range) -> Iterator[dict[str, Any]]:
    """Yields a row for each setting, with the seconds of a training step, and the seconds that training waits for a rollout.

    The figures are means over the seeds.
    """
    for is_apart, num_requests in product((False, True), sizes):
        about = {"apart": is_apart, "requests": num_requests}
        for lag in (1, 2):
            off_policy = [asynchronous(num_requests, is_apart, lag, seed) for seed in seeds]
            yield about | _figures(f"asynchronous, lag {lag}", "", off_policy)
        for update, ahead in UPDATES.items():
            numbers = {"none": 0} | AHEAD if update == "small" else AHEAD
            for name, number in numbers.items():
                settings = [_setting(scenario(num_requests, is_apart, ahead, seed)) for seed in seeds]
                steps = [rolling_steps(setting, number) for setting in settings]
                yield about | _figures(name, update, steps) | {"delay": mean(step.early.delay for step in steps)}


def _setting(scenario: Scenario) -> Setting:
    return Setting(Fleet(scenario), Variant("", PLAIN))


def _figures(name: str, update: str, steps: Sequence[StepResult]) -> dict[str, Any]:
    return {
        "ahead": name,
        "update": update,
        "step_s": mean(step.step_s for step in steps),
        "generate_s": mean(step.parts_s["generate"] for step in steps),
    }


def table_of(found: Sequence[dict[str, Any]]) -> Table:
    """Returns a table with a line for each of the given rows."""
    table = new_table("seconds of a step of Qwen3-8B, one engine on an H200; asynchronous steps are off policy")
    for name in ("trains on", "requests", "steps ahead", "update", "step s", "waits s", "delay"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        table.add_row(
            "another GPU" if row["apart"] else "the same GPU",
            str(row["requests"]),
            str(row["ahead"]),
            str(row["update"]),
            f"{row['step_s']:.1f}",
            f"{row['generate_s']:.1f}",
            f"{row['delay']:.0%}" if "delay" in row else "",
        )
    return table


def main() -> int:
    """Simulates all rows. Prints a table, and writes its rows to `rolling.json` in the folder `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", default="32,128,256")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found = []
    for row in rows(list(map(int, options.requests.split(","))), range(options.seeds)):
        found.append(row)
        write_facts(options.out / "rolling.json", found)
    log_console().print(table_of(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
