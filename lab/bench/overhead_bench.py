# SPDX-License-Identifier: Apache-2.0
"""Measures what the block costs in start-up time, in memory, and in each engine step by number of requests.

`python -m lab.bench.overhead_bench [--batches 64,256,1024]` prints a table. Each way runs in a process of its own. On a CPU
our part of an engine step includes the look-up and the choice of drafts. With a GPU the device does both, so the host's part
in the table leaves them out.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lab.bench.bench_tables import new_table
from lab.bench.own_process import figures_of_process
from lab.vllm_on_cpu.own_kernels import step as own_kernels
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.generation.engine.arguments import set_process_environment

NUM_DRAFTS, LENGTH, SAMPLES = 3, 24, 8
WAYS: dict[str, tuple[str, ...] | None] = {
    "stock vLLM": None,
    "no drafters": (),
    "suffix and ngram": ("suffix", "ngram"),
    "eagle3": ("eagle3",),
    "all three": ("suffix", "ngram", "eagle3"),
}


def measure(way: str, batches: Sequence[int]) -> dict[str, float]:
    """Returns the figures of one way, measured in this process.

    `start_s` is the seconds of starting, and `memory_mb` the memory in MB. For each batch size there are three medians over
    decode steps, in milliseconds. They are the time of the whole step, the time of our part of the step, and the time that our
    part takes on the host. Every request has drafts in every step.
    """
    set_process_environment()
    kernel_seconds = _timed_kernels()
    from lab.gpu.gpu_stage import POLICY, STOCK, block, start_engine, task_requests

    drafters = WAYS[way]
    before_mb = _memory_mb()
    started = time.perf_counter()
    specrollout = STOCK if drafters is None else block(*drafters, budget=BudgetConfig("fixed", k=NUM_DRAFTS))
    engine = start_engine(POLICY, specrollout, eager=True, max_num_seqs=max(batches), kv_cache_memory_bytes=1 << 30)
    figures = {"start_s": time.perf_counter() - started, "memory_mb": _memory_mb() - before_mb}
    for batch in batches if drafters is not None else ():
        requests = [replace(r, exact_length=LENGTH) for r in task_requests(-(-batch // SAMPLES), SAMPLES)[:batch]]
        engine.generate(requests)
        before = engine.counters()
        kernel_seconds.clear()
        engine.generate(requests)
        after = engine.stats(before.num_steps) if before else None
        assert after is not None
        column = after.trace.column
        is_decode = (column("is_decode") > 0) & (column("num_requests") == batch)
        figures[f"step_ms_{batch}"] = 1e3 * float(np.median(column("seconds")[is_decode]))
        ours_s = column("host_s")
        on_device_s = np.array(kernel_seconds or np.zeros(len(is_decode)))
        figures[f"ours_ms_{batch}"] = 1e3 * float(np.median(ours_s[is_decode]))
        figures[f"host_ms_{batch}"] = 1e3 * float(np.median((ours_s - on_device_s)[is_decode]))
    return figures


def _timed_kernels() -> list[float]:
    """Makes the draft board's kernels on a CPU measure their time.

    Returns a list that gets the seconds of each engine step.
    """
    observe = own_kernels.observe
    choose = own_kernels.choose
    step_s: list[float] = []
    observed_s = 0.0

    def timed_observe(*arguments: Any) -> None:
        nonlocal observed_s
        started = time.perf_counter()
        observe(*arguments)
        observed_s = time.perf_counter() - started

    def timed_choose(*arguments: Any) -> None:
        started = time.perf_counter()
        choose(*arguments)
        step_s.append(observed_s + time.perf_counter() - started)

    own_kernels.observe, own_kernels.choose = timed_observe, timed_choose  # type: ignore[assignment]
    return step_s


def _memory_mb() -> float:
    """Returns the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    """Prints the table. With `--way`, prints the figures of one way as JSON instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="64,256,1024", help="numbers of requests, separated by commas")
    parser.add_argument("--way", choices=WAYS, help="measure this one alone, and print JSON")
    parsed = parser.parse_args()
    batches = [int(batch) for batch in parsed.batches.split(",")]
    if parsed.way is not None:
        print(json.dumps(measure(parsed.way, batches)))
        return
    console = Console(highlight=False)
    with console.status("measuring") as status:
        rows: dict[str, dict[str, float]] = {}
        for way in [*WAYS, *WAYS]:  # a process is slow to start where the machine has not read its files yet
            status.update(way)
            figures = figures_of_process(__spec__.name, "--way", way, "--batches", parsed.batches)
            rows[way] = {name: min(value, rows.get(way, figures)[name]) for name, value in figures.items()}
    table = new_table("what the block costs; ms of a decode step, of our part, and of our host work")
    for name in ("", "start, s", "memory, MB", *(f"{batch} requests" for batch in batches)):
        table.add_column(name, justify="right" if name else "left")
    for way, figures in rows.items():
        names = [[f"{part}_ms_{b}" for part in ("step", "ours", "host")] for b in batches]
        steps = [", ".join(f"{figures[name]:.2f}" for name in of_batch if name in figures) or "-" for of_batch in names]
        table.add_row(way, f"{figures['start_s']:.1f}", f"{figures['memory_mb']:.0f}", *steps)
    console.print(table)


if __name__ == "__main__":
    main()
