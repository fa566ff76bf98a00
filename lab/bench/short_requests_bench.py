# SPDX-License-Identifier: Apache-2.0
"""Measures what the block costs where it can gain little, with many short requests to a tiny policy, compared with stock vLLM.

    python -m lab.bench.short_requests_bench [--batches 64 256 1024] [--seconds 60] [--ways "all drafters" ...]

All engines are in one process and take turns of a few engine steps, in an order that changes from round to round. A request
makes `--length` tokens. Each round has the same prompts with other noise, like the epochs of a run.

The time of a way is divided by that of stock vLLM in the same round, and the table has the medians over the rounds. A first
round warms up. `--profile WAY` prints which functions of the host take a way's time, and how many of its engine steps had
drafts.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from rich.console import Console

from lab.bench.bench_tables import new_table
from lab.local.step_rollout import MeasuredRollout
from nemo_specrollout.generation.engine.arguments import set_process_environment

STOCK_VLLM = "stock vLLM"
WAYS: Mapping[str, tuple[str, ...] | None] = {
    STOCK_VLLM: None,
    "no drafters": (),
    "text drafters": ("suffix", "ngram"),
    "head": ("eagle3",),
    "all drafters": ("suffix", "ngram", "eagle3"),
    "useless drafters": ("random",),
}
"""Types of the drafters of each way. A way with None is vLLM without our worker."""
SHOWN = (STOCK_VLLM, "no drafters", "all drafters", "useless drafters")
SAMPLES = 8
"""Samples of each prompt."""
FEWEST_ROUNDS = 3
WARM_UP = 1
TURN_S = 0.1
"""Seconds after which a turn ends. The engine step that is running then is completed in the same turn."""
PROFILED = 40
"""Number of functions that are printed for a profile."""


def started(ways: Sequence[str], most: int, stack: ExitStack) -> dict[str, Any]:
    """Starts an engine for each way, with slots for `most` requests, and returns the engines by way. `stack` closes them."""
    from lab.gpu.gpu_stage import POLICY, STOCK, block, start_engine

    engines = {}
    for way in ways:
        drafters = WAYS[way]
        specrollout = STOCK if drafters is None else block(*drafters)
        options = {"max_num_seqs": most, "kv_cache_memory_bytes": 1 << 30}
        engines[way] = start_engine(POLICY, specrollout, eager=True, **options)  # type: ignore[arg-type]
        stack.callback(engines[way].close)
    return engines


def play_round(
    engines: Mapping[str, Any], requests: Sequence[Any], profiled: Mapping[str, cProfile.Profile]
) -> dict[str, float]:
    """Rolls out the requests once in every engine, in turns, and returns the seconds of each way.

    `profiled` has the profiles of those ways that are profiled. Raises AssertionError if ways with our worker have made
    different tokens.
    """
    turns = {name: MeasuredRollout(engine, requests) for name, engine in engines.items()}
    while not all(turn.is_done for turn in turns.values()):
        for name, turn in turns.items():
            if not turn.is_done:
                with profiled.get(name, nullcontext()):
                    turn.advance(TURN_S)
    seconds = {name: turn.seconds for name, turn in turns.items()}
    ours = [turn.result()[0] for name, turn in turns.items() if name != STOCK_VLLM]
    tokens = [[list(rollout.token_ids) for rollout in rollouts] for rollouts in ours]
    if any(others != tokens[0] for others in tokens):
        raise AssertionError("ways of ours have made different tokens")
    return seconds


def measure(
    engines: Mapping[str, Any], requests: Sequence[Any], options: argparse.Namespace, profiled: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Returns the seconds of each way by round. Rounds are played until `options.seconds` have passed."""
    from lab.gpu.gpu_stage import of_version

    names = list(engines)
    found: dict[str, list[float]] = {name: [] for name in names}
    until = time.monotonic() + options.seconds
    number = 0
    while number < WARM_UP + FEWEST_ROUNDS or time.monotonic() < until:
        turned = names[number % len(names) :] + names[: number % len(names)]
        in_order = {name: engines[name] for name in turned}
        took = play_round(in_order, of_version(requests, number), profiled if number >= WARM_UP else {})
        for name, seconds in took.items():
            found[name].append(seconds)
        number += 1
    return {name: seconds[WARM_UP:] for name, seconds in found.items()}


def row_of(engine: Any, took: Sequence[float], stock: Sequence[float], first_step: int, batch: int) -> list[str]:
    """Returns the table cells of a way for one batch size.

    `took` and `stock` are the seconds of the way's and of stock vLLM's rounds. The cells have the median and the quartiles of
    their ratios, and figures of the engine steps since `first_step`.
    """
    ratios = [a / b for a, b in zip(took, stock, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    cells = [str(batch), f"{statistics.median(took):.3f}", f"{middle:.3f}", f"{low:.3f}-{high:.3f}", str(len(ratios))]
    stats = engine.stats(first_step)
    if stats is None:
        return [*cells, "-", "-", "-", "-"]
    column = stats.trace.column
    rounds = len(took) + WARM_UP
    has_drafts = column("num_rows") > column("num_requests")
    return [
        *cells,
        f"{len(has_drafts) / rounds:.1f}",
        f"{has_drafts.mean():.0%}",
        f"{(column('draft_s') > 0).mean():.0%}",
        f"{column('host_s').sum() / column('seconds').sum():.1%}",
    ]


def main() -> None:
    """Runs the bench. Prints a table, and a profile for each way in `--profile`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 1024], help="numbers of requests")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the rounds of each batch")
    parser.add_argument("--length", type=int, default=24, help="tokens of each response")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(SHOWN))
    parser.add_argument("--cpu-time", action="store_true", help="all clocks count CPU time, for a busy machine")
    parser.add_argument("--profile", nargs="+", choices=list(WAYS), default=[])
    options = parser.parse_args()
    if options.cpu_time:
        time.perf_counter = time.process_time
    set_process_environment()
    from lab.gpu.gpu_stage import task_requests

    ways = list(dict.fromkeys([STOCK_VLLM, *options.ways, *options.profile]))
    console = Console(highlight=False, width=132)
    table = new_table(f"requests of {options.length} tokens: seconds of a batch, and over stock vLLM")
    for name in (
        "",
        "requests",
        "s",
        "over stock",
        "quartiles",
        "rounds",
        "steps",
        "with drafts",
        "head at work",
        "host time",
    ):
        table.add_column(name, justify="right" if name else "left")
    with ExitStack() as stack:
        engines = started(ways, max(options.batches), stack)
        for batch in options.batches:
            profiles = {way: cProfile.Profile() for way in options.profile}
            drawn = task_requests(-(-batch // SAMPLES), SAMPLES)[:batch]
            requests = [replace(request, exact_length=options.length) for request in drawn]
            counters = {way: engine.counters() for way, engine in engines.items()}
            found = measure(engines, requests, options, profiles)
            for way, took in found.items():
                before = counters[way]
                first_step = 0 if before is None else before.num_steps
                table.add_row(way, *row_of(engines[way], took, found[STOCK_VLLM], first_step, batch))
            for way, profile in profiles.items():
                print(f"{way}, {batch} requests, {len(found[way])} rounds")
                pstats.Stats(profile).sort_stats("tottime").print_stats(PROFILED)
    console.print(table)


if __name__ == "__main__":
    main()
