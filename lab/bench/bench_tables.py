# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of a bench, and sentences about figures that the tables do not show."""

import statistics
from collections.abc import Sequence

from rich import box
from rich.table import Table

from lab.bench.bench_figures import Figures, best_by_running, best_fixed, estimate_errors, host_shares
from lab.bench.bench_rounds import Entrant, named
from lab.bench.bench_rows import OURS, PLAIN
from lab.bench.running_bins import LABELS


def rollout_table(rows: Sequence[Figures]) -> Table:
    """Returns a table with the time, speed, acceptance length and equal tokens of whole rollouts, for each way to generate."""
    table = new_table("same requests, same noise, interleaved; vLLM's own speculation draws other samples")
    for name in ("mode", "seconds", "tokens/s", "steps", "tok/step", "speed over plain", "tokens equal"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for row in rows:
        spread = _spread(row["speedup_vs_plain"], row["speedup_low"], row["speedup_high"])
        equal = "-" if row["tokens_equal"] is None else f"{row['tokens_equal']}/{row['tokens_total']}"
        table.add_row(
            row["mode"],
            f"{row['seconds']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            str(row["engine_steps"]),
            f"{row['acceptance_length']:.2f}",
            spread,
            equal,
            style="bold" if row["mode"] == OURS else None,
        )
    return table


def running_table(rows: Sequence[Figures]) -> Table:
    """Returns a table with the speed of each way to generate, by number of running requests."""
    winners = best_by_running(rows)
    table = new_table("by running requests: tokens a second, speed over plain; * is the best there")
    table.add_column("mode", no_wrap=True)
    for label in winners:
        table.add_column(label, justify="right", no_wrap=True)
    for row in rows:
        cells = [_bin_cell(entry) for entry in row["by_running"] if entry["running"] in winners]
        table.add_row(row["mode"], *cells, style="bold" if row["mode"] == OURS else None)
    return table


def constant_table(rows: Sequence[Figures]) -> Table:
    """Returns the table of constant batches, with the speed over plain decoding of each way to generate, by batch size."""
    batches = sorted({row["batch"] for row in rows})
    table = new_table("constant batches: speed over plain; tokens equal, of all")
    table.add_column("mode", no_wrap=True)
    for name in (*map(str, batches), "tokens equal"):
        table.add_column(name, justify="right", no_wrap=True)
    for mode in dict.fromkeys(row["mode"] for row in rows):
        own = {row["batch"]: row for row in rows if row["mode"] == mode}
        cells = ["-" if (s := own[b]["speedup_vs_plain"]) is None else f"{s:.2f}" for b in batches]
        equal, total = ([own[b][name] for b in batches] for name in ("tokens_equal", "tokens_total"))
        said = "-" if None in equal else f"{sum(equal)}/{sum(total)}"
        table.add_row(mode, *cells, said, style="bold" if mode == OURS else None)
    return table


def useless_table(rows: Sequence[Figures]) -> Table:
    """Returns a table of the cost of drafters that are always wrong."""
    table = new_table("drafters that are always wrong")
    for name in ("batch", "speed over plain", "our host time", "tokens equal"):
        table.add_column(name, justify="right")
    for row in rows:
        spread = _spread(row["speedup_vs_plain"], row["speedup_low"], row["speedup_high"], digits=3)
        equal = f"{row['tokens_equal']} of {row['tokens_total']}"
        table.add_row(str(row["batch"]), spread, f"{row['host_share']:.2%}", equal)
    return table


def sentences(rows: Sequence[Figures], entrants: Sequence[Entrant]) -> list[str]:
    """Returns sentences about the fastest ways to generate, our host time, and our estimate of plain decoding's time.

    They name the fastest way for each number of running requests, and the fastest with a fixed method and number of drafts.
    """
    winners = (
        f"{label}: {row['mode']} {row['by_running'][LABELS.index(label)]['speedup_vs_plain']:.2f}"
        for label, row in best_by_running(rows).items()
    )
    found = [f"best by running requests, speed over plain: {'; '.join(winners)}"]
    ours = named(OURS, entrants)
    plain = named(PLAIN, entrants)
    best = best_fixed(rows)
    if best is not None:
        found.append(f"best fixed row, per token: {best['mode']}, {best['speedup_vs_plain']:.2f} over plain")
        for row in (r for r in rows if "best_fixed" in r):
            spread = _spread(row["over_best_fixed"], row["over_best_fixed_low"], row["over_best_fixed_high"])
            found.append(f"{row['mode']} over that: {spread}")
    if ours is not None and plain is not None:
        found += _sentences_on(ours, plain)
    return found


def _sentences_on(ours: Entrant, plain: Entrant) -> list[str]:
    """Returns sentences about our host time and about our estimate of plain decoding's time."""
    stats = [r.stats for r in ours.rounds]
    share, share_when_full, num_requests = host_shares(stats)
    line = f"our host time: {share:.2%} of the rollout"
    if share_when_full is not None:
        line += f", {share_when_full:.2%} of decode steps with {num_requests:.0f} or more requests"
    errors = estimate_errors(stats, [r.stats for r in plain.rounds])
    if not errors:
        return [line]
    estimate = (
        f"counterfactual: plain time as estimated while speculating is off by {statistics.median(errors):+.1%} "
        f"(median of {len(errors)} rounds, {min(errors):+.1%} to {max(errors):+.1%})"
    )
    return [line, estimate]


def new_table(title: str) -> Table:
    """Returns an empty table in the style of the bench."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _spread(median: float, low: float, high: float, digits: int = 2) -> str:
    return f"{median:.{digits}f} ({low:.2f}-{high:.2f})"


def _bin_cell(entry: Figures) -> str:
    if entry["speedup_vs_plain"] is None:
        return "-"
    return f"{entry['tokens_per_s']:.0f} {entry['speedup_vs_plain']:.2f}{'*' if entry['is_best'] else ' '}"
