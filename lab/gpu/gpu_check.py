# SPDX-License-Identifier: Apache-2.0
"""Checks kernels, tokens, speed, waits of the host, and memory on a GPU. Takes at most eleven minutes on an H100 or H200.

    python -m lab.gpu.gpu_check [ITEM ...] [--out FOLDER] [--seconds 660]

The check consists of items. The most important ones run first, each in a process of its own, so a failed item does not affect
the others. An item that would not fit in the time left is skipped. Figures are written to FOLDER/gpu_check.json, and logs to
FOLDER/gpu_check. `--rehearse` runs all code on a CPU at tiny sizes. Its figures mean nothing. `--page` runs no item. It writes
the figures of FOLDER/gpu_check.json, or of the files that it names, to docs/benchmarks/gpu.md.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.gpu import gpu_report, machine
from lab.gpu.items import ITEMS, Item, reason_to_skip
from lab.gpu.machine import Machine
from nemo_specrollout.config.strict import nearest
from nemo_specrollout.storage.files import write_atomically

EXIT_CANNOT = 2
"""Exit status if this machine cannot run all items, or if an item is unknown."""
MACHINE = "machine"
"""Name of the first process, which looks at the machine."""
SECONDS = 660.0
REHEARSAL_SECONDS = 600.0
"""Seconds that each item of a rehearsal may take."""
PATIENCE = 20.0
"""Seconds without output after which a line says that an item is still running."""
QUIET = {"VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
"""Environment variables of each item. With them an item's log shows vLLM's warnings."""
INTERPRETED = {"TRITON_INTERPRET": "1"}
"""Environment variables of an item whose kernels are interpreted on a CPU."""
_LOG_LINES = 25


def main(arguments: list[str] | None = None) -> int:
    """Runs the check.

    Returns the exit status, which is 1 if an item failed, 2 if the machine kept items from running, else 0.
    """
    options = _parsed(arguments)
    until = time.monotonic() + options.seconds
    if options.here is not None:
        return _run_here(options)
    file = options.out / "gpu_check.json"
    if options.page is not None:
        return _write_page(options.page or [file])
    unknown = next((name for name in options.items if name not in ITEMS), None)
    if unknown is not None:
        return _refuse(f"There is no item {unknown!r}{nearest(unknown, ITEMS)}")
    (options.out / "gpu_check").mkdir(parents=True, exist_ok=True)
    found = Machine({}, float("inf")) if options.rehearse else _machine(options)
    if found.gpu_problem:
        return _refuse(f"{found.gpu_problem} --rehearse runs all code on a CPU.")
    report = gpu_report.Report(file, found.facts, options.rehearse)
    print(", ".join(f"{name} {value}" for name, value in found.facts.items()) or "rehearsal on a CPU", flush=True)
    for name, result in _results(options, found, until):
        report.add(name, result)
        shown = [f"{name}: {result['outcome']}", *map(gpu_report.as_text, gpu_report.tables(result)), ""]
        print("\n".join(shown), flush=True)
    chosen = {name: report.items[name] for name in options.items}
    print(gpu_report.as_text(gpu_report.summary(report.items)), f"\nwritten to {file}")
    if any(result["outcome"] in ("failed", "stopped") for result in chosen.values()):
        return 1
    return _refuse(found.vllm_problem) if found.vllm_problem else 0


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options of the command line. `here` is the name of the item that this process has to run itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lines = [f"{name} ({item.seconds:g} s): {item.purpose}" for name, item in ITEMS.items()]
    parser.epilog = "\n".join(["items:", *(f"  {line}" for line in lines)])
    parser.add_argument("items", nargs="*", metavar="ITEM", help="items by name; without any, all of them")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER", help="default: results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for all items, default {SECONDS:g}")
    parser.add_argument("--rehearse", action="store_true", help="run all code on this CPU, at tiny sizes")
    parser.add_argument(
        "--page", nargs="*", type=Path, metavar="JSON", help="write the page from these files, and run nothing"
    )
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    parsed.items = list(dict.fromkeys(parsed.items)) or list(ITEMS)
    return parsed


def _write_page(files: list[Path]) -> int:
    try:
        gpu_report.write_page(gpu_report.merged(files))
    except ValueError as error:
        return _refuse(f"--page: {error}.")
    return 0


def _refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return EXIT_CANNOT


def _machine(options: argparse.Namespace) -> Machine:
    """Returns what a separate process finds out about the machine.

    A CUDA context in this process would take GPU memory for as long as the check runs.
    """
    look = Item("machine.look", 60.0, "the machine")
    result = _run_apart(MACHINE, look, options, 180.0)
    if "tables" not in result:
        return Machine({}, gpu_problem=f"Looking for a GPU {result['outcome']}: {result.get('reason', '')}.")
    return Machine(**result["tables"][""][MACHINE])


def _results(options: argparse.Namespace, found: Machine, until: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs the items, and yields the result of each as soon as it is known. No item runs beyond the time `until`."""
    for name in options.items:
        item = ITEMS[name]
        left_s = until - time.monotonic()
        reason = item.not_on_cpu if options.rehearse else reason_to_skip(item, left_s, found)
        if reason:
            yield name, {"outcome": "skipped", "reason": reason}
            continue
        print(f"{name}: {item.purpose}; about {item.seconds:g} s", flush=True)
        print("".join(f"  predicted: {text}\n" for text in item.predictions), end="", flush=True)
        most_s = REHEARSAL_SECONDS if options.rehearse else min(left_s, 2 * item.seconds + 60.0)
        yield name, _run_apart(name, item, options, most_s)


def _run_apart(name: str, item: Item, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Runs an item in a process of its own, which is killed after `limit_s` seconds.

    Returns the item's figures, outcome and seconds, and the end of its log if it failed.
    """
    file, log = (options.out / "gpu_check" / f"{name}.{kind}" for kind in ("json", "log"))
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "lab.gpu.gpu_check", "--here", name, "--out", str(file)]
    planned_s = limit_s if options.rehearse else min(limit_s, 1.25 * item.seconds)
    command += ["--rehearse"] * options.rehearse + ["--seconds", str(planned_s)]
    environment = os.environ | QUIET | dict(item.environment)
    if options.rehearse and not item.needs_vllm:
        environment |= INTERPRETED
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            _tell_progress(process, file, started, limit_s)
            code = process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    result = {"outcome": {0: "done", None: "stopped"}.get(code, "failed"), "seconds": time.monotonic() - started}
    result |= gpu_report.read(file) or {}
    if item.predictions:
        result["predictions"] = list(item.predictions)
    if code is None:
        result["reason"] = f"not done after {limit_s:.0f} s"
    elif code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        result["reason"] = "" if result.get("problems") else [f"exit {code}", *filter(str.strip, lines)][-1]
        print("\n".join(f"  | {line}" for line in lines), flush=True)
    return result


def _tell_progress(process: "subprocess.Popen[bytes]", file: Path, started: float, limit_s: float) -> None:
    """Prints the names of new rows of figures until the process ends or its time is over."""
    shown: set[tuple[str, str]] = set()
    told = started
    while process.poll() is None and time.monotonic() - started < limit_s:
        time.sleep(0.2)
        now = time.monotonic()
        known = (gpu_report.read(file) or {}).get("tables", {})
        new = [(title, name) for title, rows in known.items() for name in rows if (title, name) not in shown]
        if new or now - told > PATIENCE:
            print(f"  {now - started:4.0f} s  {'; '.join(name for _, name in new)[:110] or '...'}", flush=True)
            shown = shown | set(new)
            told = now


def _run_here(options: argparse.Namespace) -> int:
    """Runs an item in this process. Returns 1 if it raised an error or found a problem, else 0."""
    try:
        if options.here == MACHINE:
            tables = {"": {MACHINE: machine.look()._asdict()}}
            write_atomically(options.out, json.dumps({"tables": tables}))
            return 0
        from lab.gpu.gpu_stage import Findings

        module, function = ITEMS[options.here].function.split(".")
        findings = Findings(options.out, options.rehearse, options.seconds)
        getattr(importlib.import_module(f"lab.gpu.{module}"), function)(findings)
    except Exception:
        traceback.print_exc()
        return 1
    print("\n".join(findings.problems))
    return int(bool(findings.problems))


if __name__ == "__main__":
    sys.exit(main())
