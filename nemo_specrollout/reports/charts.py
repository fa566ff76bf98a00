# SPDX-License-Identifier: Apache-2.0
"""Charts and picture of a local run, and how charts of all runs become SVG text and PNG files.

They are drawn from the recorded numbers alone. A chart without a number is the empty string.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from nemo_specrollout.config.files import replacing_file
from nemo_specrollout.reports import panels
from nemo_specrollout.reports.records import (
    Record,
    acceptance_totals,
    can_drain,
    drafts_by_name,
    read_lines,
    series,
    speedups,
    whole_trace,
)
from nemo_specrollout.reports.tail_panels import (
    draw_engines,
    draw_requests,
    num_shown_engines,
    shown_requests,
    shown_timeline,
)

DPI = 150
"""Pixels per inch of PNG files."""
PANELS_IN_ROW = 3
"""Panels in a row of a picture."""
HOW_TO_READ = {
    "Acceptance by position": "The share of tokens proposed at a draft position that equalled the policy's own token. Small "
    "counts are noisy.",
    "Draft head": "A head is trained for one policy, and the policy changes: acceptance falls until a refreshed head is "
    "published. A head that is not better than the one in service is refused.",
    "Reward": "The mean reward of a step's samples. Problems differ from step to step, so look at the running mean, the bold "
    "line.",
    "Engine against trainer": "The distance between the engine's and the trainer's log-prob of a sampled token. A jump means "
    "that a refit went wrong.",
}
"""Explanation of the charts that all reports have, by title."""
Draw = Callable[[Axes, Any], None]
"""Function that draws data into a pair of axes."""


def reward_chart(steps: Sequence[Record]) -> str:
    """Returns the chart of the mean reward of each step."""
    return svg_chart("reward", (4.4, 2.3), steps, panels.draw_reward) if has_any(steps, "reward") else ""


def time_chart(steps: Sequence[Record]) -> str:
    """Returns the chart of the seconds of each step by phase."""
    has_times = has_any(steps, *(f"{phase}_s" for phase in panels.PHASES))
    return svg_chart("time", (4.4, 2.6), steps, panels.draw_time) if has_times else ""


def speedup_chart(steps: Sequence[Record]) -> str:
    """Returns the chart of the rollout seconds of each step, measured and by the plain estimate, and of their ratio."""
    if not has_any(steps, "rollout_s"):
        return ""
    ratio = [panels.draw_speedup] if np.isfinite(speedups(steps)).any() else []
    return svg_chart("speedup", (9.0, 2.4), steps, panels.draw_seconds, *ratio)


def acceptance_chart(steps: Sequence[Record]) -> str:
    """Returns the chart of the accepted share of draft tokens, by position in the draft and by drafter."""
    totals = acceptance_totals(steps)
    return svg_chart("acceptance", (4.4, 2.6), totals, panels.draw_acceptance) if totals else ""


def head_chart(steps: Sequence[Record]) -> str:
    """Returns the chart of a refreshed head: the accepted share of its drafts, and the time of the refreshes."""
    both = panels.draw_head_acceptance, panels.draw_head_cost
    return svg_chart("head", (9.0, 2.3), steps, *both) if panels.has_head(steps) else ""


def drain_chart(trace: Record) -> str:
    """Returns the chart of one rollout over time: running requests, and below them the draft tokens of each engine step."""
    whole = whole_trace(trace)
    if not can_drain(whole):
        return ""
    if not drafts_by_name(whole):
        return svg_chart("drain", (9.0, 2.2), whole, panels.draw_drain)
    return svg_chart("drain", (9.0, 3.4), whole, panels.draw_drain, panels.draw_drafts, heights=(1, 1))


def tail_chart(timelines: Sequence[Record]) -> str:
    """Returns the chart of engines and requests over time, for the rollout in which moves and races saved most."""
    shown = shown_timeline(timelines)
    if shown is None:
        return ""
    heights = 0.5 + 0.36 * num_shown_engines(shown), 0.9 + 0.2 * len(shown_requests(shown["spans"]))
    return svg_chart("tail", (9.0, sum(heights)), shown, draw_engines, draw_requests, heights=heights)


def gap_chart(steps: Sequence[Record]) -> str:
    """Returns the chart of the absolute difference between the engine's and the trainer's log-probs, on a log scale."""
    lines = (("max", "logprob_gap.max", panels.GREY), ("mean", "logprob_gap.mean", panels.BLUE))
    draw = partial(panels.draw_gaps, title="Log-prob gap, engine to trainer (nats)", lines=lines)
    return svg_chart("gap", (4.4, 2.3), steps, draw) if has_any(steps, *(key for _, key, _ in lines)) else ""


def run_picture(run_dir: Path, path: Path) -> None:
    """Writes a local run in one PNG: reward, rollout speedup and the drain of the last batch."""
    steps, traces = read_lines(run_dir / "metrics.jsonl"), read_lines(run_dir / "trace.jsonl")
    drawings: list[tuple[Draw, Any]] = []
    if steps:
        if has_any(steps, "reward"):
            drawings.append((panels.draw_reward, steps))
        drawings.append((panels.draw_speedup if np.isfinite(speedups(steps)).any() else panels.draw_seconds, steps))
        if traces and can_drain(whole := whole_trace(traces[-1])):
            drawings.append((panels.draw_drain, whole))
    save_picture(drawings, path)


def save_picture(drawings: Sequence[tuple[Draw, Any]], path: Path) -> None:
    """Writes panels, each a function and its data, as a PNG with three panels in a row.

    The PNG is 1200 pixels wide and 420 pixels high for each row. Without panels it says that no step has finished.
    """
    num_rows = max(1, math.ceil(len(drawings) / PANELS_IN_ROW))
    with matplotlib.rc_context(panels.STYLE):
        figure = Figure((8.0, 2.8 * num_rows), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.08))
        FigureCanvasAgg(figure)
        if drawings:
            axes = figure.subplots(num_rows, min(len(drawings), PANELS_IN_ROW), squeeze=False).ravel()
            for ax, (draw, data) in zip(axes, drawings, strict=False):
                draw(ax, data)
            for ax in axes[len(drawings) :]:
                ax.set_axis_off()
        else:
            figure.text(0.5, 0.5, "no finished step yet", ha="center", color=panels.GREY, fontsize=12)
        with replacing_file(path) as temporary:
            figure.savefig(temporary, dpi=DPI, format="png")


def has_any(steps: Sequence[Record], *keys: str) -> bool:
    """Returns whether a step has a number at one of `keys`."""
    return any(np.isfinite(series(steps, key)).any() for key in keys)


def svg_chart(name: str, size: tuple[float, float], data: Any, *draw: Draw, heights: Sequence[float] = ()) -> str:
    """Returns an SVG of `size` inches with a panel for each of `draw`.

    The panels are side by side, or one below the other with relative `heights`. All ids start with `name`, so that several
    charts can share a page.
    """
    shape = (len(draw), 1) if heights else (1, len(draw))
    with matplotlib.rc_context(panels.STYLE | {"svg.hashsalt": name}):
        figure = Figure(size, layout="constrained")
        axes = figure.subplots(*shape, squeeze=False, sharex=bool(heights), height_ratios=heights or None).ravel()
        for ax, draw_panel in zip(axes, draw, strict=True):
            draw_panel(ax, data)
        if heights:
            axes[0].set_xlabel("")
        buffer = io.StringIO()
        metadata: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    svg = buffer.getvalue()
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])
