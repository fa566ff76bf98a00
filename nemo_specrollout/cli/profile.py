# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout profile`: measures the seconds of verifying and drafting on this CPU, for `plan`."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from nemo_specrollout.cli.prepare import check_out, prepare
from nemo_specrollout.cli.terminal import progress_bar
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import this_machine
from nemo_specrollout.remote.drafter.cost_profile import BATCHES, MEASUREMENTS, ProfileSpec, draft_model_of
from nemo_specrollout.remote.verifier.json_child import JsonChild
from nemo_specrollout.scheduling.placement.cost_tables import CostCurve, CostTables

Measured = Mapping[str, Sequence[float]]


def profile(parsed: argparse.Namespace) -> int:
    """Measures in one process for each number of threads, and writes the file. Raises ConfigError."""
    config = prepare(parsed.config, parsed.overrides).config
    sizes, generation = _threads(parsed.threads), config.policy.generation
    drafter = draft_model_of(generation.specrollout)
    if parsed.steps < 1:
        raise ConfigError(f"--steps: {parsed.steps}; time at least one")
    check_out(parsed.out)
    spec = ProfileSpec(config.policy.model_name, generation, _batches(generation.vllm_kwargs), parsed.steps)
    console = Console(highlight=False, soft_wrap=True)
    measured = _measure_all(spec, sizes, console)
    tables = _tables(spec, drafter.model, measured)
    write_atomically(parsed.out, tables.to_json())
    _summarize(tables, console)
    console.print(f"written to {parsed.out}", markup=False)
    return 0


def _threads(written: str) -> list[int]:
    """Returns the numbers of threads that the user wrote; by default one, and two if there are two cores."""
    cores = os.cpu_count() or 1
    if not written:
        return [1, 2][:cores]
    if not all(part.isdecimal() and 1 <= int(part) <= cores for part in written.split(",")):
        raise ConfigError(f"--threads: {written!r}; write numbers from 1 to {cores}, the cores here, with commas")
    return sorted({int(part) for part in written.split(",")})


def _batches(vllm_kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the numbers of requests that the engine can take at a time."""
    most = int(vllm_kwargs.get("max_num_seqs", BATCHES[-1]))
    return tuple(b for b in BATCHES if b <= most)


def _measure_all(spec: ProfileSpec, sizes: Sequence[int], console: Console) -> dict[int, Measured]:
    with progress_bar(console) as progress:
        task = progress.add_task("starting", total=len(sizes) * len(MEASUREMENTS) * len(spec.batches))

        def measure(size: int) -> Measured:
            if not console.is_terminal:
                console.print(f"measuring with {_in_words(size)}")
            return _measure(
                spec, size, lambda what: progress.update(task, advance=1, description=f"{_in_words(size)}, {what}")
            )

        return {size: measure(size) for size in sizes}


def _measure(spec: ProfileSpec, num_threads: int, on_done: Callable[[str], object]) -> Measured:
    """Returns what a process with `num_threads` threads measures. Raises ConfigError with its last output if it fails."""
    environment = {f"{name}_NUM_THREADS": str(num_threads) for name in ("OMP", "NUMBA")}
    child = JsonChild("nemo_specrollout.remote.drafter.cost_profile", spec, environment)
    measured: Measured | None = None
    try:
        for report in child.reports():
            if isinstance(report, dict) and "measured" in report:
                measured = report["measured"]
                break
            if isinstance(report, dict) and "done" in report:
                on_done(report["done"])
    finally:
        child.end()
    if measured is None:
        raise ConfigError(f"cannot measure with {_in_words(num_threads)}: {child.last_words()}")
    return measured


def _tables(spec: ProfileSpec, draft_model: str, measured: Mapping[int, Measured]) -> CostTables:
    verify, draft, coupled = (
        tuple(CostCurve(size, spec.batches, tuple(measured[size][name])) for size in measured) for name in MEASUREMENTS
    )
    return CostTables(this_machine(), spec.policy, draft_model, verify, "thread", draft, coupled)


def _summarize(tables: CostTables, console: Console) -> None:
    """Prints a line for each measurement and number of threads."""
    for name, words in zip(MEASUREMENTS, ("verifying", "drafting", "drafting, coupled"), strict=True):
        for curve in getattr(tables, name):
            times = ", ".join(f"{count}: {1e3 * s:.1f}" for count, s in zip(curve.counts, curve.seconds, strict=True))
            console.print(f"{words}, {_in_words(curve.size)}, ms by requests: {times}", markup=False)


def _in_words(num_threads: int) -> str:
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"
