# SPDX-License-Identifier: Apache-2.0
"""Measures how soon drafters become as fast as they can be, in the first phases of a run that begins without any knowledge.

    python -m lab.bench.cold_start_bench CONFIG --out DIR [--batch 16] [--phases 3] [--rounds 1] [key=value ...]

CONFIG is a config of the local runner with an EAGLE-3 head and text drafters. Four engines take turns with the same requests,
of which `--batch` run at once. One decodes plainly, one has the text drafters alone, one has the head alone, and one has all
of them together. At the beginning of each round the engines forget all that they have learned, such as step times, acceptance
rates and texts. Their kernels stay compiled. A speed is the tokens per second while the batch is full, divided by that of
plain decoding in the same phase and round. The table has the medians over the rounds. "Over" is the speed of all drafters
together divided by the best speed of the other engines.
"""

import copy
import statistics
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from lab.bench.bench import request_stream, take_batch
from lab.bench.bench_command import bench_parser, write_facts
from lab.bench.bench_rounds import Entrant, play_round, started
from lab.bench.bench_rows import HEAD_ALONE, OURS, PLAIN, TEXT_ALONE, bench_rows
from lab.bench.bench_tables import new_table
from lab.bench.running_bins import bin_of
from lab.local.run_config import read_run_config
from lab.local.traces import column
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.load import load_config
from nemo_specrollout.generation.engine.requests import RolloutRequest

WAYS = (PLAIN, TEXT_ALONE, HEAD_ALONE, OURS)


@dataclass
class Knowledge:
    """What an engine has learned up to a moment, so that this state can be restored. Owns copies of the tensors."""

    policy: Any
    step_model: Any
    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    """Each tensor of the draft board and of the context indexes, with a copy of its first values."""

    @classmethod
    def of(cls, worker: Any) -> "Knowledge | None":
        """Returns copies of the worker's speculation policy, step model, draft board and context indexes as they are now.

        Returns None if the worker has no drafters.
        """
        router = worker.specrollout_router
        if router is None:
            return None
        tensors = [t for t in router.board.tables if isinstance(t, torch.Tensor)]
        for lookup in router._lookups:
            tensors += [t for t in vars(lookup.index).values() if isinstance(t, torch.Tensor)]
        step_model = worker.specrollout_accounts.step_model
        return cls(copy.deepcopy(router.policy), copy.deepcopy(step_model), [(t, t.clone()) for t in tensors])

    def restore(self, worker: Any) -> None:
        """Makes the worker forget all that it has learned since this object was made."""
        worker.specrollout_router.policy = copy.deepcopy(self.policy)
        worker.specrollout_accounts.step_model = copy.deepcopy(self.step_model)
        for tensor, first in self.tensors:
            tensor.copy_(first)


class Forgetful:
    """Engines that can forget what they have learned. Owns what each of them knew at its start."""

    def __init__(self, entrants: Sequence[Entrant]) -> None:
        self._known = [(entrant.engine, entrant.engine.run_in_worker(Knowledge.of)) for entrant in entrants]

    def forget(self) -> None:
        """Makes all engines forget what they have learned. No request may be running."""
        for engine, known in self._known:
            if known is not None:
                engine.run_in_worker(known.restore)


def play_phases(
    entrants: Sequence[Entrant], requests: Iterator[RolloutRequest], options: Namespace
) -> Iterator[dict[str, dict[str, float]]]:
    """Plays the phases of a run one after another. Yields for each phase the figures of each way (`figures_of`)."""
    for _ in range(options.phases):
        play_round(entrants, take_batch(requests, options.batch), keep=True, at_a_time=options.batch)
        yield {entrant.row.name: figures_of(entrant.take(), options.batch) for entrant in entrants}


def figures_of(entrant: Entrant, batch: int) -> dict[str, float]:
    """Returns the figures of an entrant that has played one phase.

    `rate` is the tokens per second while the batch was full. `drafts` is the draft tokens per request and engine step.
    `drafted` is the share of engine steps in which a drafter with weights ran. Raises AssertionError if the entrant's tokens
    differ from plain decoding's.
    """
    (found,) = entrant.rounds
    if entrant.tokens_equal != entrant.tokens_total:
        raise AssertionError(f"{entrant.row.name} has made other tokens than plain decoding")
    full = bin_of(batch)
    figures = {"rate": float(found.tokens_N[full] / found.seconds_N[full]), "steps": found.stats.num_engine_steps}
    figures["tokens"] = found.stats.num_tokens
    trace = found.stats.trace
    if trace:
        rows, requests, draft_s = (np.asarray(column(trace, name)) for name in ("num_rows", "num_requests", "draft_s"))
        figures["drafts"] = float((rows - requests).sum() / requests.sum())
        figures["drafted"] = float((draft_s > 0).mean())
    return figures


def table_of(phases: Mapping[int, Sequence[Mapping[str, Mapping[str, float]]]]) -> Table:
    """Returns a table with a row for each phase. Its figures are medians over the rounds."""
    table = new_table(
        "a run without knowledge: speed over plain by phase, and of all drafters over the best of the rest"
    )
    for name in ("phase", "plain, tokens/s", "text", "head", "all", "over", "of each round", "drafts: head, all"):
        table.add_column(name, justify="right")
    for number, rounds in phases.items():
        rates = [{way: found[way]["rate"] for way in WAYS} for found in rounds]
        over = [rate[OURS] / max(rate[way] for way in WAYS if way != OURS) for rate in rates]
        table.add_row(
            str(number + 1),
            f"{statistics.median(rate[PLAIN] for rate in rates):.0f}",
            *(f"{statistics.median(rate[way] / rate[PLAIN] for rate in rates):.3f}" for way in WAYS[1:]),
            f"{statistics.median(over):.3f}",
            " ".join(f"{one:.2f}" for one in over),
            ", ".join(f"{statistics.median(f[way].get('drafts', 0.0) for f in rounds):.2f}" for way in WAYS[2:]),
        )
    return table


def main() -> None:
    """Runs the bench. Prints a table, and writes `cold_start.json` into the folder `--out`."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batch", type=int, default=16, help="requests that run at once")
    parser.add_argument("--phases", type=int, default=3, help="phases of a run")
    parser.add_argument("--rounds", type=int, default=1, help="runs that begin without knowledge")
    parser.add_argument("--cpu-time", action="store_true", help="all clocks count CPU time, for a busy machine")
    options = parser.parse_intermixed_args()
    if options.cpu_time:
        time.perf_counter = time.process_time
    log_console()
    config, _ = read_run_config(load_config(options.config, options.overrides))
    rows = [row for row in bench_rows(replace(config, bench=replace(config.bench, rows=()))) if row.name in WAYS]
    found: dict[int, list[dict[str, dict[str, float]]]] = defaultdict(list)
    with started(config, rows) as entrants:
        memory = Forgetful(entrants)
        requests = request_stream(config)
        play_round(entrants, take_batch(requests, 1), keep=False)
        for _ in range(options.rounds):
            memory.forget()
            for number, phase in enumerate(play_phases(entrants, requests, options)):
                found[number].append(phase)
                print(number, phase, flush=True)
                write_facts(options.out / "cold_start.json", found)
    Console(highlight=False, width=132).print(table_of(found))


if __name__ == "__main__":
    main()
