# SPDX-License-Identifier: Apache-2.0
"""Times a real pair of policy and draft model in every layout of two cores, and compares it with the planner's predictions.

`python -m lab.bench.placement_bench --policy ... --draft ...` runs this bench. Each round goes through all numbers of
requests, and for each number through all layouts. The tables and the file `pair.json` are written after each round, so a
stopped bench loses nothing. Decoding is timed, not the reading of prompts. In each round, the time of the policy alone is
divided by the layout's time. The figures are the medians of these ratios over the rounds.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lab.bench import pair_engines
from lab.bench.pair_engines import BOTH, COUPLED, DECOUPLED, MOST_REQUESTS, PLAIN, POSITIONS, PROFILED, Pair
from lab.bench.placement_ways import Timed, Way, acceptance_of, child_with
from lab.placement.cost_tables import CostCurve, CostTables
from lab.placement.planner import Option, Placement, place
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.storage.files import write_atomically

if TYPE_CHECKING:
    from nemo_specrollout.generation.engine.requests import RolloutRequest

BATCH_TOKENS: Mapping[int, int] = {1: 96, 4: 64, 8: 48, 16: 32, 32: 24}
"""Number of tokens of each response, by the number of requests."""
DRAINING, DRAINED, SHORTEST, LONGEST = "draining", 16, 16, 256
"""Name, number of requests, and shortest and longest response (tokens) of a rollout whose lengths are a geometric sequence."""
PROMPT_SEED = 74
"""Seed of the problems. The draft model was trained on other problems."""
TWO, ONE = 2, 1
"""Numbers of threads of the policy's engine."""
PAUSE_S = 1.0
"""Seconds between two rollouts."""
WAYS: Sequence[tuple[int, Way]] = (
    (TWO, Way(PLAIN)),
    (TWO, Way(COUPLED, 2)),
    (TWO, Way(COUPLED, 4)),
    (TWO, Way(COUPLED)),
    (ONE, Way(COUPLED, 2)),
    (ONE, Way(DECOUPLED, 2)),
    (ONE, Way(DECOUPLED, 4)),
    (ONE, Way(DECOUPLED)),
    (ONE, Way(BOTH)),
)
MODES = {TWO: (PLAIN, COUPLED), ONE: (COUPLED, DECOUPLED, BOTH)}
"""The layouts whose engines run in a process, by the process's number of threads."""


@dataclass(frozen=True)
class Load:
    """A rollout to time, with its name and the length of each response in tokens."""

    name: str
    lengths: tuple[int, ...]


@dataclass
class Found:
    """The timed rollouts so far, by load, number of threads and way. Each has one entry per round."""

    timed: dict[tuple[str, int, Way], list[Timed]] = field(default_factory=dict)

    def ratios(self, load: str, threads: int, way: Way) -> list[float]:
        """Returns for each round how many times as fast as plain decoding a load was with `way`.

        Plain decoding has `TWO` threads, and `way` has `threads`.
        """
        pairs = zip(self.timed[load, TWO, Way(PLAIN)], self.timed[load, threads, way], strict=False)
        return [plain.seconds / timed.seconds for plain, timed in pairs]

    def ratio(self, load: str, threads: int, way: Way) -> float:
        """Returns the median of `ratios` over the rounds."""
        return statistics.median(self.ratios(load, threads, way))

    def acceptance(self, load: str) -> float:
        """Returns the probability that a draft token is right if the ones before it are.

        It is computed from the measurements of the `Way` that drafts the fewest tokens in the policy's engine.
        """
        timed = self.timed[load, *WAYS[1]]
        counts = {
            name: sum(t.after[name] - t.before[name] for t in timed if len(t.before) > 1)
            for name in ("proposed", "accepted")
        }
        return acceptance_of([{"mode": COUPLED, **counts}]) if counts["proposed"] else 0.0

    def best_fixed(self, load: str) -> tuple[int, Way]:
        """Returns the fastest way with a fixed number of drafts, with its number of threads."""
        fixed = [key for key in WAYS if key[1].k or key[1].mode == PLAIN]
        return max(fixed, key=lambda key: self.ratio(load, *key))


def loads(batches: Sequence[int], scale: float) -> list[Load]:
    """Returns the rollouts of a round. There is one for each number of requests, and one that drains.

    `scale` is a factor on the lengths of all responses.
    """
    found = []
    for batch in batches:
        tokens = BATCH_TOKENS.get(batch, 32)
        found.append(Load(f"{batch}", (max(4, round(tokens * scale)),) * batch))
    steps = [round(scale * SHORTEST * (LONGEST / SHORTEST) ** (i / (DRAINED - 1))) for i in range(DRAINED)]
    return [*found, Load(DRAINING, tuple(max(2, length) for length in steps))]


def requests_of(load: Load, policy: Path) -> "list[RolloutRequest]":
    """Returns the requests of a load.

    Their prompts alternate between problems of the policy's training tasks and free text.
    """
    from lab.local.step_rollout import load_tokenizer
    from lab.local.tasks import FreeText, ReasoningGymTask, Task
    from lab.policies.distilled_draft import SYSTEM_PROMPT, TASKS
    from nemo_specrollout.generation.engine.requests import RolloutRequest

    tokenizer = load_tokenizer(policy)
    half = -(-len(load.lengths) // 2)
    tasks: tuple[Task, ...] = (ReasoningGymTask(tokenizer, TASKS, SYSTEM_PROMPT), FreeText(tokenizer))
    lists = [[task.encode(p) for p in task.problems(PROMPT_SEED, half)] for task in tasks]
    prompts = [prompt for pair in zip(*lists, strict=True) for prompt in pair]
    pairs = zip(prompts, load.lengths, strict=False)
    return [RolloutRequest(ids, i, 0, exact_length=length) for i, (ids, length) in enumerate(pairs)]


def measured_tables(children: Mapping[int, ProcessPoolExecutor], pair: Pair) -> CostTables:
    """Returns the planner's cost tables, measured with the running engines in the child processes."""
    found = {n: c.submit(pair_engines.measure, pair, PROFILED, n == ONE).result() for n, c in children.items()}
    curves = {
        name: tuple(CostCurve(n, PROFILED, tuple(costs[name])) for n, costs in found.items() if name in costs)
        for name in ("verify_s", "draft_s", "coupled_draft_s")
    }
    return CostTables("this machine", str(pair.policy), str(pair.draft), unit="thread", **curves)  # type: ignore[arg-type]


# What the planner says


class Plan:
    """What the planner predicts for one load, as speeds relative to the policy alone on all threads."""

    def __init__(self, tables: CostTables, load: Load, acceptance: float) -> None:
        self._tables = tables
        self._acceptance = acceptance
        self._placements: dict[int, Placement] = {}
        ends = sorted(load.lengths)
        starts = [0, *ends[:-1]]
        rest = zip(range(len(ends), 0, -1), starts, ends, strict=True)
        self._stages = [(batch, end - start) for batch, start, end in rest if end > start]
        """Pairs of a number of requests that run together, and the number of tokens that each of them gets in this time."""

    def speed(self, threads: int, way: Way) -> float | None:
        """Returns the predicted speed of a way, or None if the way chooses its number of drafts itself."""
        if not way.k and way.mode != PLAIN:
            return None
        seconds = self._seconds(threads, way)
        return None if seconds is None else (self._seconds(TWO, Way(PLAIN)) or 0.0) / seconds

    def choice(self, ways: Sequence[tuple[int, Way]]) -> tuple[int, Way]:
        """Returns the way with the highest predicted speed, with its number of threads."""
        return max(ways, key=lambda key: self.speed(*key) or 0.0)

    def best_in_words(self) -> str:
        """Returns a text that names the planner's best option and its speedup.

        The option is the best of all that the planner knows, for the number of requests at the start of the load.
        """
        best = self._placement(self._stages[0][0]).best
        return f"{best.in_words('thread')} ({best.speedup:.2f}x)"

    def _seconds(self, threads: int, way: Way) -> float | None:
        total = 0.0
        for batch, tokens in self._stages:
            options = (o for o in self._placement(batch).options if _fits(o, threads, way))
            option = next(options, None)
            if option is None:
                return None
            total += tokens * batch / option.tokens_per_s
        return total

    def _placement(self, batch: int) -> Placement:
        if batch not in self._placements:
            self._placements[batch] = place(self._tables, batch, TWO, self._acceptance, POSITIONS, max_groups=1)
        return self._placements[batch]


def _fits(option: Option, threads: int, way: Way) -> bool:
    return (option.mode, option.verifier_size, option.k) == (way.mode, threads, way.k) and option.drafter_size <= 1


def rows_of(load: Load, found: Found, plan: Plan) -> list[dict[str, Any]]:
    """Returns a row for each way, with its measured and its predicted speed over the policy alone.

    The row's key `equal` says whether the way makes the tokens of plain decoding.
    """
    expected = found.timed[load.name, TWO, Way(PLAIN)][0].token_ids
    rows = []
    for threads, way in WAYS:
        timed = found.timed[load.name, threads, way]
        ratios = found.ratios(load.name, threads, way)
        predicted = plan.speed(threads, way)
        speed = statistics.median(ratios)
        first, last = (DrafterStats(**(counts.get("supply") or {})) for counts in (timed[0].before, timed[-1].after))
        supply = last.since(first).figures()
        rows.append(
            {
                "load": load.name,
                "way": str(way),
                "threads": f"{threads}+1" if way.mode in (DECOUPLED, BOTH) else f"{threads}",
                "seconds": statistics.median(t.seconds for t in timed),
                "over_plain": speed,
                "lowest": min(ratios),
                "highest": max(ratios),
                "predicted": predicted,
                "error": None if predicted is None else predicted / speed - 1.0,
                "steps": statistics.median(t.num_steps for t in timed),
                "equal": all(t.token_ids == expected for t in timed),
                **{name: supply[name] for name in ("occupancy", "waste", "num_failures", "draft_token_s")},
            }
        )
    return rows


def verdict_of(load: Load, found: Found, plan: Plan) -> dict[str, Any]:
    """Returns whether the planner's choice is the fastest way with a fixed number of drafts.

    The result also compares the ways that choose their number of drafts themselves with this fastest way.
    """
    fixed = [key for key in WAYS if key[1].k or key[1].mode == PLAIN]
    best = found.best_fixed(load.name)
    chosen = plan.choice(fixed)
    best_speed = found.ratio(load.name, *best)
    autos = {str(way): found.ratio(load.name, n, way) / best_speed for n, way in WAYS if (n, way) not in fixed}
    return {
        "load": load.name,
        "lengths": list(load.lengths),
        "acceptance": found.acceptance(load.name),
        "best": f"{best[1]} on {best[0]}",
        "chosen": f"{chosen[1]} on {chosen[0]}",
        "is_best": chosen == best,
        "chosen_over_best": found.ratio(load.name, *chosen) / best_speed,
        "autos_over_best_fixed": autos,
        "planned": plan.best_in_words(),
    }


# The bench


def run_pair(options: argparse.Namespace, console: Console) -> int:
    """Runs the bench for a real pair of models. Returns the exit code.

    Prints tables and writes `pair.json` after each round.
    """
    batches = options.batches or list(BATCH_TOKENS)
    if max(batches) > MOST_REQUESTS:
        console.print(f"--batches: {max(batches)}; an engine of this bench runs at most {MOST_REQUESTS}")
        return 2
    pair = Pair(options.policy.resolve(), options.draft.resolve())
    options.out.mkdir(parents=True, exist_ok=True)
    work = {load: requests_of(load, pair.policy) for load in loads(batches, options.scale)}
    children = {threads: child_with(threads) for threads in MODES}
    found = Found()
    try:
        with console.status("starting the engines"):
            for threads, child in children.items():
                child.submit(pair_engines.start, pair, MODES[threads]).result()
        with console.status("measuring for the planner"):
            tables = measured_tables(children, pair)
        for curves in (tables.verify_s, tables.draft_s, tables.coupled_draft_s):
            console.print("; ".join(f"{c.size}: {[round(1e3 * s, 1) for s in c.seconds]} ms" for c in curves))
        _round(children, {load: requests[:4] for load, requests in list(work.items())[:1]}, WAYS, console)
        for number in range(options.rounds):
            ways = WAYS[:: -1 if number % 2 else 1]  # a way may profit or suffer from the one before it
            for key, timed in _round(children, work, ways, console).items():
                found.timed.setdefault(key, []).append(timed)
            _report(options.out, number + 1, list(work), found, tables, console)
    finally:
        for child in children.values():
            child.submit(pair_engines.close).result()
            child.shutdown()
    return 0


def _round(
    children: Mapping[int, ProcessPoolExecutor],
    work: "Mapping[Load, Sequence[RolloutRequest]]",
    ways: Sequence[tuple[int, Way]],
    console: Console,
) -> dict[tuple[str, int, Way], Timed]:
    """Rolls out each load in each of the ways, in this order, and returns the timed rollouts.

    A pause before each rollout lets a remote drafter finish its remaining work.
    """
    found = {}
    for load, requests in work.items():
        for threads, way in ways:
            time.sleep(PAUSE_S)
            with console.status(f"{load.name} requests, {way} on {threads}"):
                found[load.name, threads, way] = children[threads].submit(pair_engines.roll_out, way, requests).result()
    return found


def _report(
    out: Path, num_rounds: int, all_loads: Sequence[Load], found: Found, tables: CostTables, console: Console
) -> None:
    rows: list[dict[str, Any]] = []
    verdicts = []
    for load in all_loads:
        plan = Plan(tables, load, found.acceptance(load.name))
        rows += (of_load := rows_of(load, found, plan))
        verdicts.append(verdict := verdict_of(load, found, plan))
        console.print(_table(of_load, verdict, num_rounds))
    costs = {name: [vars(c) for c in getattr(tables, name)] for name in ("verify_s", "draft_s", "coupled_draft_s")}
    facts = {"rounds": num_rounds, "cores": os.cpu_count(), "costs": _plain(costs), "rows": rows, "verdicts": verdicts}
    write_atomically(out / "pair.json", json.dumps(facts, indent=1) + "\n")


def _plain(costs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    kept = ("size", "counts", "seconds")
    return {name: [{k: curve[k] for k in kept} for curve in curves] for name, curves in costs.items()}


def _table(rows: Sequence[Mapping[str, Any]], verdict: Mapping[str, Any], num_rounds: int) -> Table:
    title = f"requests: {verdict['load']}, acceptance {verdict['acceptance']:.2f}, rounds {num_rounds}"
    autos = ", ".join(f"{way} {share:.2f}" for way, share in verdict["autos_over_best_fixed"].items())
    is_right = "the best" if verdict["is_best"] else f"{verdict['chosen_over_best']:.2f} of the best, {verdict['best']}"
    caption = (
        f"the planner chooses {verdict['chosen']}: {is_right}. Of all options: {verdict['planned']}. "
        f"Over the best fixed way: {autos}"
    )
    table = Table(pad_edge=False, title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in ("way", "threads", "seconds", "x plain", "lowest", "highest", "predicted", "error", "steps", "equal"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -row["over_plain"]):
        predicted = row["predicted"]
        table.add_row(
            row["way"],
            row["threads"],
            f"{row['seconds']:.2f}",
            *(f"{row[name]:.2f}" for name in ("over_plain", "lowest", "highest")),
            "-" if predicted is None else f"{predicted:.2f}",
            "-" if predicted is None else f"{row['error']:+.0%}",
            f"{row['steps']:.0f}",
            "yes" if row["equal"] else "NO",
        )
    return table
