# SPDX-License-Identifier: Apache-2.0
"""Charts of one rollout of a local run over time, which show how a batch drains and what engines did in its tail.

They are drawn from `trace.jsonl` and `timeline.jsonl`, which only local runs write. The records say "worker" for an engine. If
there is nothing to draw, a chart is the empty string.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lab.local.traces import can_drain, column, drafts_by_name, seconds_since_start, whole_trace
from nemo_specrollout.reports.charts import style, svg_of
from nemo_specrollout.reports.panels import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PINK,
    RED,
    SILVER,
    SKY,
    dark,
    drafter_colour,
    light,
)
from nemo_specrollout.reports.records import Record, number

ENGINE_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, SILVER)
MAX_ENGINES = 12
"""Most engines that the chart of a rollout's tail shows."""
MAX_ROWS = 14
"""Most requests that the chart of a rollout's tail shows."""
MARKS: Mapping[str, Mapping[str, Any]] = {
    "won": {"marker": "o", "color": INK, "markersize": 4.5},
    "moved": {"marker": ">", "color": INK, "markersize": 5.5},
    "beaten": {"marker": "x", "color": INK, "markersize": 5, "markeredgewidth": 1.5},
    "gave up": {"marker": "|", "color": INK, "markersize": 8, "markeredgewidth": 1.8},
    "died": {"marker": "X", "color": RED, "markersize": 7},
    "diverged": {"marker": "D", "color": RED, "markersize": 4.5},
    "abandoned": {"marker": "s", "color": GREY, "markersize": 4},
}
"""Marker at the end of an attempt, by the attempt's outcome."""


def drain_chart(trace: Record) -> str:
    """Returns an SVG of the number of running requests during a rollout, and below it the draft tokens of each engine step."""
    whole = whole_trace(trace)
    if not can_drain(whole):
        return ""
    if not drafts_by_name(whole):
        return _chart("drain", whole, {draw_drain: 2.2})
    return _chart("drain", whole, {draw_drain: 1.7, draw_drafts: 1.7})


def tail_chart(timelines: Sequence[Record]) -> str:
    """Returns an SVG of engines and requests over time, for the rollout in which moves and races saved the most seconds."""
    shown = shown_timeline(timelines)
    if shown is None:
        return ""
    num_requests = len(shown_requests(shown["spans"]))
    return _chart(
        "tail", shown, {draw_engines: 0.5 + 0.36 * num_shown_engines(shown), draw_requests: 0.9 + 0.2 * num_requests}
    )


def _chart(title: str, data: Record, panels: Mapping[Callable[[Axes, Record], None], float]) -> str:
    """Returns an SVG whose panels are one below another and share the time axis.

    `panels` maps the function that draws a panel to the panel's height in inches.
    """
    heights = list(panels.values())
    with style():
        figure = Figure((9.0, sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights).ravel()
        for ax, draw in zip(axes, panels, strict=True):
            draw(ax, data)
        if len(heights) > 1:
            axes[0].set_xlabel("")
        return svg_of(figure, title)


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
    layers = []
    colours = []
    patches = []
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
    ax.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1, 0.98),
        ncols=len(patches),
        borderaxespad=0,
        borderpad=0,
        handlelength=1,
        columnspacing=1.2,
    )


def shown_timeline(timelines: Sequence[Record]) -> Record | None:
    """Returns the timeline of the rollout in which moves and races saved most, or of the last rollout if no saving is known.

    Returns None if no timeline has an attempt.
    """
    drawn = [t for t in timelines if t.get("spans")]
    return max(reversed(drawn), key=lambda t: np.nan_to_num(number(t, "saved_s"), nan=-math.inf), default=None)


def shown_requests(spans: Sequence[Record]) -> list[int]:
    """Returns up to `MAX_ROWS` requests to show, in the order in which they ended.

    Requests that several engines had are chosen first, and then those that ended last.
    """
    ends: dict[int, float] = {}
    engines: dict[int, set[int]] = {}
    for span in spans:
        ends[span["request"]] = max(span["end_s"], ends.get(span["request"], 0.0))
        engines.setdefault(span["request"], set()).add(span["worker"])
    ranked = sorted(ends, key=lambda r: (len(engines[r]) > 1, ends[r]), reverse=True)
    return sorted(ranked[:MAX_ROWS], key=lambda r: ends[r])


def draw_engines(ax: Axes, timeline: Record) -> None:
    """Draws the running requests of each engine, one engine below the other."""
    spans = timeline["spans"]
    names = engine_names(timeline)
    running = [_running([s for s in spans if s["worker"] == engine]) for engine in range(num_shown_engines(timeline))]
    most = max((counts.max(initial=0) for _, counts in running), default=1) or 1
    for engine, (at_s, counts) in enumerate(running):
        colour = engine_colour(engine)
        base = -engine
        heights = base + 0.86 * np.sqrt(counts / most)  # so that one request stays visible beside a hundred
        ax.fill_between(at_s, base, heights, step="post", color=light(colour), linewidth=0)
        ax.step(at_s, heights, where="post", color=colour, linewidth=1.2)
        ax.annotate(
            f"up to {counts.max(initial=0)}",
            (0, base),
            (6, 4),
            textcoords="offset points",
            fontsize=7.5,
            color=dark(colour),
        )
    ax.set_yticks([0.3 - engine for engine in range(len(running))], names[: len(running)])
    for engine, label in enumerate(ax.get_yticklabels()):
        label.set_color(dark(engine_colour(engine)))
    left_out = len(names) - len(running)
    ax.set_title("Running requests, as square roots" + (f"; {left_out} more workers are left out" if left_out else ""))
    saved_s = number(timeline, "saved_s")
    ax.set_title(
        f"saved {round(saved_s, 2) + 0.0:.2f} s, by estimate" if math.isfinite(saved_s) else "", loc="right", color=GREY
    )
    ax.set_ylim(0.94 - len(running), 0.98)
    _frame(ax, timeline)


def draw_requests(ax: Axes, timeline: Record) -> None:
    """Draws a row for each shown request. The row has a bar for each engine that had the request, with a mark at its end."""
    spans = timeline["spans"]
    requests = shown_requests(spans)
    spans = sorted(spans, key=lambda s: s["start_s"])
    for row, request in enumerate(requests):
        _draw_row(ax, row, [s for s in spans if s["request"] == request])
    ax.set_yticks(range(len(requests)), [f"request {r}" for r in requests])
    ax.set_ylim(-0.7, len(requests) - 0.3)
    ax.set_title("Requests that moved, were raced, or ended last")
    ax.set_xlabel(f"seconds into the rollout of step {timeline.get('step')}")
    _frame(ax, timeline)
    _legend(ax, {s["outcome"] for s in spans if s["request"] in requests})


def _draw_row(ax: Axes, row: int, spans: Sequence[Record]) -> None:
    """Draws the bars of a request. If engines had the request at the same time, their bars are drawn side by side."""
    tracks = _tracks(spans)
    height = 0.78 / (max(tracks) + 1)
    for track, span in zip(tracks, spans, strict=True):
        middle = row + 0.39 - height * (track + 0.5)
        colour = engine_colour(span["worker"])
        seconds = span["end_s"] - span["start_s"]
        ax.barh(middle, seconds, height * 0.9, span["start_s"], color=light(colour), edgecolor=colour, linewidth=0.8)
        mark = MARKS.get(span["outcome"], MARKS["abandoned"])
        ax.plot([span["end_s"]], [middle], linestyle="", zorder=4, clip_on=False, **mark)
        ax.annotate(
            str(span["worker"]),
            (span["start_s"], middle),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=dark(colour),
            fontsize=7,
            clip_on=True,
        )


def _tracks(spans: Sequence[Record]) -> list[int]:
    """Returns a track for each attempt, such that attempts that overlap in time get different tracks.

    The spans must be sorted by their beginning.
    """
    free_s: list[float] = []
    tracks = []
    for span in spans:
        track = next((i for i, until in enumerate(free_s) if until <= span["start_s"]), len(free_s))
        free_s[track:] = [span["end_s"], *free_s[track + 1 :]]
        tracks.append(track)
    return tracks


def _running(spans: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the times in seconds at which the number of running attempts changes, and the number from each time on."""
    times = np.array([0.0, *(s["start_s"] for s in spans), *(s["end_s"] for s in spans)])
    changes = np.repeat([0, 1, -1], [1, len(spans), len(spans)])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order])


def _frame(ax: Axes, timeline: Record) -> None:
    """Draws a line at the end of the rollout, and one at its estimated end without moves and races.

    Removes the y axis and the grid.
    """
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9))
    ax.spines["bottom"].set_color(PALE)
    end_s = max(s["end_s"] for s in timeline["spans"])
    saved_s = number(timeline, "saved_s")
    ax.set_xlim(0, 1.02 * max(end_s, end_s + np.nan_to_num(saved_s)))
    ax.axvline(end_s, color=GREY, linewidth=1)
    if math.isfinite(saved_s):
        ax.axvline(end_s + saved_s, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))


def _legend(ax: Axes, outcomes: set[str]) -> None:
    handles = [Line2D([], [], linestyle="", label=name, **mark) for name, mark in MARKS.items() if name in outcomes]
    ax.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1.01),
        ncols=len(handles),
        borderaxespad=0,
        borderpad=0,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=1.2,
    )


def num_shown_engines(timeline: Record) -> int:
    """Returns the number of engines that the chart of the rollout's tail shows."""
    return min(int(timeline["num_workers"]), MAX_ENGINES)


def engine_names(timeline: Record) -> list[str]:
    """Returns a label for each engine. It has the engine's number, and the draft method if the engines' methods differ."""
    methods = list(timeline.get("methods") or ())
    tell = len(set(methods)) > 1
    return [f"worker {w}" + (f": {methods[w]}" if tell else "") for w in range(int(timeline["num_workers"]))]


def engine_colour(engine: int) -> str:
    """Returns the colour of an engine."""
    return ENGINE_COLOURS[engine % len(ENGINE_COLOURS)]
