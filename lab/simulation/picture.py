# SPDX-License-Identifier: Apache-2.0
"""Draws the picture of a comparison, with GPU use over time, the parts of a step, and the response lengths.

The palette is Okabe and Ito's, as in the run reports.
"""

import io
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from lab.simulation.compare import Comparison, StepResult
from nemo_specrollout.reports import panels
from nemo_specrollout.reports.panels import BLUE, INK, ORANGE, PINK, SILVER, SKY

PARTS = {"data": PINK, "prepare": PINK, "generate": BLUE, "log-prob": SKY, "train": SILVER, "refit": ORANGE}
STYLE: dict[Any, Any] = {**panels.STYLE, "axes.titlesize": 9, "axes.grid.axis": "both", "lines.markersize": 6}
_SIZE = (9.6, 5.6)
_DPI = 160
_POINTS = 300
_BINS = 40


def picture(comparison: Comparison) -> bytes:
    """Returns the picture of a comparison as PNG bytes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplot_mosaic(
            [["use", "use"], ["parts", "lengths"]], width_ratios=[1.45, 1], height_ratios=[1, 1.1]
        )
        figure.suptitle(comparison.scenario.title, x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK)
        draw_use(axes["use"], comparison)
        draw_parts(axes["parts"], comparison)
        draw_lengths(axes["lengths"], comparison)
        file = io.BytesIO()
        figure.savefig(file, format="png")
        return file.getvalue()


def draw_use(ax: Axes, comparison: Comparison) -> None:
    """Draws the share of busy engines over time, for plain decoding and for the best variant."""
    for step, colour in ((comparison.plain, SILVER), (comparison.best, BLUE)):
        at_s, busy = step.rollout.running_share(_POINTS)
        ax.fill_between(at_s, busy, color=colour, alpha=0.25, linewidth=0)
        ax.plot(at_s, busy, color=colour)
    ax.set(title="GPUs that decode or prefill, of those that generate", xlabel="seconds from the start")
    ax.set_ylim(0, 1.04)
    ax.set_xlim(0, comparison.plain.rollout.seconds * 1.01)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    for height, step, colour in ((0.21, comparison.best, BLUE), (0.08, comparison.plain, INK)):
        text = f"{step.variant}: {1 - step.rollout.idle_share:.0%} busy for {step.rollout.seconds:.0f} s"
        ax.annotate(text, (0.012, height), xycoords="axes fraction", color=colour, fontweight="bold", va="center")


def draw_parts(ax: Axes, comparison: Comparison) -> None:
    """Draws the parts of a step of each variant, with its speedup."""
    at = np.arange(len(comparison.steps))
    left = np.zeros(len(at))
    for part in _shown(comparison):
        seconds = np.array([step.parts_s[part] for step in comparison.steps])
        ax.barh(at, seconds, 0.66, left, color=PARTS[part], linewidth=0, label=part)
        left = left + seconds
    for i, step in enumerate(comparison.steps):
        ax.annotate(
            f"{comparison.speedup(step):.2f}x",
            (left[i], i),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if step is comparison.best else "normal",
        )
    ax.set(title="Seconds of a step", xlim=(0, left.max() * 1.14), ylim=(len(at) - 0.4, -0.6))
    ax.set_yticks(at, [step.variant for step in comparison.steps], color=INK)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=5, handlelength=1, columnspacing=1.2)


def draw_lengths(ax: Axes, comparison: Comparison) -> None:
    """Draws a histogram of response lengths."""
    lengths = comparison.lengths
    ax.hist(lengths, _BINS, color=SKY, linewidth=0)
    for value, name in ((float(np.median(lengths)), "median"), (float(lengths.mean()), "mean")):
        ax.axvline(value, color=INK, linewidth=1, linestyle="-" if name == "mean" else (0, (3, 2)))
    text = f"mean {lengths.mean():,.0f}, median (dashed) {np.median(lengths):,.0f}, longest {lengths.max():,.0f}"
    ax.set(title="Responses by tokens", xlabel=text)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}K" if value else "0"))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))


def _shown(comparison: Comparison) -> list[str]:
    """Returns the names of the parts that take a visible share of any variant's step."""

    def share(part: str, step: StepResult) -> float:
        return step.parts_s[part] / step.step_s

    return [p for p in PARTS if max(share(p, step) for step in comparison.steps) > 0.002]
