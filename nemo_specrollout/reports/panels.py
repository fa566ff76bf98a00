# SPDX-License-Identifier: Apache-2.0
"""Panels of charts, and the figures of a draft head: each `draw_` function draws one pair of axes.

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

from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
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
    known = np.flatnonzero(np.isfinite(means))
    # The first and the last mean have labels, away from the line: below it if it rises towards the neighbour.
    for i, neighbour in (
        ((known[0], known[1]), (known[-1], known[-2])) if len(known) > 1 else zip(known, known, strict=True)
    ):
        offset, va = ((0, -7), "top") if means[neighbour] > means[i] else ((0, 6), "bottom")
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
            n = proposed[j]
            count = f"{n}" if n < 1000 else f"{n / 1000:.3g}k" if n < 999_500 else f"{n / 1e6:.3g}M"
            ax.annotate(count, (j + 1, 0), (0, -18 - 11 * i), ax.get_xaxis_transform(), "offset points", ha="center",
                        va="top", color=dark(colour), fontsize=7.5)  # fmt: skip
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


def drafter_colour(index: int) -> str:
    """Returns the colour of a run's drafter number `index`."""
    return DRAFTER_COLOURS[index % len(DRAFTER_COLOURS)]


def light(colour: str) -> str:
    """Returns a lighter colour."""
    return to_hex(tuple(0.4 * c + 0.6 for c in to_rgb(colour)))  # type: ignore[arg-type]


def dark(colour: str) -> str:
    """Returns a darker colour for text, which needs more contrast than a filled shape."""
    return to_hex(tuple(0.75 * c for c in to_rgb(colour)))  # type: ignore[arg-type]


def has_head(steps: Sequence[Record]) -> bool:
    """Returns whether the run's head may be refreshed."""
    return any("draft_refresh" in step for step in steps)


def refreshes(steps: Sequence[Record]) -> list[tuple[Any, Record]]:
    """Returns step and `draft_refresh` of each step after which a head was trained."""
    return [(s["step"], s["draft_refresh"]) for s in steps if number(s, "draft_refresh.refresh_s") >= 0]


def head_summary(steps: Sequence[Record]) -> dict[str, Any]:
    """Returns the figures of a run's heads for `summary.json`.

    They are the number of refreshes and of published heads, and the seconds of the refreshes and their share of the run.
    The last is the share of the rollouts' time that keeping features took.
    """
    if not has_head(steps):
        return {}
    training_s, capture_s = (np.nansum(series(steps, f"draft_refresh.{k}")) for k in ("refresh_s", "capture_s"))
    run_s = _seconds(steps).sum()
    return {
        "refreshes": len(refreshes(steps)),
        "heads_published": sum(bool(r.get("published")) for _, r in refreshes(steps)),
        "refresh_s": float(training_s),
        "refresh_share": float(training_s / (run_s + training_s)),
        "capture_share": float(capture_s / np.nansum(series(steps, "rollout_s"))),
    }


def head_acceptance(steps: Sequence[Record]) -> np.ndarray:
    """Returns the accepted share of the head's drafts of each step, or NaN if none was verified."""
    shares = []
    for step in steps:
        counts = [c for name, c in (step.get("acceptance") or {}).items() if name in MODEL_DRAFTERS]
        proposed, accepted = (sum(sum(c[k]) for c in counts) for k in ("proposed", "accepted"))
        shares.append(accepted / proposed if proposed else math.nan)
    return np.array(shares)


def _seconds(steps: Sequence[Record]) -> np.ndarray:
    """Returns the seconds of each step without refreshes."""
    return np.sum([np.nan_to_num(series(steps, f"{phase}_s")) for phase in PHASES], axis=0)


def draw_head_acceptance(ax: Axes, steps: Sequence[Record]) -> None:
    """Draws the accepted share over the run, with a dot for a published head and a cross for a refused one."""
    at, shares = series(steps, "step"), head_acceptance(steps)
    over_steps(ax, steps, "Accepted of the head's drafts")
    ax.set_ylim(0, 1)
    ax.plot(at, shares, color=BLUE, marker="." if len(steps) <= MAX_MARKERS else "")
    for step, record in refreshes(steps):
        published = bool(record.get("published"))
        ax.plot([step], [0.04], "o" if published else "x", color=GREEN if published else RED, clip_on=False)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.annotate("\N{BLACK CIRCLE} published", (1.0, 1.02), xycoords="axes fraction", ha="right", color=GREEN)
    ax.annotate("\N{MULTIPLICATION SIGN} refused", (0.72, 1.02), xycoords="axes fraction", ha="right", color=RED)


def draw_head_cost(ax: Axes, steps: Sequence[Record]) -> None:
    """Draws the share of the run's time so far that training heads took."""
    at = series(steps, "step")
    training_s = np.nan_to_num(series(steps, "draft_refresh.refresh_s")).cumsum()
    share = training_s / np.maximum(_seconds(steps).cumsum() + training_s, 1e-9)
    over_steps(ax, steps, "Time of refreshes, of the run so far")
    ax.fill_between(at, share, color=BLUE, alpha=0.25, linewidth=0)
    ax.plot(at, share, color=BLUE)
    ax.set_ylim(0, max(0.25, float(share.max()) * 1.2))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.annotate(f"{share[-1]:.1%}", (at[-1], share[-1]), (0, 5), textcoords="offset points", ha="right", color=GREY)
