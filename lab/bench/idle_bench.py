# SPDX-License-Identifier: Apache-2.0
"""Measures what an idle engine should do, which is to take over stragglers, to make texts of coming steps, or to do both.

    python -m lab.bench.idle_bench CONFIG --out DIR [--steps 5] [--rounds 2] [--change 3e-4] [key=value ...]

CONFIG is a config of the local runner. All ways share the same engines. These have no drafters except the texts made ahead, so
no way profits from what the engines learned in another way. A round is a run of several training steps. Before each step
the weights of the policy change by random noise of size `--change`, as a share of each matrix's standard deviation. In a step
each way rolls out the same requests with the texts that it has made for them. The order of the ways changes from step to step.
Requests are dealt to engines in equal shards, as in NeMo-RL. The first step of a run has no texts, so it is left out. All ways
sample with the same noise, so they make the same tokens.

The ways are:
- nothing: An idle engine does nothing.
- moving: Requests move to engines that have no more requests.
- run_ahead: Engines make texts of the next step in free slots.
- both, unpriced: Requests move and engines make texts, but a move does not count what the texts that it displaces would save.
- both: Requests move and engines make texts, and a move counts what the texts that it displaces would save. Users get this.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file

from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.bench_tables import new_table
from lab.local.ahead_fleet import AheadOfFleet
from lab.local.coordinator import DealingCoordinator, Stay
from lab.local.rollout_pool import RolloutPool
from lab.local.run_config import RunConfig, read_run_config
from lab.local.statistics import count_equal
from lab.local.step_rollout import StepPrompts, load_tokenizer, step_prompts
from lab.local.tasks import build_task
from lab.local.texts_in_flight import TextsInFlight
from lab.simulation.simulated_engine import BlindToEarlyWork
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.block import FastestOfNConfig, LearnedConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import Rollout
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import DecodeSpeedTable
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN, TailPolicy

NOTHING, MOVING, AHEAD, UNPRICED, PRICED = "nothing", "moving", "run_ahead", "both, unpriced", "both"
WAYS = (NOTHING, MOVING, AHEAD, UNPRICED, PRICED)
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Timed:
    """A measured rollout of one way."""

    seconds: float
    rollouts: list[Rollout]
    facts: dict[str, float]
    """Figures of the requests that moved, and of the texts made for coming steps."""


class Run:
    """One way's run of several training steps. Owns its texts made ahead, and what its coordinator has learned."""

    def __init__(self, way: str, bench: "IdleBench") -> None:
        self._bench = bench
        table = DecodeSpeedTable(bench.pool.method_names)
        policy: TailPolicy = Stay()
        if way in (MOVING, UNPRICED, PRICED):
            policy = FastestOfN(FastestOfNConfig(max_racers=1), table)
        if way == UNPRICED:
            policy = BlindToEarlyWork(policy)
        longest = LengthEstimator(bench.config.policy.generation.max_new_tokens)
        self._coordinator = DealingCoordinator(bench.pool, policy, table, longest, deals_shards=True)
        self._ahead = AheadOfFleet(TextsInFlight(bench.config, bench.prompts))
        self._ahead.texts.begin(range(1 << 30))
        self._makes_texts = way in (AHEAD, UNPRICED, PRICED)

    def step(self, step: int) -> Timed:
        """Rolls out a training step with the texts made for it.

        If the way makes texts ahead, its engines also make the texts of the next step.
        """
        pool = self._bench.pool
        texts = self._ahead.texts
        requests = (texts.with_texts(step) if self._makes_texts else self._bench.prompts(step)).requests
        if self._makes_texts:
            self._ahead.plan(pool, step)
        started = time.perf_counter()
        rollouts, timeline = self._coordinator.roll_out(requests)
        seconds = time.perf_counter() - started
        pool.finish_turns()
        facts = {**timeline.figures(), **self._coordinator.take_idle_figures()}
        if self._makes_texts:
            facts |= texts.compare(requests, rollouts)
            self._ahead.end(pool)
        return Timed(seconds, rollouts, {k: v for k, v in facts.items() if isinstance(v, int | float)})


class IdleBench:
    """Runs the bench. Owns the engines, which all ways share."""

    def __init__(self, config: RunConfig, change: float) -> None:
        generation = config.policy.generation
        ahead = generation.specrollout.run_ahead or RunAheadConfig()
        block = SpecrolloutConfig(drafters=(), run_ahead=ahead, learned=LearnedConfig(history=False, warm_start=False))
        generation = replace(generation, specrollout=block)
        self.config = replace(config, policy=replace(config.policy, generation=generation))
        self._change = change
        self._model = Path(config.policy.model_name)
        self._task = build_task(config.data, load_tokenizer(self._model))
        self.pool = RolloutPool(self._model, generation, config.grpo.seed, config.cluster.rollout_workers)

    def prompts(self, step: int) -> StepPrompts:
        """Returns the prompts of a training step."""
        return step_prompts(self.config, step, self._task)

    def round(self, number: int, num_steps: int) -> Iterator[dict[str, Timed]]:
        """Runs all ways over several training steps. Yields the rollouts of each step but the first, by way.

        The round's `number` decides which steps these are, so each round has other prompts.
        """
        first = 1 + number * (num_steps + 1)
        runs = {way: Run(way, self) for way in WAYS}
        weights: Weights = {
            name: tensor.float() for name, tensor in load_file(self._model / "model.safetensors").items()
        }
        for step in range(first, first + num_steps):
            weights = changed(weights, step, self._change)
            timed: dict[str, Timed] = {}
            for i in range(len(WAYS)):
                way = WAYS[(i + step) % len(WAYS)]
                self.pool.load_weights(weights.items(), step)
                timed[way] = runs[way].step(step)
            if step > first:
                yield timed

    def close(self) -> None:
        """Ends all engines."""
        self.pool.close()


def changed(weights: Weights, seed: int, size: float) -> Weights:
    """Returns a copy of the weights in which noise of `size` standard deviations is added to each matrix."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: tensor + size * tensor.std() * torch.randn(tensor.shape, generator=noise) if tensor.ndim == 2 else tensor
        for name, tensor in weights.items()
    }


def row_of(steps: Sequence[dict[str, Timed]], way: str) -> dict[str, Any]:
    """Returns the figures of a way over all steps.

    The figures are the way's seconds, the ratios to the seconds if idle engines do nothing, and means about moves and texts.
    """
    ratios = sorted(step[NOTHING].seconds / step[way].seconds for step in steps)
    pairs = [count_equal(step[way].rollouts, step[NOTHING].rollouts) for step in steps]
    names = ("moves", "idle_share", "declined", "early_worth", "ahead_made", "ahead_kept", "ahead_right")
    facts = {name: [step[way].facts[name] for step in steps if name in step[way].facts] for name in names}
    return {
        "way": way,
        "seconds": sum(step[way].seconds for step in steps),
        "over_nothing": [ratios[0], statistics.median(ratios), ratios[-1]],
        "together": sum(s[NOTHING].seconds for s in steps) / sum(s[way].seconds for s in steps),
        "tokens_equal": sum(equal for equal, _ in pairs),
        "tokens_total": sum(total for _, total in pairs),
        **{name: statistics.mean(values) for name, values in facts.items() if values},
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table with a line for each way, from the rows of `row_of`."""
    table = new_table("what idle engines do: seconds of all steps, and ratios to doing nothing")
    shown = ("moves", "declined", "early_worth", "ahead_made", "ahead_kept", "idle_share")
    for name in ("way", "seconds", "together", "a step", *shown, "equal"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['seconds']:.1f}",
            f"{row['together']:.3f}",
            "{1:.3f} ({0:.3f}-{2:.3f})".format(*row["over_nothing"]),
            *(f"{row[name]:.3g}" if name in row else "-" for name in shown),
            f"{row['tokens_equal']:,} of {row['tokens_total']:,}",
        )
    return table


def main() -> int:
    """Runs the bench. Prints a table after each step, and writes its rows to `idle.json` in the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=5, help="steps of a run; the first one has no texts")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way")
    parser.add_argument("--change", type=float, default=3e-4, help="size of an update of the weights")
    options = parser.parse_intermixed_args()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    bench = IdleBench(config, options.change)
    steps: list[dict[str, Timed]] = []
    facts = {"config": str(options.config), "overrides": options.overrides, "change": options.change}
    try:
        for number in track(range(options.rounds), "runs", transient=True):
            for timed in bench.round(number, options.steps):
                steps.append(timed)
                rows = [row_of(steps, way) for way in WAYS]
                log_console().print(table_of(rows))
                write_facts(options.out / "idle.json", {**facts, "steps": len(steps), "rows": rows})
    finally:
        bench.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
