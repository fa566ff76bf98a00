# SPDX-License-Identifier: Apache-2.0
"""Runs the bench, which compares the times in which different ways of rolling out decode the same requests.

Each way is a row of the bench. All rows sample with the same noise, so they make the same tokens, except for vLLM's own
speculation at a temperature above 0. Rows are compared by seconds per token. Within a round the rows take turns of about a
fifth of a second. A speedup is the median of the speedups within each round.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lab.bench.acceptance_bench import acceptance_table, measure_acceptance_table
from lab.bench.bench_charts import bench_chart, running_chart, throughput_chart
from lab.bench.bench_figures import Figures, figures_of, host_share, row_figures
from lab.bench.bench_rounds import Entrant, group_with, play_round, started
from lab.bench.bench_rows import OURS, BenchRow, bench_rows, plain_row, row_groups
from lab.bench.bench_tables import constant_table, rollout_table, running_table, sentences, useless_table
from lab.bench.running_bins import bin_of
from lab.local.run_config import RunConfig
from lab.local.step_rollout import load_tokenizer, step_prompts
from lab.local.tasks import build_task
from lab.policies.deep_policy import with_deep_policy
from nemo_specrollout.cli.terminal import progress_bar
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.config.drafter_configs import RandomDrafterConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.storage.files import write_atomically

# Rounds that only warm up, in which kernels compile and engines learn what steps cost.
WARM_UP_ROUNDS = 1
# The comparison with a drafter that is always wrong has this many times `num_rounds` rounds. Such a drafter costs about one
# per cent, but the time of a single round varies more, above all that of a short one.
USELESS_ROUNDS, USELESS_ROUNDS_OF_FEW, FEW = 4, 8, 16
# A round with a constant batch has this many full batches, and at least this many requests. The end of the round, when no new
# requests replace those that have ended, does not count.
FULL_BATCHES, FEWEST_REQUESTS = 2, 4
# Columns of a table that goes into a file.
WIDTH_OF_LOGS = 132


class BenchReport:
    """Writes `bench*.json` and charts, and prints tables.

    Each appears as soon as it is complete, because a bench takes long.
    """

    def __init__(self, config: RunConfig, console: Console) -> None:
        self._config = config
        self.console = console
        self._out = Path(config.logger.log_dir)
        self._out.mkdir(parents=True, exist_ok=True)
        _set_aside(self._out)
        self.rows: list[Figures] = []
        """The rows of `bench.json` for all workloads so far."""

    def draining(self, name: str, groups: Sequence[Sequence[Entrant]]) -> None:
        """Reports a workload whose rounds all rows have played. `groups` has the entrants with their measurements."""
        found = figures_of(groups)
        self.rows += [{"workload": name, **row} for row in found]
        self._write("bench.json", self.rows)
        bench_chart(found, self._out / (f"bench_{name}.png" if len(self._config.workloads) > 1 else "bench.png"))
        self.console.print(f"workload: {name}", style="bold")
        self.console.print(rollout_table(found))
        self.console.print(running_table(found))
        # Our row is compared with the plain row of its own group, because the machine's speed changes between groups.
        for line in sentences(found, group_with(OURS, groups)):
            self.console.print(line)

    def constant(self, groups: Mapping[int, Sequence[Sequence[Entrant]]]) -> None:
        """Reports the constant batches after all rows have played them. `groups` has the entrants by size of the batch."""
        found = constant_rows(groups)
        self._write("bench_constant.json", found)
        running_chart(found, self._out / "bench_constant.png")
        throughput_chart(found, self._out / "bench_throughput.png")
        self.console.print(constant_table(found))

    def acceptance(self, rows: list[Figures]) -> None:
        """Reports the acceptance by draft position. `rows` are those of `measure_acceptance_table`."""
        self._write("bench_acceptance.json", rows)
        self.console.print(acceptance_table(rows))

    def useless(self, rows: list[Figures]) -> None:
        """Reports the rows of `measure_useless_drafters`, which compare plain decoding with a drafter that is always wrong."""
        self._write("bench_useless.json", rows)
        self.console.print(useless_table(rows))

    def _write(self, name: str, rows: list[Figures]) -> None:
        write_atomically(self._out / name, json.dumps(rows, indent=1))


def run_bench(config: RunConfig) -> list[Figures]:
    """Runs the whole bench. Writes `bench*.json` and charts, prints the tables, and returns the rows of all workloads."""
    out = Path(config.logger.log_dir)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_LOGS
    if config.bench.deepen > 1:
        config = with_deep_policy(config, out / "deep_policy")
    report = BenchReport(config, console)
    measure_rows(config, report)
    if config.bench.acceptance_k and config.policy.generation.specrollout.model_drafter is not None:
        report.acceptance(measure_acceptance_table(config))
    if config.bench.useless_batches:
        report.useless(measure_useless_drafters(config, console))
    console.print(f"written to {out}/bench*.json and {out}/bench*.png")
    return report.rows


def measure_rows(config: RunConfig, report: BenchReport) -> None:
    """Plays all rounds of all workloads and constant batches, with one group of rows after another.

    Passes the measurements of a workload to `report` when the last group has played it.
    """
    bench = config.bench
    workloads = config.workloads
    draining: dict[str, list[list[Entrant]]] = {name: [] for name in workloads}
    constant: dict[int, list[list[Entrant]]] = {batch: [] for batch in bench.constant_batches}
    groups = row_groups(bench_rows(config), bench.rows_at_a_time)
    num_rounds = WARM_UP_ROUNDS + bench.num_rounds
    total = len(groups) * (len(workloads) * num_rounds + len(bench.constant_batches) * bench.num_rounds)
    with counted(report.console, total) as count:
        for number, rows in enumerate(groups, start=1):
            engines = f"engines of group {number} of {len(groups)}"
            with started(config, rows) as entrants:
                for name, data in workloads.items():
                    rounds = itertools.islice(_requests_of(replace(config, data=data)), num_rounds)
                    for index, requests in enumerate(rounds):
                        play_round(entrants, requests, keep=index >= WARM_UP_ROUNDS)
                        count(f"round of {name}, {engines}")
                    draining[name].append([entrant.take() for entrant in entrants])
                    if rows is groups[-1]:
                        report.draining(name, draining[name])
                stream = request_stream(config)
                for batch in bench.constant_batches:
                    for _ in range(bench.num_rounds):
                        play_round(entrants, take_batch(stream, batch), keep=True, at_a_time=batch)
                        count(f"round of a constant batch of {batch}, {engines}")
                    constant[batch].append([entrant.take() for entrant in entrants])
    if constant:
        report.constant(constant)


@contextmanager
def counted(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Shows progress on the console. Yields a function that counts one of `total` pieces of work as done, given its name.

    A terminal shows a bar, and a log gets a line for each piece of work.
    """
    with progress_bar(console) as bar:
        task = bar.add_task("rounds", total=total)

        def count(what: str) -> None:
            bar.update(task, advance=1, description=what)
            if not console.is_terminal:
                console.print(f"{bar.tasks[0].completed:.0f} of {total}: {what}", markup=False)

        yield count


def constant_rows(constant: Mapping[int, Sequence[Sequence[Entrant]]]) -> list[Figures]:
    """Returns the figures of each row of the bench at each size of a constant batch.

    Only tokens made while the batch was nearly full count.
    """
    found = []
    for batch, groups in constant.items():
        for row in figures_of(groups):
            full = row["by_running"][bin_of(batch)]
            kept = {name: row[name] for name in ("mode", "kind", "tokens_equal", "tokens_total", "acceptance_length")}
            found.append({"batch": batch, **kept, **{n: full[n] for n in ("tokens_per_s", "speedup_vs_plain")}})
    return found


def measure_useless_drafters(config: RunConfig, console: Console) -> list[Figures]:
    """Measures what speculation costs where it cannot pay.

    Compares plain decoding with a drafter that is always wrong. Returns a row for each of the config's batch sizes.
    """
    plain = plain_row(config)
    block = replace(plain.generation.specrollout, drafters=(RandomDrafterConfig(),), budget=BudgetConfig("auto"))
    useless = BenchRow("useless", OURS, replace(plain.generation, specrollout=block))
    rows = []
    batches = config.bench.useless_batches
    with started(config, [plain, useless]) as entrants, counted(console, len(batches)) as count:
        for batch in batches:
            num_rounds = config.bench.num_rounds * (USELESS_ROUNDS_OF_FEW if batch < FEW else USELESS_ROUNDS)
            for index, prompts in enumerate(itertools.islice(_requests_of(config), WARM_UP_ROUNDS + num_rounds)):
                requests = [prompts[i % len(prompts)] for i in range(batch)]
                play_round(entrants, requests, keep=index >= WARM_UP_ROUNDS)
            slow, fast = (entrant.take() for entrant in entrants)
            row = row_figures(fast, slow)
            row["host_share"] = host_share([r.stats for r in fast.rounds])
            rows.append({"batch": batch, **row})
            count(f"drafters that are always wrong, {batch} requests")
    return rows


def _requests_of(config: RunConfig) -> Iterator[list[RolloutRequest]]:
    """Yields the requests of each round, without end."""
    task = build_task(config.data, load_tokenizer(Path(config.policy.model_name)))
    for index in itertools.count():
        yield step_prompts(config, index, task).requests


def request_stream(config: RunConfig) -> Iterator[RolloutRequest]:
    """Yields requests for constant batches without end. No request is repeated, because drafters remember its text."""
    grpo = replace(config.grpo, seed=config.grpo.seed + 1)  # Other prompts than the rounds of a workload.
    return itertools.chain.from_iterable(_requests_of(replace(config, grpo=grpo)))


def take_batch(stream: Iterator[RolloutRequest], batch: int) -> list[RolloutRequest]:
    """Returns the requests of the next round in which `batch` requests run at a time.

    The round has `batch` times `FULL_BATCHES` requests, but at least `FEWEST_REQUESTS`.
    """
    return list(itertools.islice(stream, max(FULL_BATCHES * batch, FEWEST_REQUESTS)))


def _set_aside(folder: Path) -> None:
    """Renames the files of an earlier bench.

    For example, "bench.json" becomes "bench.1.json", or gets the next free number.
    """
    for path in [p for p in folder.glob("bench*") if p.suffix in (".json", ".png", ".svg") and "." not in p.stem]:
        numbered = (path.with_suffix(f".{n}{path.suffix}") for n in itertools.count(1))
        path.rename(next(p for p in numbered if not p.exists()))
