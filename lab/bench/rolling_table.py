# SPDX-License-Identifier: Apache-2.0
"""Simulates steps of an 8B policy with texts of coming steps in flight, against asynchronous steps that are off policy.

    python -m lab.bench.rolling_table --out DIR

One engine on an H200 has 32, 128 or 256 requests of a step. The policy trains on the same GPU, or on another one. No other
drafter is at work. Samples of asynchronous steps are one or two updates off policy; all others are on policy.
"""

import argparse
from dataclasses import replace
from pathlib import Path

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

NUM_REQUESTS = (32, 128, 256)
AHEAD = {"one": 1, "two": 2, "three": 3, "auto": AUTO}
UPDATES = {
    "small": AheadConfig(tokens_to_flip=30_000),
    "small, branches": AheadConfig(tokens_to_flip=30_000, branches=2, foreseen=0.95),
    "larger": AheadConfig(tokens_to_flip=6_000),
    "larger, branches": AheadConfig(tokens_to_flip=6_000, branches=2, foreseen=0.95),
}
"""Updates that change a token of 30,000 or of 6,000, with and without branches."""
SEEDS = (0, 1, 2)


def scenario(num_requests: int, is_apart: bool, ahead: AheadConfig, seed: int, lag: int = 1) -> Scenario:
    """Returns a scenario with one engine."""
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
    """Returns an asynchronous step. On one GPU, rollouts of several steps share the engine, which stops for training."""
    setting = _setting(scenario(num_requests, is_apart, UPDATES["small"], seed, lag))
    return simulate_step(setting) if is_apart else rolling_steps(setting, lag, is_exact=False)


def rows() -> list[dict[str, object]]:
    """Returns the seconds of a step and of the part that waits for a rollout, means over some seeds."""
    found: list[dict[str, object]] = []
    for is_apart in (False, True):
        for num_requests in NUM_REQUESTS:
            about = {"apart": is_apart, "requests": num_requests}
            found += [
                about
                | _figures(
                    f"asynchronous, lag {lag}", "", [asynchronous(num_requests, is_apart, lag, s) for s in SEEDS]
                )
                for lag in (1, 2)
            ]
            for update, ahead in UPDATES.items():
                numbers = AHEAD if update != "small" else {"none": 0} | AHEAD
                for name, number in numbers.items():
                    steps = [
                        rolling_steps(_setting(scenario(num_requests, is_apart, ahead, seed)), number) for seed in SEEDS
                    ]
                    delay = sum(step.early.delay for step in steps) / len(steps)
                    found.append(about | _figures(name, update, steps) | {"delay": delay})
    return found


def _setting(scenario: Scenario) -> Setting:
    return Setting(Fleet(scenario), Variant("", PLAIN))


def _figures(name: str, update: str, steps: list[StepResult]) -> dict[str, object]:
    return {
        "ahead": name,
        "update": update,
        "step_s": sum(step.step_s for step in steps) / len(steps),
        "generate_s": sum(step.parts_s["generate"] for step in steps) / len(steps),
    }


def table_of(found: list[dict[str, object]]) -> Table:
    """Returns a table of the rows."""
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
    """Prints the table and writes its rows to DIR/rolling.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    found = rows()
    write_facts(out / "rolling.json", found)
    log_console().print(table_of(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
