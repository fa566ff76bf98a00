# SPDX-License-Identifier: Apache-2.0
"""Panels of charts: each function draws one pair of axes.

The palette is Okabe and Ito's, whose colours differ for colour-blind readers too. A NaN is a gap in its line.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

from nemo_specrollout.reports.records import (
    Record,
    column,
    drafts_by_name,
    number,
    overall_speedup,
    reward_window,
    running_mean,
    seconds_since_start,
    series,
    speedups,
)

BLUE, SKY, ORANGE, GREEN, PINK, RED = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
INK, GREY, PALE = "#24292f", "#6e7781", "#d0d7de"
DRAFTER_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
PHASES = {"rollout": BLUE, "logprob": SKY, "train": "#8c959f", "refit": ORANGE, "verify": PINK}
"""Phases of a step in the order of the stack, with colours. Each is recorded as `<phase>_s`."""

STYLE: dict[Any, Any] = {
    "font.size": 8.5, "axes.titlesize": 8.5, "axes.titlelocation": "left", "axes.titlecolor": INK, "text.color": INK,
    "axes.labelsize": 8.5, "axes.labelcolor": GREY, "axes.edgecolor": PALE, "xtick.color": GREY, "ytick.color": GREY,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "axes.axisbelow": True, "grid.color": "#eaeef2", "grid.linewidth": 0.8, "lines.linewidth": 1.6,
    "lines.markersize": 4, "legend.frameon": False, "text.parse_math": False, "svg.fonttype": "none",
}  # fmt: skip

FLOOR = 1e-9
"""Height at which a log axis draws a zero."""
MAX_COUNT_LABELS = 16
"""Draft positions that get a label with their number of proposals."""
MAX_MARKERS = 40
"""Steps up to which a line has a marker for each step."""


def draw_reward(ax: Axes, steps: Sequence[Record]) -> None:
    window = reward_window(len(steps))
    title = "Mean reward of a step" + (f"; bold: of {window} steps" if window > 1 else "")
    over_steps(ax, steps, title)
    reward, x = series(steps, "reward"), series(steps, "step")
    ax.plot(x, reward, line_format(steps), color=BLUE, alpha=0.35 if window > 1 else 1.0)
    means = running_mean(reward, window)
    if window > 1:
        ax.plot(x, means, color=BLUE, linewidth=2.4)
    found = np.flatnonzero(np.isfinite(means))
    for i, neighbour in {found[0]: found[1:2], found[-1]: found[-2:-1]}.items() if len(found) else ():
        offset, va = ((0, -7), "top") if len(neighbour) and means[neighbour[0]] > means[i] else ((0, 6), "bottom")
        ax.annotate(f"{means[i]:.2f}", (x[i], means[i]), offset, textcoords="offset points",
                    ha="center", va=va, color=BLUE, fontweight="bold")  # fmt: skip
    ax.margins(x=0.12)
    ax.autoscale(axis="x")  # the labels at both ends need room
    middle, span = (np.nanmax(reward) + np.nanmin(reward)) / 2, np.nanmax(reward) - np.nanmin(reward)
    ax.set_ylim(middle - max(0.7 * span, 0.06), middle + max(0.7 * span, 0.06))  # a small change should look small


def draw_time(ax: Axes, steps: Sequence[Record]) -> None:
    labels = stack_phases(ax, steps, PHASES)
    at, plain = series(steps, "step"), series(steps, "plain_estimate_s")
    if np.isfinite(plain).any():
        ax.hlines(plain, at - 0.39, at + 0.39, color="white", linewidth=3)
        ax.hlines(plain, at - 0.39, at + 0.39, color=INK, linewidth=1.4)
        labels.append((plain[np.isfinite(plain)][-1], f"rollout, plain {np.nanmean(plain):.2g} s", INK))
    label_right(ax, labels)


def stack_phases(
    ax: Axes, steps: Sequence[Record], phases: Mapping[str, str], most_bars: float = math.inf
) -> list[tuple[float, str, str]]:
    """Stacks the seconds of each step's phases, as bars or, above `most_bars` steps, as areas.

    `phases` maps names to colours; each phase is recorded as `<name>_s`. Returns the labels for `label_right`.
    """
    over_steps(ax, steps, "Seconds of a step")
    at, base, labels = series(steps, "step"), np.zeros(len(steps)), []
    for phase, colour in phases.items():
        seconds = series(steps, f"{phase}_s")
        if np.isfinite(seconds).any():
            height = np.nan_to_num(seconds)
            if len(steps) <= most_bars:
                ax.bar(at, height, 0.78, base, color=colour, linewidth=0)
            else:
                ax.fill_between(at, base, base + height, step="mid", color=colour, linewidth=0)
            name = phase.replace("logprob", "log-prob")
            labels.append((base[-1] + height[-1] / 2, f"{name} {np.nanmean(seconds):.2g} s", colour))
            base = base + height
    return labels


def draw_seconds(ax: Axes, steps: Sequence[Record]) -> None:
    over_steps(ax, steps, "Seconds of a rollout")
    at, measured, plain = (series(steps, key) for key in ("step", "rollout_s", "plain_estimate_s"))
    ax.fill_between(at, measured, plain, color="#ddeaf3", linewidth=0)
    labels = []
    for name, seconds, colour in (("measured", measured, BLUE), ("plain, estimated", plain, GREY)):
        ax.plot(at, seconds, line_format(steps), color=colour)
        if np.isfinite(seconds).any():
            labels.append((seconds[np.isfinite(seconds)][-1], name, colour))
    ax.set_ylim(0, np.nanmax([*measured, *plain]) * 1.1 if labels else 1)
    label_right(ax, labels)


def draw_speedup(ax: Axes, steps: Sequence[Record]) -> None:
    title = "Rollout speedup over the plain estimate (x)"
    draw_ratios(ax, steps, title, speedups(steps), overall_speedup(steps))


def draw_ratios(
    ax: Axes, steps: Sequence[Record], title: str, ratios: np.ndarray, overall: float, name: str = "all"
) -> None:
    """Draws the speedups of steps, and an overall speedup that is labelled `name`."""
    over_steps(ax, steps, title)
    ax.axhline(1, color=GREY, linewidth=1)
    ax.axhline(overall, color=BLUE, linewidth=1, linestyle=(0, (4, 3)))
    ax.plot(series(steps, "step"), ratios, line_format(steps), color=BLUE)
    ax.set_ylim(min(0.9, float(np.nanmin(ratios)) - 0.1), max(1.2, float(np.nanmax(ratios)) + 0.1))
    label_right(ax, [(overall, f"{name} {overall:.2f}x", BLUE), (1.0, "plain", GREY)])


def draw_acceptance(ax: Axes, totals: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    labels, longest = [], max(len(proposed) for proposed, _ in totals.values())
    stride = math.ceil(longest / MAX_COUNT_LABELS)
    for i, (name, (proposed, accepted)) in enumerate(totals.items()):
        colour, rates = drafter_colour(i), accepted / proposed
        ax.plot(np.arange(1, len(rates) + 1), rates, "o-", color=colour)
        labels.append((rates[-1], name, colour))
        for j in range(0, len(rates), stride):
            _below(ax, j + 1, i, _short(proposed[j]), colour)
    ax.set(title="Accepted of proposed draft tokens", ylim=(0, 1), xlim=(0.6, longest + 0.4))
    ax.set_xlabel("position in the draft, and number proposed there", labelpad=7 + 11 * len(totals))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=MAX_COUNT_LABELS, integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    label_right(ax, labels)


def draw_drain(ax: Axes, trace: Record) -> None:
    at = seconds_since_start(trace)
    running = column(trace, "num_requests")
    ax.fill_between(at, running, step="pre", color=SKY, alpha=0.35, linewidth=0)
    ax.step(at, running, where="pre", color=BLUE)
    title = f"Running requests of all {trace['num_workers']} workers" if "num_workers" in trace else "Running requests"
    ax.set(title=title, xlabel=f"seconds into the rollout of step {trace.get('step')}", xlim=(0, at[-1]))
    ax.set_ylim(0, max(running.max() * 1.08, 1))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))


def draw_drafts(ax: Axes, trace: Record) -> None:
    at = seconds_since_start(trace)
    layers, colours, patches = [], [], []
    for i, (name, (drafted, accepted)) in enumerate(drafts_by_name(trace).items()):
        layers += [accepted, drafted - accepted]
        colours += [drafter_colour(i), light(drafter_colour(i))]
        patches += [Patch(color=drafter_colour(i), label=name)]
    ax.stackplot(at, layers, colors=colours, step="pre", linewidth=0)
    whose = "all workers' present engine steps" if "num_workers" in trace else "an engine step"
    ax.set_title(f"Draft tokens of {whose}; pale: rejected")
    ax.set_xlabel(f"seconds into the rollout of step {trace.get('step')}")
    ax.set_ylim(0, max(np.sum(layers, 0).max() * 1.05, 1))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    ax.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=len(patches), borderaxespad=0,
              borderpad=0, handlelength=1, columnspacing=1.2)  # fmt: skip


def draw_gap(ax: Axes, steps: Sequence[Record]) -> None:
    lines = (("max", "logprob_gap.max", GREY), ("mean", "logprob_gap.mean", BLUE))
    draw_gaps(ax, steps, "Log-prob gap, engine to trainer (nats)", lines)


def draw_gaps(
    ax: Axes, steps: Sequence[Record], title: str, lines: Sequence[tuple[str, str, str]], alarm: float = math.nan
) -> None:
    """Draws lines (name, key, colour) of differences on a log scale, and the bound of an alarm."""
    over_steps(ax, steps, title)
    labels, at = [], series(steps, "step")
    for name, key, colour in lines:
        gap = np.maximum(series(steps, key), FLOOR)
        ax.plot(at, gap, line_format(steps), color=colour)
        if np.isfinite(gap).any():
            labels.append((gap[np.isfinite(gap)][-1], name, colour))
    if math.isfinite(alarm):
        ax.axhline(alarm, color=RED, linewidth=1, linestyle=(0, (4, 3)))
        labels.append((alarm, f"alarm {alarm:g}", RED))
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.set_ylim(low / 2, max(high * 2, low * 20))
    ax.yaxis.set_major_locator(LogLocator(numticks=6))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value <= FLOOR else f"{value:.0e}"))
    ax.tick_params(axis="y", which="minor", left=False)
    label_right(ax, labels)


def draw_bench(ax: Axes, rows: Sequence[Record]) -> None:
    at, speedup = np.arange(len(rows)), series(rows, "speedup_vs_plain")
    low, high = series(rows, "speedup_low"), series(rows, "speedup_high")
    ax.barh(at, np.nan_to_num(speedup), 0.66, color=[_bench_colour(r) for r in rows])
    whiskers = np.isfinite(low) & np.isfinite(high)
    ax.hlines(at[whiskers], low[whiskers], high[whiskers], color=INK, linewidth=1.2)
    ax.axvline(1, color=INK, linewidth=1)
    right = np.nanmax([1.0, *speedup, *high])
    for i, row in enumerate(rows):
        text = f"{speedup[i]:.2f}x" if np.isfinite(speedup[i]) else "not measured"
        ax.annotate(text, (np.nanmax([0, speedup[i], high[i]]), i), (5, 0), textcoords="offset points", va="center",
                    fontweight="bold" if row.get("mode") == "ours" else "normal",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
        equal, colour = _equality(row)
        ax.annotate(equal, (1.0, i), xycoords=ax.get_yaxis_transform(), va="center", ha="right", color=colour)
    ax.set(xlim=(0, right * 1.4), ylim=(len(rows) - 0.4, -0.6), xlabel="speedup of the rollout over plain decoding (x)")
    ax.set_yticks(at, [{"stock": "stock vLLM"}.get(str(r.get("mode")), str(r.get("mode"))) for r in rows], color=INK)
    ax.tick_params(axis="y", length=0)
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.set_title("tokens equal to plain", loc="right", color=GREY)


def draw_running(ax: Axes, rows: Sequence[Record]) -> None:
    """Draws our modes in colours and the others in grey, each with its label at the right end."""
    modes = [m for m in dict.fromkeys(str(r["mode"]) for r in rows) if m != "plain"]
    own = [m for m in modes if m.startswith("ours")]
    batches = sorted({int(r["batch"]) for r in rows})
    labels = []
    for mode in sorted(modes, key=own.__contains__):
        of_mode = {int(r["batch"]): number(r, "speedup_vs_plain") for r in rows if r["mode"] == mode}
        speedup = [of_mode.get(batch, math.nan) for batch in batches]
        is_all = mode == "ours"
        colour = BLUE if is_all else drafter_colour(1 + own.index(mode)) if mode in own else "#8c959f"
        style: dict[str, Any] = {"linewidth": 2.6 if is_all else 1.6, "alpha": 1.0 if mode in own else 0.6}
        ax.plot(batches, speedup, "o-" if mode in own else "o--", color=colour, **style)
        labels.append((speedup[-1], mode, colour))
    ax.axhline(1, color=INK, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.minorticks_off()
    ax.set(xlabel="running requests", ylabel="speedup over plain decoding (x)", ylim=(0, None))
    label_right(ax, [(y, text, colour) for y, text, colour in labels if math.isfinite(y)])


def _equality(row: Record) -> tuple[str, str]:
    """Returns text and colour for a row's equality with plain decoding."""
    equal, total = number(row, "tokens_equal"), number(row, "tokens_total")
    if not math.isfinite(equal + total):
        return "other samples" if "tokens_equal" in row else "", GREY
    return f"{equal:,.0f} of {total:,.0f}", INK if equal == total else RED


def _bench_colour(row: Record) -> str:
    return {"ours": BLUE, "plain": "#8c959f", "stock": PALE}.get(str(row.get("mode")), "#a8cbe4")


def over_steps(ax: Axes, steps: Sequence[Record], title: str) -> None:
    """Sets title and x axis of a panel with a value for each step."""
    at = series(steps, "step")
    ax.set(title=title, xlabel="step", xlim=(at[0] - 0.6, at[-1] + 0.6))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def line_format(steps: Sequence[Record]) -> str:
    """Returns the format of a line, with markers if there are few enough steps."""
    return "o-" if len(steps) <= MAX_MARKERS else "-"


def label_right(ax: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Writes labels (y, text, colour) to the right of the data, and moves them apart where they would overlap."""
    ax.autoscale_view()  # otherwise the limits are computed only when the figure is drawn
    to_axes = ax.transData + ax.transAxes.inverted()
    line = 11 / (ax.bbox.height * 72 / ax.figure.dpi)
    previous = -math.inf
    for y, text, colour in sorted(labels):
        previous = max(float(to_axes.transform((1.0, y))[1]), previous + line)
        ax.annotate(text, (1.0, previous), (5, 0), "axes fraction", "offset points", va="center", color=dark(colour))


def _below(ax: Axes, x: float, row: int, text: str, colour: str) -> None:
    ax.annotate(text, (x, 0), (0, -18 - 11 * row), ax.get_xaxis_transform(), "offset points", ha="center", va="top",
                color=dark(colour), fontsize=7.5)  # fmt: skip


def _short(count: int) -> str:
    return str(count) if count < 1000 else f"{count / 1000:.3g}k" if count < 999_500 else f"{count / 1e6:.3g}M"


def drafter_colour(index: int) -> str:
    """Returns the colour of a run's drafter number `index`."""
    return DRAFTER_COLOURS[index % len(DRAFTER_COLOURS)]


def light(colour: str) -> str:
    """Returns a lighter colour."""
    return to_hex(tuple(0.4 * c + 0.6 for c in to_rgb(colour)))  # type: ignore[arg-type]


def dark(colour: str) -> str:
    """Returns a darker colour for text, which needs more contrast than a filled shape."""
    return to_hex(tuple(0.75 * c for c in to_rgb(colour)))  # type: ignore[arg-type]
