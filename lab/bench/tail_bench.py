# SPDX-License-Identifier: Apache-2.0
"""Measures the gain of moving and racing stragglers: the same rollouts on the same engines, way by way, interleaved.

    python -m lab.bench.tail_bench CONFIG --out DIR [--split 'suffix+ngram;eagle3'] [key=value ...]

CONFIG is one of the local runner. Every engine has its drafters, except in the ways called split, where `--split` names the
drafters of each engine. All ways sample with the same noise, so they generate the same tokens in different times.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lab.bench.bench import WIDTH_OF_LOGS
from lab.bench.bench_command import bench_parser, write_facts
from lab.local.coordinator import DealingCoordinator
from lab.local.rollout_pool import RolloutPool
from lab.local.run_config import RunConfig, read_run_config
from lab.local.statistics import count_equal
from lab.local.step_rollout import StepPrompts, load_tokenizer, step_prompts
from lab.local.tasks import build_task
from lab.local.timeline import Timeline
from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN

# Rounds that only warm up: kernels compile, ladder, lengths and draft boards learn.
WARM_UP_ROUNDS = 1
PLAIN, OURS = "plain", "ours"


@dataclass(frozen=True)
class Way:
    """A row: which pool's workers, and what may be done with the tail; None leaves every request where it was dealt."""

    name: str
    pool: str
    tail: FastestOfNConfig | None = None


WAYS = (
    Way(PLAIN, "plain"),
    Way(OURS, "all"),
    Way("ours, moving", "all", FastestOfNConfig(max_racers=1)),
    Way("ours, split", "split"),
    Way("ours, split, moving", "split", FastestOfNConfig(max_racers=1)),
    Way("ours, split, racing", "split", FastestOfNConfig(moving=False)),
    Way("ours, split, moving and racing", "split", FastestOfNConfig()),
)


@dataclass(frozen=True)
class Timed:
    """One rollout of a way."""

    rollouts: list[Rollout]
    seconds: float
    timeline: Timeline


class TailBench:
    """Owns the pools and the coordinators of all ways."""

    def __init__(self, config: RunConfig, split: tuple[tuple[str, ...], ...]) -> None:
        generation = config.policy.generation
        model = Path(config.policy.model_name)
        block = replace(generation.specrollout, fastest_of_n=None)
        blocks = {"plain": SpecrolloutConfig(drafters=()), "all": block}
        if split:
            blocks["split"] = replace(block, fastest_of_n=FastestOfNConfig(methods=split))
        self.pools: dict[str, RolloutPool] = {}
        for name, of_pool in blocks.items():
            changed = replace(generation, specrollout=of_pool)
            self.pools[name] = RolloutPool(model, changed, config.grpo.seed, config.cluster.rollout_workers)
        longest = generation.max_new_tokens
        self.ways = {w: _coordinator(self.pools[w.pool], w, longest) for w in WAYS if w.pool in self.pools}

    def rounds(
        self, prompts: Callable[[int], StepPrompts], num_rounds: int, num_steps: int
    ) -> list[dict[str, list[Timed]]]:
        """By round and way a rollout of each step. Steps are never repeated: drafters would remember the responses."""
        found = []
        for number in track(range(WARM_UP_ROUNDS + num_rounds), "rounds", transient=True):
            work = [prompts(number * num_steps + s).requests for s in range(num_steps)]
            timed: dict[str, list[Timed]] = {way.name: [] for way in self.ways}
            for requests in work:
                for way in self.ways:
                    timed[way.name].append(self._roll_out(way, requests))
            found.append(timed)
        return found[WARM_UP_ROUNDS:]

    def _roll_out(self, way: Way, requests: Sequence[RolloutRequest]) -> Timed:
        started = time.perf_counter()
        rollouts, timeline = self.ways[way].roll_out(requests)
        seconds = time.perf_counter() - started
        self.pools[way.pool].finish_turns()
        return Timed(rollouts, seconds, timeline)

    def close(self) -> None:
        """Ends all workers."""
        for pool in reversed(self.pools.values()):
            pool.close()


def _coordinator(pool: RolloutPool, way: Way, max_length: int) -> DealingCoordinator:
    ladder = DecodeSpeedTable(pool.method_names)
    policy = None if way.tail is None else FastestOfN(way.tail, ladder)
    return DealingCoordinator(pool, policy, ladder, LengthEstimator(max_length))


def row_of(rounds: list[dict[str, list[Timed]]], name: str) -> dict[str, Any]:
    """A row of a way: seconds of a round and ratios of seconds, medians over rounds; counts of a rollout, means."""
    tails = [timed.timeline.figures() for of_round in rounds for timed in of_round[name]]
    pairs = [
        count_equal(a.rollouts, b.rollouts)
        for of_round in rounds
        for a, b in zip(of_round[name], of_round[PLAIN], strict=True)
    ]
    return {
        "way": name,
        "seconds": statistics.median(_seconds(of_round[name]) for of_round in rounds),
        "over_plain": _ratios(rounds, PLAIN, name),
        "over_ours": _ratios(rounds, OURS, name),
        "idle_share": statistics.mean(tail["idle_share"] for tail in tails),
        "moves": statistics.mean(tail["moves"] for tail in tails),
        "races": statistics.mean(tail["races"] for tail in tails),
        "tokens_equal": sum(equal for equal, _ in pairs),
        "tokens_total": sum(total for _, total in pairs),
    }


def _seconds(rollouts: Sequence[Timed]) -> float:
    return sum(t.seconds for t in rollouts)


def _ratios(rounds: list[dict[str, list[Timed]]], base: str, name: str) -> list[float]:
    """Least, median and greatest of the rounds' ratios."""
    ratios = sorted(_seconds(r[base]) / _seconds(r[name]) for r in rounds)
    return [ratios[0], statistics.median(ratios), ratios[-1]]


def main() -> int:
    """Prints a table, and writes its rows to DIR/tail.json."""
    parser = bench_parser(__doc__)
    parser.add_argument("--split", default="", help="drafters of each worker, joined by +, workers parted by ;")
    parser.add_argument("--steps", type=int, default=4, help="rollouts of a round: steps of a run")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_intermixed_args()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    split = tuple(tuple(worker.split("+")) for worker in options.split.split(";")) if options.split else ()
    task = build_task(config.data, load_tokenizer(Path(config.policy.model_name)))
    bench = TailBench(config, split)
    prompts = partial(step_prompts, config, task=task)
    rounds = bench.rounds(prompts, options.rounds, options.steps)
    rows = [row_of(rounds, name) for name in rounds[0]]
    bench.close()
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_OF_LOGS
    console.print(_table(rows))
    facts = {"config": str(options.config), "overrides": options.overrides, "split": options.split}
    write_facts(options.out / "tail.json", {**facts, "rounds": options.rounds, "rows": rows})
    return 0


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(pad_edge=False)
    for name in ("way", "seconds", "x plain", "x ours", "idle", "moves", "races", "tokens equal"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for row in rows:
        over = ["{1:.2f} ({0:.2f}-{2:.2f})".format(*row[key]) for key in ("over_plain", "over_ours")]
        table.add_row(
            row["way"],
            f"{row['seconds']:.2f}",
            *over,
            f"{row['idle_share']:.0%}",
            f"{row['moves']:.1f}",
            f"{row['races']:.1f}",
            f"{row['tokens_equal']:,} of {row['tokens_total']:,}",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
