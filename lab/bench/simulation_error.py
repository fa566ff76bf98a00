# SPDX-License-Identifier: Apache-2.0
"""Compares the simulator's predictions with what other benches have measured.

    python -m lab.bench.simulation_error [--profile FILE] [--placement FILE] [--pair FILE] [--tail FILE] --out DIR

`--placement` is a placement.json and `--pair` a pair.json, both of `lab.bench.placement_bench`, which measures layouts of
drafting. Predictions for them use the step times in `--profile`, a file of `specrollout-lab profile`. Without it, predictions
for a pair.json use the step times that this file has itself.

`--tail` is a tail.json of `lab.bench.tail_bench`, which measures moves and races of stragglers. The file running.json must be
beside it. Simulated engines then have the measured decode speeds, and the production policy moves and races requests in the
simulator as it did in the engines. If a file lacks the lengths of all responses, random lengths are used instead. They have
the measured number and the measured median, and on average the measured maximum.

A speed is relative to rollouts in which nothing is drafted, moved or raced. An error is the predicted speed divided by the
measured one, minus 1.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np
from rich.table import Table

from lab.bench.bench_command import write_facts
from lab.bench.bench_tables import new_table
from lab.placement.cost_tables import CostCurve, CostTables
from lab.simulation.costs import Costs, Rows, TabledCosts
from lab.simulation.dealing import in_shards
from lab.simulation.event_loop import Rollout
from lab.simulation.simulated_engine import SimulatedEngine, TailPolicy
from lab.simulation.speculation import (
    CoupledSpeculation,
    DecodeStep,
    DecoupledSpeculation,
    NoSpeculation,
    Speculation,
)
from lab.simulation.workload import LengthConfig, Workload
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.block import BudgetConfig, FastestOfNConfig
from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile, started_table

PROMPT = 32
"""Assumed number of tokens of a prompt."""
MAX_K = 8
SLOTS = 64
WAYS = {
    "neither": None,
    "moving": FastestOfNConfig(max_racers=1),
    "racing": FastestOfNConfig(moving=False),
    "both": FastestOfNConfig(),
}
"""The config of moves and races in each way of `lab.bench.tail_bench`, by the way's name."""
_SIMULATED = 32
"""Number of rollouts whose lengths are drawn at random if they are not known."""
_SAME_P = 0.5
"""Placeholder for the acceptance rate. It has no effect, because the measured decode speeds already include acceptance."""


@dataclass(frozen=True)
class Compared:
    """The speed of a way as it was measured and as the simulator predicts it.

    Speeds are relative to rollouts in which nothing is drafted, moved or raced. `planned` is the speed that the placement
    planner predicts, or None if it was not asked.
    """

    source: str
    load: str
    way: str
    measured: float
    predicted: float
    planned: float | None = None
    seconds: float | None = None
    """Measured seconds of a rollout."""
    predicted_s: float | None = None

    @property
    def error(self) -> float:
        """Returns the predicted speed divided by the measured one, minus 1."""
        return self.predicted / self.measured - 1.0


# Layouts


def speculation_of(way: str, threads: int, tables: CostTables) -> Speculation | None:
    """Returns how the simulator models a way such as "coupled k=4", or None if the costs of the way were not measured."""
    verify = _of_size(tables.verify_s, threads)
    mode, _, drafts = way.partition(" ")
    k = int(found[1]) if (found := re.fullmatch(r"k=(\d+)", drafts)) else 0
    if verify is None:
        return None
    if mode == "plain":
        return NoSpeculation(TabledCosts(verify))
    if mode == "coupled" and (drafting := _of_size(tables.coupled_draft_s, threads)) is not None:
        budget = BudgetConfig("fixed", k=k) if k else BudgetConfig("auto")
        return CoupledSpeculation(TabledCosts(verify, drafting), budget, k or MAX_K, has_weights=True)
    if mode == "decoupled" and (drafter := _of_size(tables.draft_s, 1)) is not None:
        pair = DecoupledSpeculation(TabledCosts(verify), TabledCosts(drafter), k or MAX_K)
        pair.ks = (k,) if k else pair.ks
        return pair
    return None


def _of_size(curves: Sequence[CostCurve], size: int) -> CostCurve | None:
    return next((curve for curve in curves if curve.size == size), None)


def layout_s(speculation: Speculation, lengths_R: Sequence[int], p: float) -> float:
    """Returns the simulated seconds of a rollout in one engine.

    `lengths_R` has the response lengths. `p` is the probability that a draft token is right.
    """
    num = len(lengths_R)
    work = Workload(np.arange(num), np.array(lengths_R), np.full((num, 1), p), PROMPT)
    rollout = Rollout(work, [SimulatedEngine(0, speculation, 0, SLOTS)])
    rollout.start(np.arange(num), np.zeros(num, int))
    rollout.run()
    return rollout.result().seconds


def placement_rows(facts: dict[str, Any], tables: CostTables) -> Iterator[Compared]:
    """Yields a comparison for each way of a placement.json. Speeds are relative to the fastest plain engine."""
    rows = [row for row in facts["rows"] if not row.get("planned")]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        of_batch = [row for row in rows if row["batch"] == batch]
        plain = min((row for row in of_batch if row["mode"] == "plain"), key=lambda row: row["seconds"])
        options = [row for row in facts["rows"] if row.get("planned") and row["batch"] == batch]
        lengths = [max(1, round(plain["steps"]))] * batch
        base = speculation_of("plain", plain["threads"], tables)
        for row in of_batch:
            if base is None or (kind := speculation_of(row["way"], row["threads"], tables)) is None:
                continue
            seconds = layout_s(kind, lengths, row["acceptance"])
            speed = layout_s(base, lengths, row["acceptance"]) / seconds
            planned = next((o["speedup"] for o in options if _is_of(o, row)), None)
            way = f"{row['way']}, {row['threads']}"
            yield Compared("placement", str(batch), way, row["over_plain"], speed, planned, row["seconds"], seconds)


def _is_of(option: dict[str, Any], row: dict[str, Any]) -> bool:
    drafts = "" if row["mode"] == "plain" else f" k={option['k']}"
    return (option["mode"] + drafts, option["verifier_size"]) == (row["way"], row["threads"])


def pair_rows(facts: dict[str, Any], tables: CostTables) -> Iterator[Compared]:
    """Yields a comparison for each way of a pair.json. Speeds are relative to the policy alone on all threads."""
    for verdict in facts["verdicts"]:
        lengths = verdict.get("lengths")
        rows = [row for row in facts["rows"] if row["load"] == verdict["load"]]
        plain = next(row for row in rows if row["way"] == "plain")
        if lengths is None:  # requests of equal length, which a plain engine makes in as many steps
            if not verdict["load"].isdecimal():
                continue
            lengths = [max(1, round(plain["steps"]))] * int(verdict["load"])
        base = speculation_of("plain", int(plain["threads"]), tables)
        for row in rows:
            threads = int(row["threads"].partition("+")[0])
            if base is None or (kind := speculation_of(row["way"], threads, tables)) is None:
                continue
            seconds = layout_s(kind, lengths, verdict["acceptance"])
            speed = layout_s(base, lengths, verdict["acceptance"]) / seconds
            way = f"{row['way']}, {row['threads']}"
            yield Compared(
                "pair", verdict["load"], way, row["over_plain"], speed, row["predicted"], row["seconds"], seconds
            )


def tables_of(facts: dict[str, Any]) -> CostTables:
    """Returns the cost tables that a pair.json contains. Raises ConfigError if they are not valid."""
    return build(
        CostTables, {"device": "", "policy": "", "draft_model": "", "unit": "thread", **facts["costs"]}, "costs"
    )


# Moves and races


@dataclass(frozen=True)
class MeasuredSpeeds:
    """Measured decode speeds, with the interface of the speed model that the straggler policy uses."""

    table: DecodeSpeedTable
    typical_p: tuple[float, ...]

    def tokens_per_s(self, method: int, batch: int) -> float:
        """Returns the tokens per second of each of `batch` typical requests."""
        return self.table.tokens_per_s(method, batch)

    def prefill_s(self, num_tokens: int) -> float:
        """Returns the seconds of a prefill of `num_tokens` tokens."""
        return self.table.prefill_s(num_tokens)


@dataclass(frozen=True)
class _MeasuredCosts(Costs):
    """Costs of engine steps that make one token of each request, at the measured decode speed."""

    speeds: MeasuredSpeeds
    method: int

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        return 1.0 / self.speeds.tokens_per_s(self.method, max(1, round(num_requests)))

    def prefill_s(self, num_tokens: float) -> float:
        return self.speeds.prefill_s(round(num_tokens))


class MeasuredSpeculation(Speculation):
    """A draft method whose decode speed was measured. Its simulated engine step makes one token of each request."""

    def __init__(self, speeds: MeasuredSpeeds, method: int) -> None:
        super().__init__(_MeasuredCosts(speeds, method))

    def decode_step(self, p_B: np.ndarray, context: float) -> DecodeStep:
        return DecodeStep(np.ones(len(p_B)), float(len(p_B)))


def tail_rows(facts: dict[str, Any], running: SpeedTableFile) -> Iterator[Compared]:
    """Yields a comparison for each way of a tail.json. Speeds are relative to rollouts without moves and races."""
    lengths = [np.array(of_rollout) for of_rollout in facts.get("all_lengths", ())] or list(_drawn(facts))
    past = [int(n) for of_rollout in lengths for n in of_rollout]
    seconds = {row["way"]: tail_s(facts, running, row["way"], lengths, past) for row in facts["rows"]}
    for row in facts["rows"]:
        ratios = [a / b for a, b in zip(seconds["neither"], seconds[row["way"]], strict=True)]
        measured = [a / b for a, b in zip(facts["rows"][0]["all_seconds"], row["all_seconds"], strict=True)]
        pair = (median(row["all_seconds"]), median(seconds[row["way"]]))
        yield Compared("tail", f"{facts['engines']} engines", row["way"], median(measured), median(ratios), None, *pair)


def tail_s(
    facts: dict[str, Any], running: SpeedTableFile, way: str, lengths: Sequence[np.ndarray], past: Sequence[int]
) -> list[float]:
    """Returns the simulated seconds of each rollout in the way `way` of a tail.json.

    `lengths` has the response lengths of each rollout. The straggler policy has learned from responses with the lengths
    `past` before each rollout.
    """
    methods = facts["split"].split(";") if facts["split"] else [running.rungs[0].method] * facts["engines"]
    names = list(dict.fromkeys(methods))
    speeds = MeasuredSpeeds(started_table(names, running), (_SAME_P,) * len(names))
    found = []
    for lengths_R in lengths:
        num = len(lengths_R)
        estimator = LengthEstimator(max(past))
        for length in past:
            estimator.finished(-1, length)
        config = WAYS[way]
        tail = None if config is None else TailPolicy(config, speeds, estimator, 0.0)
        numbers = [names.index(methods[i % len(methods)]) for i in range(facts["engines"])]
        engines = [SimulatedEngine(i, MeasuredSpeculation(speeds, m), m, SLOTS) for i, m in enumerate(numbers)]
        prompt_R = np.arange(num) // facts["samples"]
        work = Workload(prompt_R, lengths_R, np.full((num, len(names)), _SAME_P), PROMPT)
        rollout = Rollout(work, engines, tail)
        rollout.start(np.arange(num), in_shards(num, facts["engines"]))
        rollout.run()
        found.append(rollout.result().seconds)
    return found


def _drawn(facts: dict[str, Any]) -> Iterator[np.ndarray]:
    """Yields random lengths of responses, rollout by rollout.

    The lengths have the measured median, and the longest of a rollout is on average as long as the measured longest one.
    """
    known = facts["lengths"]
    score = NormalDist().inv_cdf(1.0 - 0.5 / known["responses"])
    sigma = math.log(max(known["longest"] / known["median"], 1.0)) / score
    config = LengthConfig(known["median"], min(sigma, 3.0), known["longest"])
    for seed in range(_SIMULATED):
        yield config.draw(facts["prompts"], facts["samples"], np.random.default_rng(seed)).ravel()


# The command


def table_of(rows: Sequence[Compared]) -> Table:
    """Returns a table with a line for each comparison."""
    table = new_table("speed over the base: policy alone (placement, pair), nothing moved or raced (tail)")
    for name in ("of", "requests", "way", "measured", "simulated", "error", "planner", "its error", "s", "simulated s"):
        table.add_column(name, justify="left" if name in ("of", "way") else "right", no_wrap=True)
    for row in rows:
        plan = ("", "") if row.planned is None else (f"{row.planned:.2f}", f"{row.planned / row.measured - 1.0:+.0%}")
        seconds = ("" if s is None else f"{s:.2f}" for s in (row.seconds, row.predicted_s))
        cells = (f"{row.measured:.2f}", f"{row.predicted:.2f}", f"{row.error:+.0%}", *plan, *seconds)
        table.add_row(row.source, row.load, row.way, *cells)
    return table


def main() -> int:
    """Makes the comparisons. Prints a table, and writes its rows to `simulation_error.json` in the folder `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("profile", "placement", "pair", "tail"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    profile = CostTables.read(options.profile, "--profile") if options.profile else None
    rows: list[Compared] = []
    if options.placement:
        if profile is None:
            raise ConfigError(
                "--profile: missing; a placement.json has no times of steps: name a file of `specrollout-lab profile`"
            )
        rows += placement_rows(_read(options.placement), profile)
    if options.pair:
        facts = _read(options.pair)
        rows += pair_rows(facts, profile or tables_of(facts))
    if options.tail:
        running = SpeedTableFile.read(options.tail.with_name("running.json"), "--tail")
        rows += tail_rows(_read(options.tail), running)
    console = log_console()
    if not console.is_terminal:
        console.width = 150
    console.print(table_of(rows))
    write_facts(options.out / "simulation_error.json", [{**vars(row), "error": row.error} for row in rows])
    return 0


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    raise SystemExit(main())
