# SPDX-License-Identifier: Apache-2.0
"""Measures rollouts whose stragglers move or race, and rollouts whose stragglers do neither.

    python -m lab.bench.tail_bench CONFIG --out DIR [--workload mixed] [--split 'suffix+ngram;eagle3'] [key=value ...]
    python -m lab.bench.tail_bench CONFIG --out DIR --engines 4 --apart [--split 'suffix;ngram;eagle3;plain'] [...]

CONFIG is a config of the local runner. All ways roll out the same requests on the same engines in turns. Without `--split` all
engines draft alike, so no race can begin and requests only move. With `--split` each engine has the drafters that it names,
and the ways are "neither", "moving", "racing" and "both".

In all ways, requests are dealt out in equal shards, as in NeMo-RL. All ways sample with the same noise, so they generate the
same tokens in different times. Between two ways the engines forget their texts, because they would know the responses. Each
way has a table of decode speeds and an estimate of lengths, which it keeps over all rollouts, as a run does.

With `--apart` all engines are in this process, and only one of them computes at a time. Seconds are then CPU seconds, counted
as if each engine had a core of its own. Use it for more engines than cores, or on a machine that others use too.

`--ladder FILE` fills the tables of decode speeds from a file of `specrollout-lab ladder`. The bench then also compares three
rankings of draft methods. One is by the speeds in this file, one by acceptance rate, as in the SpecActor paper, and one by the
speeds that the rollouts have measured.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.bench.bench import WIDTH_OF_LOGS
from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.tail_engines import EngineProcesses, EnginesApart, use_clocks_of
from lab.bench.tail_figures import Timed, Watched, response_lengths, row_of, table_of
from lab.bench.tail_ladder import ladder_lines, rankings
from lab.local.coordinator import DealingCoordinator
from lab.local.run_config import RunConfig, read_run_config
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.installed.versions import this_machine
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator
from nemo_specrollout.stragglers.decisions.speed_table import PLAIN
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedTableFile, started_table, table_file
from nemo_specrollout.stragglers.decisions.straggler_policy import FastestOfN

NEITHER = "neither"
ALIKE = {NEITHER: FastestOfNConfig(moving=False, max_racers=1), "moving": FastestOfNConfig(max_racers=1)}
"""The ways to treat stragglers if all engines draft alike. Each name has the config that allows or forbids moves and races."""
SPLIT = {**ALIKE, "racing": FastestOfNConfig(moving=False), "both": FastestOfNConfig()}
Engines = EngineProcesses | EnginesApart


@dataclass(frozen=True)
class Way:
    """A way to treat stragglers. Its coordinator learns from each rollout. Its straggler policy records what it forecasts."""

    coordinator: DealingCoordinator
    policy: Watched


class TailBench:
    """Runs the bench. Owns the engines, and a coordinator for each way."""

    def __init__(self, config: RunConfig, options: argparse.Namespace) -> None:
        generation = config.policy.generation
        split = tuple(_drafters(engine) for engine in options.split.split(";")) if options.split else ()
        racing = FastestOfNConfig(methods=split) if split else None
        block = replace(generation.specrollout, fastest_of_n=racing, draft_refresh=None)
        kind = EnginesApart if options.apart else EngineProcesses
        model = Path(config.policy.model_name)
        changed = replace(generation, specrollout=block)
        self.engines: Engines = kind(model, changed, config.grpo.seed, options.engines)
        if isinstance(self.engines, EnginesApart):
            use_clocks_of([self.engines])
        self.ladder = SpeedTableFile.read(options.ladder, "--ladder") if options.ladder else None
        ways = SPLIT if split else ALIKE
        self.ways = {name: self._way(tail, generation.max_new_tokens) for name, tail in ways.items()}
        self.timed: dict[str, list[Timed]] = {name: [] for name in ways}
        """The measured rollouts of each way so far, without those that only warm up."""

    def _way(self, tail: FastestOfNConfig, longest: int) -> Way:
        table = started_table(self.engines.method_names, self.ladder)
        policy = Watched(FastestOfN(tail, table), self.engines.now_s)
        lengths = LengthEstimator(longest)
        return Way(DealingCoordinator(self.engines, policy, table, lengths, deals_shards=True), policy)

    def play(self, requests: Sequence[RolloutRequest], number: int, *, keep: bool) -> None:
        """Rolls out the same requests in every way. The round's `number` decides which way begins.

        If `keep` is false, the round only warms up.
        """
        names = list(self.ways)
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            timed = self._roll_out(self.ways[name], requests)
            if keep:
                self.timed[name].append(timed)

    def _roll_out(self, way: Way, requests: Sequence[RolloutRequest]) -> Timed:
        self.engines.forget()
        way.policy.foreseen = None
        spent_s, began_s = self.engines.engine_s(), self.engines.now_s()
        rollouts, timeline = way.coordinator.roll_out(requests)
        seconds = self.engines.now_s() - began_s
        self.engines.finish_turns()
        spent_s = self.engines.engine_s() - spent_s
        return Timed(requests, rollouts, seconds, spent_s, timeline, way.policy.foreseen, began_s)

    def rows(self) -> list[dict[str, Any]]:
        """Returns the figures of each way over its rollouts so far."""
        base = self.timed[NEITHER]
        return [row_of(name, timed, base, base) for name, timed in self.timed.items()]

    def running_table(self, policy: str) -> SpeedTableFile | None:
        """Returns the decode speeds of draft methods that the coordinator of the last way has measured, or None without any.

        `policy` is the policy's name for the table.
        """
        table = list(self.ways.values())[-1].coordinator._speeds.table
        return table_file(table, this_machine(), policy, [0.0] * len(table.methods))


def _drafters(engine: str) -> tuple[str, ...]:
    return () if engine == PLAIN else tuple(engine.split("+"))


def _options() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--workload", default="", help="one of the config's workloads; the run's own task without it")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--apart", action="store_true", help="one engine computes at a time, on a clock of its own")
    parser.add_argument("--split", default="", help="drafters of each engine, joined by +, engines parted by ;")
    parser.add_argument("--ladder", type=Path, help="decode speeds to begin with, from `specrollout-lab ladder`")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a rollout")
    parser.add_argument("--samples", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--warm-up", type=int, default=1, help="rounds that do not count: kernels compile, tables learn"
    )
    parser.add_argument("--skip", type=int, default=0, help="number of the first rollout, for other prompts")
    return parser.parse_intermixed_args()


def main() -> int:
    """Runs the bench.

    After each round it prints a table, and writes the figures so far to `tail.json` in the folder `--out`.
    """
    options = _options()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    data = config.workloads[options.workload] if options.workload else config.data
    size = {"num_prompts_per_step": options.prompts, "num_generations_per_prompt": options.samples}
    chosen = replace(config, data=data, grpo=replace(config.grpo, **size))
    task = build_task(data, load_tokenizer(Path(config.policy.model_name)))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_OF_LOGS + 40
    bench = TailBench(config, options)
    try:
        for number in range(options.warm_up + options.rounds):
            is_kept = number >= options.warm_up
            bench.play(step_prompts(chosen, options.skip + number, task).requests, number, keep=is_kept)
            if is_kept:
                _tell(bench, console, options, config)
    finally:
        bench.engines.close()
    return 0


def _tell(bench: TailBench, console: Console, options: argparse.Namespace, config: RunConfig) -> None:
    rows = bench.rows()
    console.print(table_of(rows))
    running = bench.running_table(config.policy.model_name)
    found = rankings(bench.ladder, running)
    for line in ladder_lines(found):
        console.print(line)
    if running is not None:
        write_facts(options.out / "running.json", asdict(running))
    facts: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    facts["lengths"] = response_lengths(bench.timed[NEITHER])
    facts["all_lengths"] = [[len(r.token_ids) for r in timed.rollouts] for timed in bench.timed[NEITHER]]
    write_facts(options.out / "tail.json", {**facts, "rows": rows, "rankings": found})


if __name__ == "__main__":
    raise SystemExit(main())
