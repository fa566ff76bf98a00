# SPDX-License-Identifier: Apache-2.0
"""Measures how much memory this package's tensors take in an engine, by the number of request slots.

`python -m lab.bench.memory_bench MODEL [--slots 32,128,256,1024] [--length 8192]` prints a table. Each engine is a process of
its own. The figures count the tensors that this package's code has created and that still exist when the engine has started.
On a GPU almost all of them are in its memory, and some small ones are on the host. What vLLM allocates for its own part of
speculation, such as the weights of a draft head or CUDA graphs, is not counted.
"""

import argparse
import json
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lab.bench.bench_tables import new_table
from lab.bench.own_process import figures_of_process
from nemo_specrollout.config.block import LearnedConfig, RunAheadConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import NgramDrafterConfig, SuffixDrafterConfig
from nemo_specrollout.generation.engine.arguments import set_process_environment

TEXT = (SuffixDrafterConfig(), NgramDrafterConfig())
WAYS = {
    "no drafters": SpecrolloutConfig(drafters=()),
    "suffix, ngram and history (the default)": SpecrolloutConfig(drafters=TEXT),
    "the same with run_ahead and 3 branches": SpecrolloutConfig(drafters=TEXT, run_ahead=RunAheadConfig()),
}
CREATORS = (
    "arange", "empty", "empty_like", "from_numpy", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like",
)  # fmt: skip
OWN = "/nemo_specrollout/"


def measure(way: str, model: Path, num_slots: int, length: int) -> dict[str, float]:
    """Starts an engine in this process. Returns the MiB of this package's tensors by the subpackage that created them."""
    held: list[tuple[weakref.ref[torch.Tensor], str]] = []
    for name in CREATORS:
        setattr(torch, name, _noted(getattr(torch, name), held))
    set_process_environment()
    from lab.gpu.gpu_stage import start_engine

    kwargs: dict[str, Any] = {"max_num_seqs": num_slots, "kv_cache_memory_bytes": 3 << 29, "load_format": "dummy"}
    with tempfile.TemporaryDirectory() as folder:
        block = replace(WAYS[way], learned=LearnedConfig(folder=folder))
        engine = start_engine(model, block, eager=True, length=length, **kwargs)
        totals = _held_mib(held)
        engine.close()
    return totals


def _held_mib(held: Sequence[tuple["weakref.ref[torch.Tensor]", str]]) -> dict[str, float]:
    """Returns the MiB of those tensors in `held` that still exist, by the subpackage that created them."""
    totals: dict[str, float] = {}
    for reference, package in held:
        tensor = reference()
        if tensor is not None:
            totals[package] = totals.get(package, 0.0) + tensor.untyped_storage().nbytes() / (1 << 20)
    return totals


def _noted(create: Callable[..., torch.Tensor], held: list[Any]) -> Callable[..., torch.Tensor]:
    """Returns a function like `create` that also adds to `held` a weak reference to each tensor which this package creates."""

    def created(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = create(*args, **kwargs)
        callers = [frame.f_code.co_filename for frame in (sys._getframe(1), sys._getframe(2))]
        if own := next((caller for caller in callers if OWN in caller), None):
            held.append((weakref.ref(tensor), own.rpartition(OWN)[2].partition("/")[0]))
        return tensor

    return created


def main() -> None:
    """Prints the table. With `--way`, prints the figures of one engine as JSON instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a policy; its weights are not read")
    parser.add_argument("--slots", default="32,128,256,1024", help="values of max_num_seqs, separated by commas")
    parser.add_argument("--length", type=int, default=8192, help="max_model_len, in tokens")
    parser.add_argument("--way", choices=WAYS, help="measure this one alone, and print JSON")
    parsed = parser.parse_args()
    slots = [int(number) for number in parsed.slots.split(",")]
    if parsed.way is not None:
        print(json.dumps(measure(parsed.way, parsed.model, slots[0], parsed.length)))
        return
    table = new_table(f"MiB of this package's tensors in an engine, by max_num_seqs; max_model_len {parsed.length}")
    for name in ("", *map(str, slots)):
        table.add_column(name, justify="right" if name else "left")
    console = Console(highlight=False)
    with console.status("starting engines"):
        for way in WAYS:
            options = (str(parsed.model), "--way", way, "--length", str(parsed.length), "--slots")
            figures = [figures_of_process(__spec__.name, *options, str(number)) for number in slots]
            table.add_row(way, *(f"{sum(by_package.values()):.1f}" for by_package in figures))
    console.print(table)


if __name__ == "__main__":
    main()
