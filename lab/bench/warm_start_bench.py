# SPDX-License-Identifier: Apache-2.0
"""Measures the first phase of a run whose engine begins with what an earlier engine has kept (`learned.warm_start`).

    python -m lab.bench.warm_start_bench CONFIG --out DIR [--batch 16] [--before 1] [--rounds 1] [--head-only] [--cpu-time]
        [key=value ...]

CONFIG is a config of the local runner with an EAGLE-3 head and text drafters. An earlier engine with all drafters rolls out
`--before` phases of other requests, keeps what it has learned, and ends. Then five engines start:
- one that decodes plainly
- one with the text drafters alone
- one with the head alone
- one with all drafters that begins cold
- one with all drafters that begins warm, with the file of the earlier engine
They take turns with the first requests of a run, of which `--batch` run at once. A speed is the tokens per second while the
batch is full. "Over plain" is a speed divided by that of plain decoding. "Over the best part" is a speed divided by that of
the text drafters alone or of the head alone, whichever is faster. Each round has new engines and other requests. `--head-only`
leaves out the engine with the text drafters alone, for a machine with little memory where the head is the best part anyway.
"""

import itertools
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from lab.bench.bench import request_stream, take_batch
from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.bench_rounds import Entrant, play_round, started
from lab.bench.bench_rows import HEAD_ALONE, OURS, PLAIN, TEXT_ALONE, BenchRow, bench_rows
from lab.bench.bench_tables import new_table
from lab.bench.running_bins import bin_of
from lab.local.run_config import RunConfig, read_run_config
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import RolloutRequest

WARM = "ours, warm"
PARTS = (TEXT_ALONE, HEAD_ALONE)


class Phase(NamedTuple):
    """What an engine did in a phase."""

    rate: float
    """Tokens per second while the batch was full."""
    length: float
    """Tokens that a request gains in an engine step."""
    drafts: float
    """Draft tokens per request and engine step."""


Phases = dict[str, Phase]


def rows_of(config: RunConfig, parts: Sequence[str]) -> dict[str, BenchRow]:
    """Returns the rows of plain decoding, of each of `parts` alone, and of all drafters together, by name.

    `parts` has names of rows that draft with a part of the drafters. The rows' engines do not keep what they learn for later
    engines.
    """
    rows = bench_rows(replace(config, bench=replace(config.bench, rows=())))
    return {row.name: row for row in rows if row.name in (PLAIN, *parts, OURS)}


def kept_in(folder: Path, row: BenchRow) -> BenchRow:
    """Returns a row whose engine keeps what it learns in `folder`, and begins with what the folder has."""
    block = row.generation.specrollout
    block = replace(block, learned=replace(block.learned, history=False, warm_start=True, folder=str(folder)))
    return BenchRow(WARM, OURS, replace(row.generation, specrollout=block))


def learn(config: RunConfig, rows: dict[str, BenchRow], folder: Path, phases: Sequence[list[RolloutRequest]]) -> None:
    """Lets an earlier engine roll out these phases, and keep in `folder` what it has learned."""
    engine_alone = [replace(kept_in(folder, rows[OURS]), name=PLAIN)]  # it is compared with nothing
    with started(config, engine_alone) as entrants:
        for requests in phases:
            play_round(entrants, requests, keep=False, at_a_time=len(requests) // 2)
        engine = entrants[0].engine
        engine.keep_learned()
        engine.run_in_worker(lambda worker: worker.specrollout_kept.warm_start.settle())


def first_phase(config: RunConfig, options: Namespace, requests: Iterator[RolloutRequest]) -> Phases:
    """Plays the first phase of a run with new engines, and returns what each of them did."""
    rows = rows_of(config, (HEAD_ALONE,) if options.head_only else PARTS)
    with TemporaryDirectory() as folder:
        learn(config, rows, Path(folder), [take_batch(requests, options.batch) for _ in range(options.before)])
        all_rows = [*rows.values(), kept_in(Path(folder), rows[OURS])]
        with started(config, all_rows) as entrants:
            print(next(e for e in entrants if e.row.name == WARM).engine.facts()["began"], flush=True)
            play_round(entrants, take_batch(requests, options.batch), keep=True, at_a_time=options.batch)
            return {entrant.row.name: phase_of(entrant, options.batch) for entrant in entrants}


def phase_of(entrant: Entrant, batch: int) -> Phase:
    """Returns what the engine of an entrant did in a phase.

    Raises AssertionError if its tokens differ from plain decoding's.
    """
    assert entrant.tokens_equal == entrant.tokens_total, f"{entrant.row.name} has made other tokens than plain decoding"
    (found,) = entrant.rounds
    full = bin_of(batch)
    stats = found.stats
    drafts = stats.num_draft_tokens / max(stats.num_request_steps, 1)
    return Phase(float(found.tokens_N[full] / found.seconds_N[full]), stats.acceptance_length, drafts)


def table_of(rounds: Sequence[Phases]) -> Table:
    """Returns a table with a row for each way. Its figures are medians over the rounds."""
    table = new_table("the first phase of a run: speed over plain, and over the best part")
    for name in (
        "drafters",
        "tokens/s",
        "tokens a step",
        "drafts",
        "over plain",
        "over the best part",
        "of each round",
    ):
        table.add_column(name, justify="right")
    for way in rounds[0]:
        over = [found[way].rate / max(found[part].rate for part in PARTS if part in found) for found in rounds]
        table.add_row(
            way,
            f"{statistics.median(found[way].rate for found in rounds):.0f}",
            f"{statistics.median(found[way].length for found in rounds):.2f}",
            f"{statistics.median(found[way].drafts for found in rounds):.2f}",
            f"{statistics.median(found[way].rate / found[PLAIN].rate for found in rounds):.3f}",
            f"{statistics.median(over):.3f}",
            " ".join(f"{one:.2f}" for one in over),
        )
    return table


def main() -> None:
    """Runs the bench. Prints a table, and writes `warm_start.json` into the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batch", type=int, default=16, help="requests that run at once")
    parser.add_argument("--before", type=int, default=1, help="phases of the earlier engine")
    parser.add_argument("--rounds", type=int, default=1, help="runs, each with new engines")
    parser.add_argument("--head-only", action="store_true", help="the head is the only part that takes turns")
    parser.add_argument("--cpu-time", action="store_true", help="all clocks count CPU time, for a busy machine")
    options = parser.parse_intermixed_args()
    if options.cpu_time:
        time.perf_counter = time.process_time
    log_console()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    requests = request_stream(config)
    rounds: list[Phases] = []
    for _ in itertools.repeat(None, options.rounds):
        rounds.append(first_phase(config, options, requests))
        print(json.dumps(rounds[-1]), flush=True)
        write_facts(options.out / "warm_start.json", rounds)
    Console(highlight=False, width=132).print(table_of(rounds))


if __name__ == "__main__":
    main()
