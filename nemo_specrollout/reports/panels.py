# SPDX-License-Identifier: Apache-2.0
"""Panels of charts, where a panel is one pair of axes. Each `draw_` function and each `LinePanel` draws one panel.

Most panels have a value for each step. The palette is that of Okabe and Ito, which colour-blind readers can also distinguish.
A NaN is a gap in its line.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

from nemo_specrollout.reports.records import Record, ratio_of_sums, reduced, reward_window, running_mean, series

BLUE, SKY, ORANGE, GREEN, PINK, RED = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
INK, GREY, SILVER, PALE = "#24292f", "#6e7781", "#8c959f", "#d0d7de"
DRAFTER_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
PHASE_COLOURS = {
    "generation": BLUE,
    "logprob": SKY,
    "train": SILVER,
    "refit": ORANGE,
    "verify": PINK,
    "validation": RED,
    "checkpoint": GREEN,
    "other": PALE,
}
"""Colours of the phases of a step from the bottom of the stack to its top. `other` is the time of a step outside of all
phases."""

STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "text.color": INK,
    "axes.labelsize": 8.5,
    "axes.labelcolor": GREY,
    "axes.edgecolor": PALE,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#eaeef2",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.fonttype": "none",
}

FLOOR = 1e-9
"""Height at which a log axis draws a zero."""
MAX_COUNT_LABELS = 16
"""Maximum number of draft positions with a label that says how many draft tokens were proposed there."""
MAX_MARKERS = 40
"""Maximum number of steps for which a line has a marker at each step."""
MAX_BARS = 120
"""Maximum number of steps for which the phases of a step are drawn as bars. For more, they are drawn as areas."""
DASHES = (0, (4, 3))
Values = str | Callable[[Sequence[Record]], np.ndarray]
"""What a line shows. It is a key of the steps' records, or a function that returns a value for each step."""


@dataclass(frozen=True)
class LinePanel:
    """A panel with lines over the steps. Each line has its label at its right end."""

    title: str
    lines: Sequence[tuple[str, Values, str]]
    """Label, values and colour of each line. A label may contain {total}, which stands for the sum of the line's values."""
    is_from_zero: bool = True
    """True if the y axis begins at 0, unless it is logarithmic."""
    level: float | None = None
    """Height of a grey horizontal line, or None for no such line."""
    alarm: float = math.nan
    """Height of a dashed red horizontal line at the bound of an alarm, or NaN for no such line."""
    is_share: bool = False
    """True if the values are shares of a whole, which are shown in per cent."""
    is_count: bool = False
    is_log: bool = False
    """True if the y axis is logarithmic. Zeros are then drawn at its lower end."""
    is_filled: bool = False
    """True if the area between the first two lines is filled."""

    def largest(self, steps: Sequence[Record]) -> float:
        """Returns the largest value of all lines over `steps`, or NaN if there is none."""
        return reduced(np.max, np.concatenate([_values(steps, values) for _, values, _ in self.lines]))

    def __call__(self, ax: Axes, steps: Sequence[Record]) -> None:
        over_steps(ax, steps, self.title)
        at = series(steps, "step")
        labels = []
        values = [np.maximum(_values(steps, of), FLOOR if self.is_log else -math.inf) for _, of, _ in self.lines]
        if self.is_filled:
            ax.fill_between(at, values[0], values[1], color=light(self.lines[0][2]), alpha=0.5, linewidth=0)
        for (label, _, colour), line in zip(self.lines, values, strict=True):
            known = line[np.isfinite(line)]
            if len(known):
                ax.plot(at, line, line_format(steps), color=colour)
                labels.append((float(known[-1]), label.format(total=known.sum()), colour))
        if self.level is not None:
            ax.axhline(self.level, color=GREY, linewidth=1)
        if math.isfinite(self.alarm):
            ax.axhline(self.alarm, color=RED, linewidth=1, linestyle=DASHES)
            labels.append((self.alarm, f"alarm {self.alarm:g}", RED))
        self._scale(ax, 1.08 * self.largest(steps))
        label_right(ax, labels)

    def _scale(self, ax: Axes, top: float) -> None:
        if self.is_share:
            ax.set_ylim(0, 1.02)
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif self.is_log:
            ax.set_yscale("log")
            low, high = ax.get_ylim()
            ax.set_ylim(low / 2, max(high * 2, low * 20))
            ax.yaxis.set_major_locator(LogLocator(numticks=6))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value <= FLOOR else f"{value:.0e}"))
            ax.tick_params(axis="y", which="minor", left=False)
        elif self.is_from_zero:
            ax.set_ylim(0, top if top > 0 else 1)
        if self.is_count:
            ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _values(steps: Sequence[Record], of: Values) -> np.ndarray:
    return series(steps, of) if isinstance(of, str) else of(steps)


def draw_reward(ax: Axes, steps: Sequence[Record]) -> None:
    window = reward_window(len(steps))
    over_steps(ax, steps, "Mean reward of a step" + (f"; bold: of {window} steps" if window > 1 else ""))
    reward = series(steps, "reward")
    x = series(steps, "step")
    ax.plot(x, reward, line_format(steps), color=BLUE, alpha=0.35 if window > 1 else 1.0)
    means = running_mean(reward, window)
    if window > 1:
        ax.plot(x, means, color=BLUE, linewidth=2.4)
    known = np.flatnonzero(np.isfinite(means))
    # The first and the last mean have labels that keep away from the line, below it if it rises towards the neighbour.
    neighbours = {}
    if len(known):
        second, last_but_one = (known[1], known[-2]) if len(known) > 1 else (known[0], known[0])
        neighbours = {known[0]: second, known[-1]: last_but_one}
    for i, neighbour in neighbours.items():
        offset, va = ((0, -7), "top") if means[neighbour] > means[i] else ((0, 6), "bottom")
        ax.annotate(
            f"{means[i]:.2f}",
            (x[i], means[i]),
            offset,
            textcoords="offset points",
            ha="center",
            va=va,
            color=BLUE,
            fontweight="bold",
        )
    ax.margins(x=0.12)
    ax.autoscale(axis="x")  # the labels at both ends need room
    middle = (np.nanmax(reward) + np.nanmin(reward)) / 2
    span = np.nanmax(reward) - np.nanmin(reward)
    ax.set_ylim(middle - max(0.7 * span, 0.06), middle + max(0.7 * span, 0.06))  # so that a small change looks small


def draw_time(ax: Axes, steps: Sequence[Record]) -> None:
    """Draws the seconds of each step's phases on top of each other, as bars or, if there are many steps, as areas."""
    over_steps(ax, steps, "Seconds of a step")
    at = series(steps, "step")
    base = np.zeros(len(steps))
    labels = []
    for phase, colour in PHASE_COLOURS.items():
        seconds = series(steps, f"{phase}_s")
        if (seconds > 0).any():
            height = np.nan_to_num(seconds)
            if len(steps) <= MAX_BARS:
                ax.bar(at, height, 0.78, base, color=colour, linewidth=0)
            else:
                ax.fill_between(at, base, base + height, step="mid", color=colour, linewidth=0)
            name = phase.replace("logprob", "log-prob")
            labels.append((base[-1] + height[-1] / 2, f"{name} {np.nanmean(seconds):.2g} s", colour))
            base = base + height
    label_right(ax, labels)


def draw_speedup(ax: Axes, steps: Sequence[Record]) -> None:
    """Draws the speedup of each rollout over plain decoding, by estimate, and the speedup of all rollouts together."""
    over_steps(ax, steps, "Rollout speedup, by estimate (x)")
    ratios = series(steps, "speedup_estimate")
    overall = ratio_of_sums(steps, "plain_estimate_s", "rollout_s")
    ax.axhline(1, color=GREY, linewidth=1)
    ax.axhline(overall, color=BLUE, linewidth=1, linestyle=DASHES)
    ax.plot(series(steps, "step"), ratios, line_format(steps), color=BLUE)
    ax.set_ylim(min(0.9, float(np.nanmin(ratios)) - 0.1), max(1.2, float(np.nanmax(ratios)) + 0.1))
    all_label = [(overall, f"all {overall:.2f}x", BLUE)] if math.isfinite(overall) else []
    label_right(ax, [*all_label, (1.0, "plain", GREY)])


def draw_acceptance(ax: Axes, totals: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Draws the acceptance rate of draft tokens by position and drafter, over the whole run."""
    labels = []
    longest = max(len(proposed) for proposed, _ in totals.values())
    stride = math.ceil(longest / MAX_COUNT_LABELS)
    for i, (name, (proposed, accepted)) in enumerate(totals.items()):
        colour = drafter_colour(i)
        rates = accepted / proposed
        ax.plot(np.arange(1, len(rates) + 1), rates, "o-", color=colour)
        labels.append((rates[-1], name, colour))
        for j in range(0, len(rates), stride):
            n = proposed[j]
            count = in_short(n)
            ax.annotate(
                count,
                (j + 1, 0),
                (0, -18 - 11 * i),
                ax.get_xaxis_transform(),
                "offset points",
                ha="center",
                va="top",
                color=dark(colour),
                fontsize=7.5,
            )
    ax.set(title="Accepted of proposed draft tokens", ylim=(0, 1), xlim=(0.6, longest + 0.4))
    ax.set_xlabel("position in the draft, and number proposed there", labelpad=7 + 11 * len(totals))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=MAX_COUNT_LABELS, integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    label_right(ax, labels)


def over_steps(ax: Axes, steps: Sequence[Record], title: str) -> None:
    """Sets the title and the x axis of a panel with a value for each step.

    Where the steps of another start of the run begin, it draws a dotted line.
    """
    at = series(steps, "step")
    ax.set(title=title, xlabel="step", xlim=(at[0] - 0.6, at[-1] + 0.6))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    starts = [step.get("start") for step in steps]
    for x, start, before in zip(at[1:], starts[1:], starts, strict=False):
        if start != before:  # a later start of the run continues here
            ax.axvline(x - 0.5, color=GREY, linewidth=0.8, linestyle=":")


def line_format(steps: Sequence[Record]) -> str:
    """Returns matplotlib's format string for a line over `steps`. The line gets markers if there are only a few steps."""
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
    return DRAFTER_COLOURS[index % len(DRAFTER_COLOURS)]


def light(colour: str) -> str:
    return to_hex(tuple(0.4 * c + 0.6 for c in to_rgb(colour)))  # type: ignore[arg-type]


def dark(colour: str) -> str:
    """Returns a darker shade of a colour for text, which needs more contrast than a filled shape."""
    return to_hex(tuple(0.75 * c for c in to_rgb(colour)))  # type: ignore[arg-type]


def in_short(count: int) -> str:
    """Returns a count with at most three digits, such as `12.3k`."""
    if count < 1000:
        return str(count)
    if count < 999_500:
        return f"{count / 1000:.3g}k"
    return f"{count / 1e6:.3g}M"
