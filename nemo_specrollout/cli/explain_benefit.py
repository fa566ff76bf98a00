# SPDX-License-Identifier: Apache-2.0
"""What `nemo-specrollout explain` says of expected gains, of paces that were measured, and of how much is drafted."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from nemo_specrollout.cli.simulate import comparison_table
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.nemo_rl_traps import Tree, at
from nemo_specrollout.scheduling.racing.draft_ladder import ANY_TASK, PLAIN, LadderFile, methods_of
from nemo_specrollout.simulation.compare import Comparison
from nemo_specrollout.simulation.configured import Drafted, drafted
from nemo_specrollout.simulation.engine_setup import Fleet
from nemo_specrollout.simulation.scenario import Scenario


def show_benefit(expected: Comparison, parsed: argparse.Namespace, console: Console) -> None:
    """As configured against plain, and what the prediction rests on."""
    last, scenario = expected.steps[-1], expected.scenario
    basis = (
        f"times in {parsed.profile}"
        if scenario.costs.kind == "tables"
        else f"data sheet of {parsed.device}, a roofline"
    )
    lines = [
        f"as configured: rollout {expected.rollout_speedup(last):.2f}x plain, {last.rollout_s:.1f} s instead of "
        f"{expected.plain.rollout_s:.1f}; step {expected.speedup(last):.2f}x (a prediction)",
        f"rests on: {basis}; {scenario.source}",
    ]
    for line in lines:
        console.print(line, markup=False)
    console.print(comparison_table(expected, boxed=console.is_terminal))


def show_ladder(tree: Tree, block: SpecrolloutConfig, path: Path | None, console: Console) -> None:
    """What was measured of the methods that workers draft by, from the file that is named or the config's own."""
    field, tail = "--ladder", block.fastest_of_n
    if path is None and tail is not None and tail.ladder is not None:
        field, path = f"{BLOCK_PATH}.fastest_of_n.ladder", Path(tail.ladder)
    if path is None:
        return
    file = LadderFile.read(path, field)
    console.print(
        f"measured, {path}: {file.device}, policy {file.policy}; each request's pace over plain", markup=False
    )
    if file.policy != at(tree, "policy.model_name"):
        console.print("note: that is another policy than the config's", markup=False)
    for line in _ladder_lines(file, methods_of(block)):
        console.print(line, markup=False)


def _ladder_lines(file: LadderFile, methods: list[str]) -> Iterator[str]:
    """Of each method, by requests in its engine."""
    rungs = {
        rung.method: dict(zip(rung.batches, rung.tokens_per_s, strict=True))
        for rung in file.rungs
        if rung.task == ANY_TASK
    }
    plain = rungs.get(PLAIN, {})
    for method in methods:
        shared = [batch for batch in rungs.get(method, {}) if batch in plain]
        paces = ", ".join(f"{batch}: {rungs[method][batch] / plain[batch]:.2f}x" for batch in shared)
        yield f"{method}: {paces or 'not measured beside plain'}"


def show_window(scenario: Scenario, block: SpecrolloutConfig, console: Console) -> None:
    """Predicted: where drafters of their own would be, and how many draft tokens a request gets, by requests in its engine."""
    rows, placed = drafted(scenario, block), Fleet(scenario).placement
    if placed is not None:
        console.print(
            f"by the data sheet: {placed.in_words('GPU')}: {placed.speedup:.2f}x plain (estimate)", markup=False
        )
    if not rows:
        return
    console.print(
        f"window: at most {block.num_speculative_tokens} draft tokens; predicted of typical requests:", markup=False
    )
    console.print(_window_table(rows, boxed=console.is_terminal))


def _window_table(rows: list[Drafted], boxed: bool) -> Table:
    table = Table(box=box.ROUNDED if boxed else None, pad_edge=boxed)
    for name in ("requests in an engine", "drafts of each", "tokens a step", "over plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row.num_requests), f"{row.drafts:.1f}", f"{row.tokens:.2f}", f"{row.speedup:.2f}x")
    return table
