# SPDX-License-Identifier: Apache-2.0
"""The command `specrollout-lab simulate`, which predicts the time of a training step and the gain of each feature.

Needs no torch.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lab.cli.simulated_config import of_local, of_nemo_rl
from lab.cli.tables import new_table
from lab.local.run_config import read_run_config
from lab.simulation.compare import Comparison, StepResult, compare
from lab.simulation.data_sheets import DEVICES, device_named
from lab.simulation.papers import account
from lab.simulation.run_ahead import RollingResult
from lab.simulation.scenario import Scenario, read_scenario, shipped
from lab.simulation.workload import fitted, read_trace
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_tree import runtime_of
from nemo_specrollout.config.strict import ConfigError, build, nearest
from nemo_specrollout.storage.files import write_atomically

LIST = "list"
"""The value of SCENARIO with which the command lists the scenarios."""
PAPERS = "papers"
"""The value of SCENARIO with which the command compares the simulator with the figures of two papers."""
_NUM_POINTS = 200
"""The command writes a curve of the share of busy engines over time. This is the number of its points."""


def simulate(parsed: argparse.Namespace) -> int:
    """Prints the predicted gain of each feature, and writes it to the folder of `--out`. Returns 0. Raises ConfigError."""
    console = log_console()
    if parsed.config in (LIST, PAPERS):
        _refuse_more(parsed, parsed.config, "trace", "out", "device", "profile")
        if parsed.overrides:
            raise ConfigError(f"override {parsed.overrides[0]!r}: `simulate {parsed.config}` takes none; remove it")
    if parsed.config == LIST:
        for name in shipped():
            console.print(f"{name}: {read_scenario(name, []).title}")
        return 0
    if parsed.config == PAPERS:
        console.print(_account(boxed=console.is_terminal))
        return 0
    comparison = compare(*_with_trace(_scenario(parsed), parsed.trace))
    for line in _lines(comparison):
        console.print(line)
    console.print(comparison_table(comparison, boxed=console.is_terminal))
    if parsed.out is not None:
        _write(parsed.out, comparison)
        console.print(f"written to {parsed.out}: simulation.json, simulation.png")
    return 0


def _scenario(parsed: argparse.Namespace) -> Scenario:
    if parsed.config in shipped():
        _refuse_more(parsed, parsed.config, "device", "profile")
        return read_scenario(parsed.config, parsed.overrides)
    path = Path(parsed.config)
    if not path.is_file():
        known = nearest(parsed.config, [*shipped(), LIST, PAPERS])
        raise ConfigError(f"SCENARIO: {parsed.config!r} is neither a file nor one that ships{known}")
    tree = load_config(path, parsed.overrides)
    if "policy" not in tree:
        _refuse_more(parsed, str(path), "device", "profile")
        return build(Scenario, tree, "")
    return of_run(tree, parsed)


def _refuse_more(parsed: argparse.Namespace, subject: str, *flags: str) -> None:
    """Raises ConfigError if one of `flags` is given, because these flags have no meaning for the subject of the command."""
    for flag in flags:
        if (value := getattr(parsed, flag)) is not None:
            raise ConfigError(f"--{flag}: {str(value)!r} has no meaning for `simulate {subject}`; remove it")


def of_run(tree: dict[str, Any], parsed: argparse.Namespace) -> Scenario:
    """Returns the scenario of a run's config.

    Raises ConfigError if the flag `--device` is missing for a config of NeMo-RL, or `--profile` for a config of a local run.
    """
    if runtime_of(tree) == "nemo_rl":
        if parsed.device is None:
            raise ConfigError(
                f"--device: missing; a config does not name the GPUs: give one of {', '.join(sorted(DEVICES))}"
            )
        return of_nemo_rl(tree, device_named(parsed.device, "--device").name)
    if parsed.profile is None:
        raise ConfigError("--profile: missing; for this machine, name a file that `specrollout-lab profile` wrote")
    return of_local(read_run_config(tree)[0], tree, parsed.profile)


def _with_trace(scenario: Scenario, trace: Path | None) -> tuple[Scenario, list[np.ndarray]]:
    """Returns the scenario and the response lengths of a trace, which is a file of measured lengths.

    The lengths that the simulated straggler policy expects are fitted to the trace. Without a trace, the scenario stays as it
    is.
    """
    if trace is None:
        return scenario, []
    lengths = read_trace(trace, "--trace")
    every = np.concatenate([step.ravel() for step in lengths])
    return replace(scenario, lengths=fitted(every, int(every.max()))), lengths


def _account(boxed: bool) -> Table:
    """Returns a table that compares the figures of two papers with those of the simulator."""
    names = ("table", "cell", "paper", "simulated", "error", "role")
    rows = []
    for cell in account():
        unit = "" if cell.unit == "tokens" else cell.unit
        paper = f"{cell.low:g}" if cell.low == cell.high else f"{cell.low:g}-{cell.high:g}"
        simulated = f"{cell.predicted:.3g}{unit}"
        rows.append((cell.table, cell.name, paper + unit, simulated, f"{cell.error:+.0%}", cell.role))
    return new_table(names, boxed=boxed, left=("table", "cell", "role"), rows=rows)


def _lines(comparison: Comparison) -> list[str]:
    scenario = comparison.scenario
    best = comparison.best
    cluster = scenario.cluster
    notes = {"source": scenario.source, "calibrated": scenario.calibrated_from}
    return [
        f"{scenario.title}: {best.variant} {comparison.speedup(best):.2f}x plain, {best.step_s:.1f} s instead of "
        f"{comparison.plain.step_s:.1f} (a prediction)",
        f"{len(comparison.lengths):,} requests, {comparison.lengths.sum():,} tokens, {cluster.num_gpus} x {cluster.device}, "
        f"costs of kind {scenario.costs.kind}",
        *(f"{name}: {text}" for name, text in notes.items() if text),
        *(_early_line(step) for step in comparison.steps if isinstance(step, RollingResult) and step.early.steps),
    ]


def _early_line(step: RollingResult) -> str:
    early = step.early
    return (
        f"{step.variant}: {early.steps:.1f} steps in flight, {early.ready:.0%} of a step's tokens are there when it begins, "
        f"an update leaves {early.kept:.1%}, own requests take {early.delay:+.0%}"
    )


def comparison_table(comparison: Comparison, boxed: bool) -> Table:
    """Returns a table with the seconds of a training step and of its parts, for each variant of the scenario.

    `generate` is the time for which training waits. `idle` is the share of a step in which GPUs idle. `peak` is the share of
    the engines' peak FLOPs that the response tokens need.
    """
    names = (
        "variant",
        "step s",
        "speedup",
        "rollout s",
        "speedup",
        "generate",
        "log-prob",
        "train",
        "other",
        "idle",
        "peak",
        "moves",
        "races",
    )
    rows = [_row(comparison, step) for step in comparison.steps]
    return new_table(names, boxed=boxed, left=("variant",), rows=rows)


def _row(comparison: Comparison, step: StepResult) -> tuple[str, ...]:
    parts = step.parts_s
    peak = comparison.peak_share(step)
    main_parts = [parts[name] for name in ("generate", "log-prob", "train")]
    return (
        step.variant,
        f"{step.step_s:.1f}",
        f"{comparison.speedup(step):.2f}x",
        f"{step.rollout_s:.1f}",
        f"{comparison.rollout_speedup(step):.2f}x",
        *(f"{seconds:.1f}" for seconds in main_parts),
        f"{step.step_s - sum(main_parts):.1f}",
        f"{step.idle_share:.0%}",
        "-" if peak is None else f"{peak:.1%}",
        f"{step.moves:.0f}" if isinstance(step, RollingResult) else str(step.rollout.num_moves),
        str(step.rollout.num_races),
    )


def _write(folder: Path, comparison: Comparison) -> None:
    from lab.simulation.picture import picture

    record = {
        "title": comparison.scenario.title,
        "num_requests": len(comparison.lengths),
        "num_tokens": int(comparison.lengths.sum()),
        "variants": [_variant(comparison, step) for step in comparison.steps],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "simulation.json", json.dumps(record, indent=1) + "\n")
        write_atomically(folder / "simulation.png", picture(comparison))
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written to ({type(error).__name__}); choose another") from error


def _variant(comparison: Comparison, step: StepResult) -> dict[str, object]:
    at_s, share = step.rollout.running_share(_NUM_POINTS)
    return {
        "variant": step.variant,
        "step_s": step.step_s,
        "parts_s": step.parts_s,
        "rollout_s": step.rollout_s,
        "step_speedup": comparison.speedup(step),
        "rollout_speedup": comparison.rollout_speedup(step),
        "idle_share": step.idle_share,
        "peak_share": comparison.peak_share(step),
        "num_moves": step.moves if isinstance(step, RollingResult) else step.rollout.num_moves,
        "num_races": step.rollout.num_races,
        "num_wasted_tokens": step.rollout.num_wasted_tokens,
        "early": asdict(step.early) if isinstance(step, RollingResult) else None,
        "use": {"at_s": at_s.round(3).tolist(), "busy_share": share.round(4).tolist()},
    }
