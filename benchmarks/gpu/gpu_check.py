# SPDX-License-Identifier: Apache-2.0
"""Checks the package on a GPU, stage by stage: equality of tokens, speed, and waits between host and device.

    python -m benchmarks.gpu.gpu_check --out results/gpu.json [--quick] [--stages kernels correctness]

Each stage runs in a separate process, so a failed stage does not affect the others. The file gets each figure as soon as it
is known. `--rehearse` runs on a CPU what can run there, at tiny sizes. Its figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu_engines, gpu_kernels, gpu_speed
from benchmarks.gpu.gpu_stage import Extent, Stage
from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.versions import installed_versions

STAGES: dict[str, Callable[[Stage], None]] = {
    "kernels": gpu_kernels.check_kernels,
    "correctness": gpu_engines.check_tokens,
    "speed": gpu_speed.measure_speed,
    "bf16": gpu_engines.count_mismatches,
    "eagle3": gpu_engines.measure_head,
    "profile": gpu_speed.profile_steps,
    "sleep": gpu_engines.sleep_and_wake,
}
NEEDS_GPU = {
    "kernels": "Triton compiles kernels only for a GPU; tests/test_kernels.py interprets them",
    "profile": "torch's profiler counts launches and waits only for a GPU",
    "sleep": "vLLM's sleep mode needs a GPU",
}
"""Reasons why a rehearsal skips a stage."""
LIMIT_S = 1500
"""Seconds that a stage may take."""
EXIT_NO_GPU = 2
"""Exit status without a GPU."""
ON_GPU = {"VLLM_LOGGING_LEVEL": "WARNING"}
"""Environment of a stage on a GPU: the error of a failed stage then contains vLLM's warnings."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a stage failed, 2 without a GPU."""
    options = _parsed(arguments)
    if options.stage is not None:
        return _run_here(options.stage, options)
    device = _device()
    if device is None and options.extent is not Extent.REHEARSAL:
        print("There is no CUDA GPU here. Use --rehearse to run what can run on this CPU.", file=sys.stderr)
        return EXIT_NO_GPU
    report: dict[str, Any] = {
        "device": device,
        "versions": installed_versions(),
        "extent": options.extent.value,
        "stages": {},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.stages:
        report["stages"][name] = _skipped(name, options) or _run_apart(name, options)
        write_atomically(options.out, json.dumps(report, indent=1))
        print(f"{name}: {report['stages'][name]['outcome']}", flush=True)
    return int(any(stage["outcome"] == "failed" for stage in report["stages"].values()))


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options, with `extent` for its two flags. `stage` is the one to run in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all figures")
    parser.add_argument("--quick", action="store_true", help="use fewer and smaller engines: about ten minutes")
    parser.add_argument("--rehearse", action="store_true", help="run on this CPU what can run there")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=tuple(STAGES), metavar="STAGE")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    parsed.extent = Extent.REHEARSAL if parsed.rehearse else Extent.QUICK if parsed.quick else Extent.FULL
    return parsed


def _device() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _skipped(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    if options.extent is not Extent.REHEARSAL or name not in NEEDS_GPU:
        return None
    return {"outcome": "skipped", "reason": NEEDS_GPU[name]}


def _run_apart(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a stage in a separate process. Returns its figures, outcome, seconds and, if it failed, its error."""
    notes = options.out.with_name(f"{options.out.name}.{name}")
    notes.unlink(missing_ok=True)
    flags = {Extent.QUICK: ["--quick"], Extent.REHEARSAL: ["--rehearse"], Extent.FULL: []}[options.extent]
    command = [sys.executable, "-m", __spec__.name, "--stage", name, "--out", str(notes), *flags]
    environment = os.environ | ({} if options.extent is Extent.REHEARSAL else ON_GPU)
    started = time.perf_counter()
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        failure = None if run.returncode == 0 else f"exit status {run.returncode}\n{run.stderr[-6000:]}"
    except subprocess.TimeoutExpired:
        failure = f"not done after {LIMIT_S} s"
    figures = json.loads(notes.read_text()) if notes.is_file() else {}
    notes.unlink(missing_ok=True)
    result = {
        "outcome": "done" if failure is None else "failed",
        "seconds": round(time.perf_counter() - started, 1),
        **figures,
    }
    return result if failure is None else {**result, "error": failure}


def _run_here(name: str, options: argparse.Namespace) -> int:
    try:
        STAGES[name](Stage(options.out, options.extent))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
