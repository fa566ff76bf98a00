# SPDX-License-Identifier: Apache-2.0
"""Draws charts of benchmark figures, for example of speedups over plain decoding, and saves them as PNG and SVG."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from nemo_specrollout.reports.charts import DPI
from nemo_specrollout.reports.panels import BLUE, GREY, INK, PALE, RED, SILVER, STYLE, dark, drafter_colour, label_right
from nemo_specrollout.reports.records import Record, number, series


def bench_chart(rows: Sequence[Record], path: Path) -> None:
    """Saves a chart of the speedup over plain decoding of each row of a `bench.json`, as PNG and SVG.

    Both files get the name of `path`, but their own suffixes.
    """
    _save(path, (8.0, 0.9 + 0.3 * len(rows)), lambda figure: _draw_bench(figure.subplots(), rows))


def running_chart(rows: Sequence[Record], path: Path) -> None:
    """Saves a chart of the speedup over plain decoding by number of running requests, as PNG and SVG.

    `rows` are those of a `bench_constant.json`. Each of their modes gets a line.
    """
    _save(path, (8.0, 4.2), lambda figure: _draw_running(figure.subplots(), rows))


def throughput_chart(rows: Sequence[Record], path: Path) -> None:
    """Saves a chart of tokens per second by number of running requests, as PNG and SVG.

    `rows` are those of a `bench_constant.json`. The chart has a line each for plain decoding, the best of vLLM's own modes at
    each batch size, and this package, if `rows` has them.
    """
    _save(path, (9.0, 2.6), lambda figure: _draw_throughput(figure.subplots(), rows))


def _save(path: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> None:
    """Saves the figure that `draw` draws, as PNG and SVG."""
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "path"}):
        figure = Figure(size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        for suffix in (".png", ".svg"):
            figure.savefig(path.with_suffix(suffix), dpi=DPI)


def _draw_bench(ax: Axes, rows: Sequence[Record]) -> None:
    at = np.arange(len(rows))
    speedup = series(rows, "speedup_vs_plain")
    low = series(rows, "speedup_low")
    high = series(rows, "speedup_high")
    ax.barh(at, np.nan_to_num(speedup), 0.66, color=[_bench_colour(r) for r in rows])
    whiskers = np.isfinite(low) & np.isfinite(high)
    ax.hlines(at[whiskers], low[whiskers], high[whiskers], color=INK, linewidth=1.2)
    ax.axvline(1, color=INK, linewidth=1)
    right = np.nanmax([1.0, *speedup, *high])
    for i, row in enumerate(rows):
        text = f"{speedup[i]:.2f}x" if np.isfinite(speedup[i]) else "not measured"
        ax.annotate(
            text,
            (np.nanmax([0, speedup[i], high[i]]), i),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if row.get("mode") == "ours" else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
        equal, colour = _equality(row)
        ax.annotate(equal, (1.0, i), xycoords=ax.get_yaxis_transform(), va="center", ha="right", color=colour)
    ax.set(xlim=(0, right * 1.4), ylim=(len(rows) - 0.4, -0.6), xlabel="speedup of the rollout over plain decoding (x)")
    ax.set_yticks(at, [{"stock": "stock vLLM"}.get(str(r.get("mode")), str(r.get("mode"))) for r in rows], color=INK)
    ax.tick_params(axis="y", length=0)
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.set_title("tokens equal to plain", loc="right", color=GREY)


def _draw_running(ax: Axes, rows: Sequence[Record]) -> None:
    """Draws our modes in colours and the others in grey. Each line has its label at the right end."""
    modes = [m for m in dict.fromkeys(str(r["mode"]) for r in rows) if m != "plain"]
    own = [m for m in modes if m.startswith("ours")]
    batches = sorted({int(r["batch"]) for r in rows})
    labels = []
    for mode in sorted(modes, key=own.__contains__):
        of_mode = {int(r["batch"]): number(r, "speedup_vs_plain") for r in rows if r["mode"] == mode}
        speedup = [of_mode.get(batch, math.nan) for batch in batches]
        is_all = mode == "ours"
        colour = BLUE if is_all else drafter_colour(1 + own.index(mode)) if mode in own else SILVER
        style: dict[str, Any] = {"linewidth": 2.6 if is_all else 1.6, "alpha": 1.0 if mode in own else 0.6}
        ax.plot(batches, speedup, "o-" if mode in own else "o--", color=colour, **style)
        labels.append((speedup[-1], mode, colour))
    ax.axhline(1, color=INK, linewidth=1)
    _count_requests(ax, batches)
    ax.set(xlabel="running requests", ylabel="speedup over plain decoding (x)", ylim=(0, None))
    label_right(ax, [(y, text, colour) for y, text, colour in labels if math.isfinite(y)])


def _count_requests(ax: Axes, batches: Sequence[int]) -> None:
    """Gives the horizontal axis a tick for each number of requests. The axis is logarithmic, because the numbers double."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.minorticks_off()


def _draw_throughput(ax: Axes, rows: Sequence[Record]) -> None:
    """Draws three curves with labels at their right ends, and writes our speedup over plain decoding at each of our points."""
    curves = {
        "plain decoding": ("plain", SILVER),
        "vLLM's best method": ("vLLM", INK),
        "this package": ("ours", BLUE),
    }
    labels = []
    for label, (kind, colour) in curves.items():
        of_kind = [r for r in rows if (str(r["mode"]).startswith("vLLM") if kind == "vLLM" else r["mode"] == kind)]
        if not of_kind:
            continue
        by_speed = sorted(of_kind, key=lambda row: number(row, "tokens_per_s"))
        best = {int(row["batch"]): row for row in by_speed}  # the last one of a batch is the fastest
        batches = sorted(best)
        tokens_per_s = [number(best[batch], "tokens_per_s") for batch in batches]
        line = "--" if kind == "vLLM" else "-"
        ax.plot(batches, tokens_per_s, f"o{line}", color=colour, linewidth=2.6 if kind == "ours" else 1.6, markersize=4)
        labels.append((tokens_per_s[-1], label, colour))
        for batch, y in zip(batches, tokens_per_s, strict=True):
            if kind == "ours":
                speedup = f"{number(best[batch], 'speedup_vs_plain'):.2f}x"
                ax.annotate(speedup, (batch, y), (0, 6), textcoords="offset points", ha="center", color=dark(colour))
    _count_requests(ax, sorted({int(row["batch"]) for row in rows}))
    ax.set(xlabel="running requests", ylabel="tokens per second", ylim=(0, None))
    ax.margins(y=0.2)
    label_right(ax, labels)


def _equality(row: Record) -> tuple[str, str]:
    """Returns the text that says how many of a row's tokens equal plain decoding's, and the colour of the text."""
    equal = number(row, "tokens_equal")
    total = number(row, "tokens_total")
    if not math.isfinite(equal + total):
        return "other samples" if "tokens_equal" in row else "", GREY
    return f"{equal:,.0f} of {total:,.0f}", INK if equal == total else RED


def _bench_colour(row: Record) -> str:
    return {"ours": BLUE, "plain": SILVER, "stock": PALE}.get(str(row.get("mode")), "#a8cbe4")


def ahead_chart(rows: Sequence[Record], path: Path) -> None:
    """Saves a chart of how long free texts of older weights equal the newer weights' own texts, as PNG and SVG.

    There is a line for each learning rate, which is the size of the update. A last panel shows the share of tokens that are
    drafted right by texts with branches at their near-ties. `rows` are those of `lab/bench/ahead_bench.py`.
    """
    longest = max(row["length"] for row in rows if row["kind"] == "free text")
    whole = [row for row in rows if row["kind"] == "free text" and row["length"] == longest]
    _save(path, (12.0, 3.8), lambda figure: _draw_ahead(figure, whole))


def _draw_ahead(figure: Figure, rows: Sequence[Record]) -> None:
    """Draws one panel for texts made one update ago, one for texts made two updates ago, and one for branches."""
    *equal, branches = figure.subplots(1, 3, sharey=True)
    for ax, age in zip(equal, (1, 2), strict=True):
        _draw_equal(ax, [row for row in rows if row["newer"] - row["older"] == age])
        ax.set_title(f"texts made {'one update' if age == 1 else 'two updates'} ago")
    _draw_branches(branches, rows)
    equal[0].set_ylabel("responses that are still equal")


def _draw_branches(ax: Axes, rows: Sequence[Record]) -> None:
    """Draws the share of tokens drafted right by number of branches per text.

    Solid lines are for texts from before the second update, and dotted lines for texts from before both updates.
    """
    labels = []
    for index, rate in enumerate(sorted({row["rate"] for row in rows})):
        colour = drafter_colour(index)
        for older, line in ((1, "-"), (0, ":")):
            found = [row for row in rows if (row["rate"], row["older"], row["newer"]) == (rate, older, 2)]
            for row in found:
                shares = [figures["right"] for figures in row["branches"].values()]
                ax.plot(range(len(shares)), shares, line, color=colour, linewidth=1.8, marker="o", markersize=3)
                ax.set_xticks(range(len(shares)), list(row["branches"]))
                if older:
                    labels.append((float(shares[-1]), f"lr {rate:.0e}", colour))
    ax.set(xlabel="branches a text", title="tokens drafted right; dotted: two updates ago")
    label_right(ax, labels)


def _draw_equal(ax: Axes, rows: Sequence[Record]) -> None:
    labels = []
    for index, rate in enumerate(sorted({row["rate"] for row in rows})):
        prefixes = np.concatenate([row["prefixes"] for row in rows if row["rate"] == rate])
        at = np.arange(0, max(row["length"] for row in rows) + 1, 16)
        alive = (prefixes[None, :] >= at[:, None]).mean(axis=1)
        colour = drafter_colour(index)
        ax.plot(at, alive, color=colour, linewidth=1.8)
        labels.append((float(alive[-1]), f"lr {rate:.0e}", colour))
    ax.set(xlabel="token of the response", ylim=(0, 1.02), xlim=(0, None))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    label_right(ax, labels)
