# SPDX-License-Identifier: Apache-2.0
"""Commands that measure on this CPU.

`bench` compares rollouts, `profile` times engine steps, and `ladder` ranks draft methods.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from lab.bench.cost_profile import BATCHES, MEASUREMENTS, ProfileSpec, check_model, draft_model_of
from lab.cli.prepare import prepare
from lab.cli.tables import new_table
from lab.local.json_child import JsonChild
from lab.local.run_config import RunConfig
from lab.placement.cost_tables import CostCurve, CostTables
from nemo_specrollout.cli.command_line import check_out, use_threads
from nemo_specrollout.cli.terminal import log_console, progress_bar
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig
from nemo_specrollout.config.strict import ConfigError, nearest, raise_first_mistake
from nemo_specrollout.installed.versions import this_machine
from nemo_specrollout.storage.files import write_atomically
from nemo_specrollout.stragglers.decisions.speed_table import ANY_TASK
from nemo_specrollout.stragglers.decisions.speed_table_file import SpeedRow, SpeedTableFile

Measured = Mapping[str, Sequence[float]]


def bench(parsed: argparse.Namespace) -> int:
    """Runs the bench. Writes `bench.json` and `bench.png` to `logger.log_dir`, prints a table, and returns 0.

    The rows of the table are ways of rolling out, which take turns.
    """
    prepared = prepare(parsed.config, parsed.overrides)
    use_threads(prepared.config.cluster.threads)
    from lab.bench.bench import run_bench

    run_bench(prepared.config)
    return 0


def profile(parsed: argparse.Namespace) -> int:
    """Measures the times of engine steps, writes them to the file of `--out`, and returns 0. Raises ConfigError.

    Each number of threads is measured in a process of its own.
    """
    config = prepare(parsed.config, parsed.overrides).config
    sizes = _threads(parsed.threads)
    generation = config.policy.generation
    drafter = draft_model_of(generation.specrollout)
    raise_first_mistake("", (parsed.steps < 1, "--steps", f"{parsed.steps}; time at least one"))
    check_out(parsed.out)
    most = int(generation.vllm_kwargs.get("max_num_seqs", BATCHES[-1]))
    batches = tuple(batch for batch in BATCHES if batch <= most)
    spec = ProfileSpec(config.policy.model_name, generation, batches, parsed.steps)
    console = log_console()
    measured = dict[int, Measured]()
    with progress_bar(console) as progress:
        bar = progress.add_task("starting", total=len(sizes) * len(MEASUREMENTS) * len(batches))
        for size in sizes:
            if not console.is_terminal:
                console.print(f"measuring with {_in_words(size)}")
            measured[size] = _times(spec, size, progress, bar)
    verify, draft, coupled = (
        tuple(CostCurve(size, batches, tuple(measured[size][name])) for size in sizes) for name in MEASUREMENTS
    )
    tables = CostTables(this_machine(), spec.policy, drafter.model, verify, "thread", draft, coupled)
    write_atomically(parsed.out, tables.to_json())
    for words, curves in (("verifying", verify), ("drafting", draft), ("drafting, coupled", coupled)):
        for curve in curves:
            times = ", ".join(f"{count}: {1e3 * s:.1f}" for count, s in zip(curve.counts, curve.seconds, strict=True))
            console.print(f"{words}, {_in_words(curve.size)}, ms by requests: {times}")
    console.print(f"written to {parsed.out}")
    return 0


def _threads(written: str) -> list[int]:
    """Returns the thread counts to measure, which the user has given in `written`.

    If `written` is empty, they are [1, 2], or [1] on a machine with one core. Raises ConfigError for a count above the number
    of cores.
    """
    cores = os.cpu_count() or 1
    if not written:
        return [1, 2][:cores]
    if not all(part.isdecimal() and 1 <= int(part) <= cores for part in written.split(",")):
        raise ConfigError(f"--threads: {written!r}; write numbers from 1 to {cores}, the cores here, with commas")
    return sorted({int(part) for part in written.split(",")})


def _times(spec: ProfileSpec, num_threads: int, progress: Progress, bar: TaskID) -> Measured:
    """Returns the times that a process with `num_threads` threads measures.

    Raises ConfigError if the process fails, and says why it ended.
    """
    environment = {f"{name}_NUM_THREADS": str(num_threads) for name in ("OMP", "NUMBA")}
    child = JsonChild("lab.bench.cost_profile", spec, environment)
    try:
        for report in child.reports():
            if isinstance(report, dict) and "measured" in report:
                return dict(report["measured"])
            if isinstance(report, dict) and "done" in report:
                progress.update(bar, advance=1, description=f"{_in_words(num_threads)}, {report['done']}")
    finally:
        child.end()
    raise ConfigError(f"cannot measure with {_in_words(num_threads)}: {child.last_words()}")


def _in_words(num_threads: int) -> str:
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"


def ladder(parsed: argparse.Namespace) -> int:
    """Measures how fast each draft method decodes. Writes the speeds to the file of `--out`, prints them, and returns 0.

    Raises ConfigError for a config or flags with which nothing can be measured.
    """
    config = prepare(parsed.config, parsed.overrides).config
    use_threads(config.cluster.threads)
    task = config.data.dataset_name
    console = log_console()
    _check_ladder(config.policy.generation.specrollout, task, parsed)
    measured = _ladder_of(config, parsed, console)
    write_atomically(parsed.out, measured.to_json())
    console.print(ladder_table(measured, boxed=console.is_terminal))
    console.print(f"written to {parsed.out}; `fastest_of_n.ladder` starts a run from it")
    return 0


def _check_ladder(block: SpecrolloutConfig, task: str, parsed: argparse.Namespace) -> None:
    """Raises ConfigError if the block or the flags make it impossible to measure draft methods."""
    has_drafters = block.enabled and block.drafters
    raise_first_mistake(
        "",
        (
            parsed.task not in (None, task),
            "--task",
            f"{parsed.task!r} is no task of the config{nearest(str(parsed.task), [task])}",
        ),
        (not has_drafters, f"{BLOCK_PATH}.drafters", "none is in effect, so there is nothing to rank; name some"),
        (parsed.rounds < 1, "--rounds", f"{parsed.rounds}; measure at least one"),
        (not 0.0 < parsed.seconds < float("inf"), "--seconds", f"{parsed.seconds}; it must be above 0"),
    )
    for drafter in block.drafters:
        if not isinstance(drafter, RemoteDrafterConfig) or not drafter.addresses:
            check_model(drafter)
    check_out(parsed.out)


def _ladder_of(config: RunConfig, parsed: argparse.Namespace, console: Console) -> SpeedTableFile:
    from lab.local.speed_table_bench import WARM_UP_ROUNDS, SpeedTableBench, batches_up_to, methods_to_measure
    from lab.local.step_rollout import load_tokenizer
    from lab.local.tasks import build_task

    methods = methods_to_measure(config.policy.generation.specrollout)
    batches = batches_up_to(config.most_in_flight)
    tokenizer = load_tokenizer(Path(config.policy.model_name))
    console.print(f"{len(methods)} draft methods, an engine each; batch sizes {', '.join(map(str, batches))}")
    with progress_bar(console) as progress:
        num_slices = (WARM_UP_ROUNDS + parsed.rounds) * len(methods) * len(batches)
        bar = progress.add_task("starting engines", total=num_slices)
        bench = SpeedTableBench(config, methods, batches, build_task(config.data, tokenizer))
        try:
            bench.measure(parsed.rounds, parsed.seconds, lambda done: progress.update(bar, advance=1, description=done))
        finally:
            bench.close()
    return bench.ladder(config.data.dataset_name)


def ladder_table(measured: SpeedTableFile, boxed: bool) -> Table:
    """Returns a table with each draft method's tokens per second of one request, by batch size.

    It also has the method's rank for a single request and its rank in the largest batch.
    """
    rungs = [rung for rung in measured.rungs if rung.task == ANY_TASK]
    batches = sorted({batch for rung in rungs for batch in rung.batches})
    method = "method, tokens/s at batch"
    names = (method, *map(str, batches), "accepted", "rank alone", "rank in largest")
    table = new_table(names, boxed=boxed, left=(method,))
    ranks = _ranks(rungs, 0), _ranks(rungs, -1)
    for rung in rungs:
        speeds = dict(zip(rung.batches, rung.tokens_per_s, strict=True))
        accepted = f"{rung.acceptance:.2f}" if rung.acceptance else "-"
        cells = (f"{speeds[batch]:.0f}" if batch in speeds else "-" for batch in batches)
        table.add_row(rung.method, *cells, accepted, *(str(rank[rung.method]) for rank in ranks))
    return table


def _ranks(rungs: list[SpeedRow], place: int) -> dict[str, int]:
    """Returns the rank of each draft method at the batch size with index `place`. The fastest has rank 1."""
    order = sorted(rungs, key=lambda rung: -rung.tokens_per_s[place])
    return {rung.method: number for number, rung in enumerate(order, 1)}
