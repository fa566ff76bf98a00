# SPDX-License-Identifier: Apache-2.0
"""Measures how much a history of finished responses speeds up two engines of a run.

    python -m lab.bench.history_bench CONFIG --out DIR [--rounds 3] [--workloads mixed,free_text] [key=value ...]

CONFIG is a config of the local runner. The same rollouts run with and without a history. Each round has prompts of its own,
and these rollouts:
- spread: a first epoch in which each engine has half of the samples of every prompt.
- first: a first epoch of other prompts, in which all samples of a prompt are on one engine.
- second: the second epoch of the prompts of "first", with other noise and in another order. So about half of the prompts come
  to the engine that did not have them before.
The engines with a history and those without take turns, so that all of them are at the same place of a rollout.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lab.bench.bench import WIDTH_OF_LOGS
from lab.bench.bench_command import bench_parser, write_facts
from lab.local.engine import Generation, RolloutEngine
from lab.local.run_config import RunConfig, read_run_config
from lab.local.statistics import count_equal
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from nemo_specrollout.config.block import LearnedConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

NUM_ENGINES = 2
TURN_S = 0.25
"""Seconds of a turn of one engine."""
PHASES = ("spread", "first", "second")


@dataclass
class Way:
    """Two engines that share a history or have none, with the measurements of their rollouts."""

    name: str
    engines: list[RolloutEngine]
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Seconds of the rollouts, by workload and phase."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """By workload and phase, the four counts of draft tokens that `drafts_of` returns."""


@dataclass(frozen=True)
class Work:
    """A rollout of a workload in a phase. `dealt` has the requests that each engine gets."""

    workload: str
    phase: str
    dealt: list[list[RolloutRequest]]


def works_of(config: RunConfig, workloads: Sequence[str], number: int) -> list[Work]:
    """Returns the rollouts of round `number`. There is one for each workload and phase."""
    found = []
    tokenizer = load_tokenizer(Path(config.policy.model_name))
    shuffled = random.Random(number)
    for name in workloads:
        chosen = replace(config, data=config.workloads[name])
        task = build_task(chosen.data, tokenizer)
        spread, whole = (step_prompts(chosen, 2 * number + half, task).requests for half in (0, 1))
        found.append(Work(name, "spread", [spread[e::NUM_ENGINES] for e in range(NUM_ENGINES)]))
        prompts = sorted({r.prompt_index for r in whole})
        found.append(Work(name, "first", _by_prompt(whole, prompts)))
        shuffled.shuffle(prompts)
        again = [replace(r, policy_version=r.policy_version + 1_000_000) for r in whole]
        found.append(Work(name, "second", _by_prompt(again, prompts)))
    return found


def _by_prompt(requests: Sequence[RolloutRequest], prompts: Sequence[int]) -> list[list[RolloutRequest]]:
    of_prompt = {prompt: [r for r in requests if r.prompt_index == prompt] for prompt in prompts}
    share = -(-len(prompts) // NUM_ENGINES)
    shares = [prompts[e * share : (e + 1) * share] for e in range(NUM_ENGINES)]
    return [[r for prompt in some for r in of_prompt[prompt]] for some in shares]


def play(ways: Sequence[Way], work: Work, *, keep: bool) -> tuple[int, int]:
    """Rolls out the same requests with and without a history, in turns.

    Returns how many tokens are equal with and without it, and how many tokens were compared.
    """
    running = {
        way.name: [Generation(e, dealt) for e, dealt in zip(way.engines, work.dealt, strict=True)] for way in ways
    }
    took = dict.fromkeys(running, 0.0)
    before = {way.name: drafts_of(way) for way in ways}
    order = list(running.items())
    while not all(part.is_done for parts in running.values() for part in parts):
        order.reverse()
        for name, parts in order:
            for part in parts:
                if not part.is_done:
                    started = time.perf_counter()
                    part.advance(TURN_S)
                    took[name] += time.perf_counter() - started
    rollouts: dict[str, list[Rollout]] = {}
    for way in ways:
        rollouts[way.name] = [rollout for part in running[way.name] for rollout in part.rollouts]
        for engine in way.engines:
            engine._ask(WorkerCalls.specrollout_end_step, None)
        if keep:
            way.seconds.setdefault((work.workload, work.phase), []).append(took[way.name])
            key = f"{work.workload}, {work.phase}"
            gained = [after - was for after, was in zip(drafts_of(way), before[way.name], strict=True)]
            way.counts[key] = [a + b for a, b in zip(way.counts.get(key, [0] * 4), gained, strict=True)]
    return count_equal(*(rollouts[way.name] for way in ways))


def drafts_of(way: Way) -> list[int]:
    """Returns four counts of draft tokens: accepted and verified ones of the history, then the same of all drafters."""
    totals = [engine._ask(WorkerCalls.specrollout_totals) for engine in way.engines]
    found = []
    for kind in ("accepted", "proposed"):
        counts = [dict(total[kind]) for total in totals]
        found += [sum(sum(c.get("history", ())) for c in counts), sum(sum(map(sum, c.values())) for c in counts)]
    return [found[0], found[2], found[1], found[3]]


def row_of(off: Way, on: Way, key: tuple[str, str]) -> dict[str, Any]:
    """Returns figures that compare the engines with a history (`on`) and those without (`off`).

    `key` is the workload and the phase.
    """
    ratios = sorted(a / b for a, b in zip(off.seconds[key], on.seconds[key], strict=True))
    accepted, verified, all_accepted, all_verified = on.counts[", ".join(key)]
    return {
        "workload": key[0],
        "phase": key[1],
        "ratios": ratios,
        "median": statistics.median(ratios),
        "off_s": statistics.median(off.seconds[key]),
        "on_s": statistics.median(on.seconds[key]),
        "history_share_of_drafts": verified / max(all_verified, 1),
        "history_acceptance": accepted / max(verified, 1),
        "history_share_of_accepted": accepted / max(all_accepted, 1),
    }


def main() -> int:
    """Runs the bench. Prints a table, and writes its rows to `history.json` in the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--workloads", default="mixed,free_text", help="names of the config's workloads, joined by commas"
    )
    options = parser.parse_intermixed_args()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    workloads = options.workloads.split(",")
    generation = config.policy.generation
    model = Path(config.policy.model_name)
    with tempfile.TemporaryDirectory() as folder:
        ways = []
        for name, history in (("off", False), ("on", True)):
            learned = LearnedConfig(history=history, warm_start=False, folder=folder)
            changed = replace(generation, specrollout=replace(generation.specrollout, learned=learned))
            engines = [RolloutEngine(model, changed, config.grpo.seed) for _ in range(NUM_ENGINES)]
            ways.append(Way(name, engines))
        equal = total = 0
        for number in track(range(1 + options.rounds), "rounds", transient=True):
            for work in works_of(config, workloads, number):
                found = play(ways, work, keep=number > 0)
                equal, total = equal + found[0], total + found[1]
        for way in ways:
            for engine in way.engines:
                engine.close()
    off, on = ways
    rows = [row_of(off, on, (workload, phase)) for workload in workloads for phase in PHASES]
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_OF_LOGS
    console.print(_table(rows))
    console.print(f"{equal:,} of {total:,} tokens are equal")
    facts = {"config": str(options.config), "overrides": options.overrides, "rounds": options.rounds}
    write_facts(options.out / "history.json", {**facts, "rows": rows, "tokens_equal": equal, "tokens_total": total})
    return 0


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(pad_edge=False)
    for name in ("workload", "phase", "off / on", "off s", "on s", "share of drafts", "accepted", "share of accepted"):
        table.add_column(name, justify="left" if name in ("workload", "phase") else "right", no_wrap=True)
    for row in rows:
        ratios = row["ratios"]
        table.add_row(
            row["workload"],
            row["phase"],
            f"{row['median']:.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})",
            f"{row['off_s']:.1f}",
            f"{row['on_s']:.1f}",
            f"{row['history_share_of_drafts']:.0%}",
            f"{row['history_acceptance']:.0%}",
            f"{row['history_share_of_accepted']:.0%}",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
