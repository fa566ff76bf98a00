# SPDX-License-Identifier: Apache-2.0
"""The bench: every way of rolling out the same requests, interleaved, under the same clock.

All rows sample with the same noise and so make the same tokens, but for vLLM's own speculation at a temperature above 0;
seconds a token are compared. Within a round the rows take turns of a fifth of a second or so; speedups are of rounds.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as RichProgress

from nemo_specrollout.config.block import BudgetConfig, DrafterConfig
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.run import RunConfig
from nemo_specrollout.generation.engine import RolloutRequest
from nemo_specrollout.local.acceptance_bench import acceptance_table, measure_acceptance_table
from nemo_specrollout.local.bench_figures import Figures, figures_of, host_share, row_figures
from nemo_specrollout.local.bench_rounds import Entrant, group_with, play_round, started
from nemo_specrollout.local.bench_rows import OURS, BenchRow, bench_rows, plain_row, row_groups
from nemo_specrollout.local.bench_tables import constant_table, rollout_table, running_table, sentences, useless_table
from nemo_specrollout.local.charts import bench_chart, running_chart
from nemo_specrollout.local.deep_policy import with_deep_policy
from nemo_specrollout.local.rollout import load_tokenizer, step_prompts
from nemo_specrollout.local.running_bins import bin_of
from nemo_specrollout.local.tasks import build_task

# Rounds that only warm up: kernels compile, engines learn what steps cost.
WARM_UP_ROUNDS = 1
# The worst case is a matter of one per cent, and single rounds differ by more, short ones by most: times `num_rounds`.
USELESS_ROUNDS, USELESS_ROUNDS_OF_FEW, FEW = 4, 8, 16
# Requests of a round with a constant batch: what is left at its end, when nothing replaces who has ended, does not count.
FULL_BATCHES, FEWEST_REQUESTS = 2, 4
# Columns of a table that goes into a file.
WIDTH_OF_LOGS = 132


@dataclass
class Measured:
    """Measurements of all rows, by workload and by constant batch. Each inner list is a group of rows that took turns."""

    draining: dict[str, list[list[Entrant]]]
    constant: dict[int, list[list[Entrant]]]


def run_bench(config: RunConfig) -> list[Figures]:
    """Measures, writes `bench.json` and pictures, prints the tables; returns the rows of all workloads."""
    out = Path(config.logger.log_dir)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_LOGS
    if config.bench.deepen > 1:
        config = with_deep_policy(config, out / "deep_policy")
    measured = measure_rows(config)
    out.mkdir(parents=True, exist_ok=True)
    _set_aside(out)
    rows = []
    for name, groups in measured.draining.items():
        found = figures_of(groups)
        rows += [{"workload": name, **row} for row in found]
        bench_chart(found, out / (f"bench_{name}.png" if len(measured.draining) > 1 else "bench.png"))
        console.print(f"workload: {name}", style="bold")
        console.print(rollout_table(found))
        console.print(running_table(found))
        # Ours is compared with the plain that it took turns with: the machine's speed changes between groups.
        for line in sentences(found, group_with(OURS, groups)):
            console.print(line)
    _write(out / "bench.json", rows)
    if measured.constant:
        constant = constant_rows(measured)
        _write(out / "bench_constant.json", constant)
        running_chart(constant, out / "bench_constant.png")
        console.print(constant_table(constant))
    if config.bench.acceptance_k and config.policy.generation.specrollout.model_drafter is not None:
        accepted = measure_acceptance_table(config)
        _write(out / "bench_acceptance.json", accepted)
        console.print(acceptance_table(accepted))
    if config.bench.useless_batches:
        worst = measure_useless_drafters(config)
        _write(out / "bench_useless.json", worst)
        console.print(useless_table(worst))
    console.print(f"written to {out}/bench*.json and {out}/bench*.png")
    return rows


def measure_rows(config: RunConfig) -> Measured:
    """Plays all rounds of all rows, a group of rows after the other."""
    bench = config.bench
    workloads = config.workloads
    measured = Measured({name: [] for name in workloads}, {batch: [] for batch in bench.constant_batches})
    groups = row_groups(bench_rows(config), bench.rows_at_a_time)
    num_rounds = WARM_UP_ROUNDS + bench.num_rounds
    total = len(groups) * (len(workloads) * num_rounds + len(bench.constant_batches) * bench.num_rounds)
    with RichProgress() as bar:
        task = bar.add_task("rounds", total=total)
        for rows in groups:
            with started(config, rows) as entrants:
                for name, data in workloads.items():
                    rounds = itertools.islice(_requests_of(replace(config, data=data)), num_rounds)
                    for index, requests in enumerate(rounds):
                        play_round(entrants, requests, keep=index >= WARM_UP_ROUNDS)
                        bar.advance(task)
                    measured.draining[name].append([entrant.take() for entrant in entrants])
                stream = request_stream(config)
                for batch in bench.constant_batches:
                    for _ in range(bench.num_rounds):
                        play_round(entrants, take_batch(stream, batch), keep=True, at_a_time=batch)
                        bar.advance(task)
                    measured.constant[batch].append([entrant.take() for entrant in entrants])
    return measured


def constant_rows(measured: Measured) -> list[Figures]:
    """A row for each constant batch and row of the bench: only what was made while the batch was full, or nearly."""
    found = []
    for batch, groups in measured.constant.items():
        for row in figures_of(groups):
            full = row["by_running"][bin_of(batch)]
            kept = {name: row[name] for name in ("mode", "kind", "tokens_equal", "tokens_total", "acceptance_length")}
            found.append({"batch": batch, **kept, **{n: full[n] for n in ("tokens_per_s", "speedup_vs_plain")}})
    return found


def measure_useless_drafters(config: RunConfig) -> list[Figures]:
    """Plain against a drafter that is always wrong, at several batch sizes: what speculation costs where it cannot pay."""
    plain = plain_row(config)
    block = replace(plain.generation.specrollout, drafters=(DrafterConfig("random"),), budget=BudgetConfig("auto"))
    useless = BenchRow("useless", OURS, replace(plain.generation, specrollout=block))
    rows = []
    with started(config, [plain, useless]) as entrants:
        for batch in config.bench.useless_batches:
            num_rounds = config.bench.num_rounds * (USELESS_ROUNDS_OF_FEW if batch < FEW else USELESS_ROUNDS)
            for index, prompts in enumerate(itertools.islice(_requests_of(config), WARM_UP_ROUNDS + num_rounds)):
                requests = [prompts[i % len(prompts)] for i in range(batch)]
                play_round(entrants, requests, keep=index >= WARM_UP_ROUNDS)
            slow, fast = (entrant.take() for entrant in entrants)
            row = row_figures(fast, slow)
            row["host_share"] = host_share([r.stats for r in fast.rounds])
            rows.append({"batch": batch, **row})
    return rows


def _requests_of(config: RunConfig) -> Iterator[list[RolloutRequest]]:
    """The requests of one round after the other."""
    task = build_task(config.data, load_tokenizer(Path(config.policy.model_name)))
    for index in itertools.count():
        yield step_prompts(config, index, task).requests


def request_stream(config: RunConfig) -> Iterator[RolloutRequest]:
    """Yields requests for constant batches without end. None repeats, because drafters remember the text of a request."""
    grpo = replace(config.grpo, seed=config.grpo.seed + 1)  # Other prompts than the rounds of a workload.
    return itertools.chain.from_iterable(_requests_of(replace(config, grpo=grpo)))


def take_batch(stream: Iterator[RolloutRequest], batch: int) -> list[RolloutRequest]:
    """Returns the next requests of a round that keeps `batch` requests running: `FULL_BATCHES` times as many."""
    return list(itertools.islice(stream, max(FULL_BATCHES * batch, FEWEST_REQUESTS)))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_atomically(path, json.dumps(rows, indent=1))


def _set_aside(folder: Path) -> None:
    """Renames what an earlier bench left there, "bench.json" to "bench.1.json" or the next number that is free."""
    for path in [p for p in folder.glob("bench*") if p.suffix in (".json", ".png", ".svg") and "." not in p.stem]:
        numbered = (path.with_suffix(f".{n}{path.suffix}") for n in itertools.count(1))
        path.rename(next(p for p in numbered if not p.exists()))
