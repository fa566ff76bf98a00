# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout ladder`: measures how fast each draft method decodes a task on this CPU, for a run to start from."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nemo_specrollout.cli.prepare import check_out, prepare, use_threads
from nemo_specrollout.cli.terminal import log_console, new_table, progress_bar
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.run_config import RunConfig
from nemo_specrollout.config.strict import ConfigError, nearest
from nemo_specrollout.remote.drafter.cost_profile import check_model
from nemo_specrollout.scheduling.racing.draft_ladder import ANY_TASK, LadderFile, Rung


def ladder(parsed: argparse.Namespace) -> int:
    """Measures the draft methods, writes the file and prints it. Raises ConfigError."""
    config = prepare(parsed.config, parsed.overrides).config
    use_threads(config.cluster.threads)
    task = _task(parsed.task, config.data.dataset_name)
    _check(config.policy.generation.specrollout, parsed)
    console = log_console()
    measured = _measure(config, task, parsed, console)
    write_atomically(parsed.out, measured.to_json())
    console.print(ladder_table(measured, boxed=console.is_terminal))
    console.print(f"written to {parsed.out}; `fastest_of_n.ladder` starts a run from it", markup=False)
    return 0


def _task(asked: str | None, known: str) -> str:
    if asked not in (None, known):
        raise ConfigError(f"--task: {asked!r} is no task of the config{nearest(str(asked), [known])}")
    return known


def _check(block: SpecrolloutConfig, parsed: argparse.Namespace) -> None:
    """Raises ConfigError for a block or flags that cannot be measured."""
    if not block.enabled or not block.drafters:
        raise ConfigError(f"{BLOCK_PATH}.drafters: none is in effect, so there is nothing to rank; name some")
    for drafter in block.drafters:
        if not isinstance(drafter, RemoteDrafterConfig) or not drafter.addresses:
            check_model(drafter)
    if parsed.rounds < 1:
        raise ConfigError(f"--rounds: {parsed.rounds}; measure at least one")
    if not 0.0 < parsed.seconds < float("inf"):
        raise ConfigError(f"--seconds: {parsed.seconds}; it must be above 0")
    check_out(parsed.out)


def _measure(config: RunConfig, task: str, parsed: argparse.Namespace, console: Console) -> LadderFile:
    from nemo_specrollout.local.ladder_bench import WARM_UP_ROUNDS, LadderBench, batches_up_to, methods_of
    from nemo_specrollout.local.step_rollout import load_tokenizer
    from nemo_specrollout.local.tasks import build_task

    methods, batches = methods_of(config.policy.generation.specrollout), batches_up_to(config.most_in_flight)
    tokenizer = load_tokenizer(Path(config.policy.model_name))
    console.print(f"{len(methods)} draft methods, an engine each; batch sizes {', '.join(map(str, batches))}")
    with progress_bar(console) as progress:
        num_slices = (WARM_UP_ROUNDS + parsed.rounds) * len(methods) * len(batches)
        bar = progress.add_task("starting engines", total=num_slices)
        bench = LadderBench(config, methods, batches, build_task(config.data, tokenizer))
        try:
            bench.measure(parsed.rounds, parsed.seconds, lambda done: progress.update(bar, advance=1, description=done))
        finally:
            bench.close()
    return bench.ladder(task)


def ladder_table(measured: LadderFile, boxed: bool) -> Table:
    """Returns tokens a second of each request by batch size, with the method's ranks alone and in the largest batch."""
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


def _ranks(rungs: list[Rung], place: int) -> dict[str, int]:
    """Returns the rank of each method, 1 for the fastest, at the batch size with index `place`."""
    order = sorted(rungs, key=lambda rung: -rung.tokens_per_s[place])
    return {rung.method: number for number, rung in enumerate(order, 1)}
