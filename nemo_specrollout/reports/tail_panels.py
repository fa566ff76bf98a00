# SPDX-License-Identifier: Apache-2.0
"""What a report shows of the tail of a rollout over several workers: who had what when, who moved, who raced and who won."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from nemo_specrollout.reports.chart_panels import BLUE, GREEN, GREY, INK, ORANGE, PALE, PINK, RED, SKY, dark, light
from nemo_specrollout.reports.records import Record, number, series

WORKER_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, "#8c959f")
MOST_LANES, MOST_ROWS = 12, 14
MARKS: Mapping[str, Mapping[str, Any]] = {
    "won": {"marker": "o", "color": INK, "markersize": 4.5},
    "moved": {"marker": ">", "color": INK, "markersize": 5.5},
    "beaten": {"marker": "x", "color": INK, "markersize": 5, "markeredgewidth": 1.5},
    "gave up": {"marker": "|", "color": INK, "markersize": 8, "markeredgewidth": 1.8},
    "died": {"marker": "X", "color": RED, "markersize": 7},
    "diverged": {"marker": "D", "color": RED, "markersize": 4.5},
    "abandoned": {"marker": "s", "color": GREY, "markersize": 4},
}
"""How the end of a span is marked, by its outcome."""


def tail_summary(steps: Sequence[Record]) -> dict[str, Any]:
    """Figures of a whole run for `summary.json`; nothing for a run with one worker. `tail_saved_s` is None where no step
    has an estimate."""
    tails = [s for s in steps if "tail" in s]
    if not tails:
        return {}
    counts = {f"tail_{k}": int(np.nansum(series(tails, f"tail.{k}"))) for k in _COUNTS}
    saved_s, seconds = series(tails, "tail.saved_s"), series(tails, "rollout_s")
    return {
        **counts,
        "tail_idle_share": float(np.nansum(series(tails, "tail.idle_share") * seconds) / np.nansum(seconds)),
        "tail_saved_s": float(np.nansum(saved_s)) if np.isfinite(saved_s).any() else None,
    }


_COUNTS = ("moves", "races", "won_by_racer", "deaths", "diverged")


def shown_timeline(timelines: Sequence[Record]) -> Record | None:
    """Of a run's rollouts the one where most was saved; of those without an estimate the last."""
    drawn = [t for t in timelines if t.get("spans")]
    return max(reversed(drawn), key=lambda t: _or_least(number(t, "saved_s")), default=None)


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def shown_requests(spans: Sequence[Record]) -> list[int]:
    """Requests that are worth a row, the first to end first: those that several workers had, and of the others the last."""
    ends: dict[int, float] = {}
    workers: dict[int, set[int]] = {}
    for span in spans:
        ends[span["request"]] = max(span["end_s"], ends.get(span["request"], 0.0))
        workers.setdefault(span["request"], set()).add(span["worker"])
    ranked = sorted(ends, key=lambda r: (len(workers[r]) > 1, ends[r]), reverse=True)
    return sorted(ranked[:MOST_ROWS], key=lambda r: ends[r])


def draw_lanes(ax: Axes, timeline: Record) -> None:
    """A lane for each worker: its running requests."""
    spans, names = timeline["spans"], worker_names(timeline)
    running = [_running([s for s in spans if s["worker"] == w]) for w in range(num_lanes(timeline))]
    most = max((counts.max(initial=0) for _, counts in running), default=1) or 1
    for lane, (at_s, counts) in enumerate(running):
        colour, base = worker_colour(lane), -lane
        heights = base + 0.86 * np.sqrt(counts / most)  # one request is to be seen beside a hundred
        ax.fill_between(at_s, base, heights, step="post", color=light(colour), linewidth=0)
        ax.step(at_s, heights, where="post", color=colour, linewidth=1.2)
        ax.annotate(f"up to {counts.max(initial=0)}", (0, base), (6, 4), textcoords="offset points", fontsize=7.5,
                    color=dark(colour))  # fmt: skip
    ax.set_yticks([0.3 - lane for lane in range(len(running))], names[: len(running)])
    for label, lane in zip(ax.get_yticklabels(), range(len(running)), strict=True):
        label.set_color(dark(worker_colour(lane)))
    left_out = len(names) - len(running)
    ax.set_title("Running requests, as square roots" + (f"; {left_out} more workers are left out" if left_out else ""))
    saved_s = number(timeline, "saved_s")
    ax.set_title(
        f"saved {round(saved_s, 2) + 0.0:.2f} s, by estimate" if math.isfinite(saved_s) else "", loc="right", color=GREY
    )
    ax.set_ylim(0.94 - len(running), 0.98)
    _bare(ax)
    _frame(ax, timeline)


def draw_requests(ax: Axes, timeline: Record) -> None:
    """A row for each request that is worth one, a bar for each worker that had it, a mark where that ended."""
    spans = timeline["spans"]
    requests = shown_requests(spans)
    spans = sorted(spans, key=lambda s: s["start_s"])
    for row, request in enumerate(requests):
        _draw_row(ax, row, [s for s in spans if s["request"] == request])
    ax.set_yticks(range(len(requests)), [f"request {r}" for r in requests])
    ax.set_ylim(-0.7, len(requests) - 0.3)
    ax.set_title("Requests that moved, were raced, or ended last")
    ax.set_xlabel(f"seconds into the rollout of step {timeline.get('step')}")
    _bare(ax)
    _frame(ax, timeline)
    _legend(ax, {s["outcome"] for s in spans if s["request"] in requests})


def _draw_row(ax: Axes, row: int, spans: Sequence[Record]) -> None:
    """Bars of workers that had the request at a time lie side by side."""
    tracks = _tracks(spans)
    height = 0.78 / (max(tracks) + 1)
    for track, span in zip(tracks, spans, strict=True):
        middle = row + 0.39 - height * (track + 0.5)
        colour, seconds = worker_colour(span["worker"]), span["end_s"] - span["start_s"]
        ax.barh(middle, seconds, height * 0.9, span["start_s"], color=light(colour), edgecolor=colour, linewidth=0.8)
        mark = MARKS.get(span["outcome"], MARKS["abandoned"])
        ax.plot([span["end_s"]], [middle], linestyle="", zorder=4, clip_on=False, **mark)
        ax.annotate(str(span["worker"]), (span["start_s"], middle), (6, 0), textcoords="offset points", va="center",
                    color=dark(colour), fontsize=7, clip_on=True)  # fmt: skip


def _tracks(spans: Sequence[Record]) -> list[int]:
    """For each span, in the order in which they began, the first track that is free then."""
    free_s: list[float] = []
    tracks = []
    for span in spans:
        track = next((i for i, until in enumerate(free_s) if until <= span["start_s"]), len(free_s))
        free_s[track:] = [span["end_s"], *free_s[track + 1 :]]
        tracks.append(track)
    return tracks


def _running(spans: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """When the number of runs changes, seconds, and what it is from then on."""
    times = np.array([0.0, *(s["start_s"] for s in spans), *(s["end_s"] for s in spans)])
    changes = np.repeat([0, 1, -1], [1, len(spans), len(spans)])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order])


def _frame(ax: Axes, timeline: Record) -> None:
    """The end of the rollout, and where it would have been without moves and races."""
    end_s, saved_s = _end_s(timeline["spans"]), number(timeline, "saved_s")
    ax.set_xlim(0, 1.02 * max(end_s, end_s + np.nan_to_num(saved_s)))
    ax.axvline(end_s, color=GREY, linewidth=1)
    if math.isfinite(saved_s):
        ax.axvline(end_s + saved_s, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))


def _legend(ax: Axes, outcomes: set[str]) -> None:
    handles = [Line2D([], [], linestyle="", label=name, **mark) for name, mark in MARKS.items() if name in outcomes]
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1.01), ncols=len(handles), borderaxespad=0,
              borderpad=0, handlelength=1, handletextpad=0.4, columnspacing=1.2)  # fmt: skip


def _bare(ax: Axes) -> None:
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9))
    ax.spines["bottom"].set_color(PALE)


def _end_s(spans: Sequence[Record]) -> float:
    return max((s["end_s"] for s in spans), default=0.0)


def num_lanes(timeline: Record) -> int:
    """Workers that get a lane."""
    return min(int(timeline["num_workers"]), MOST_LANES)


def worker_names(timeline: Record) -> list[str]:
    """Of each worker its number, and how it drafts if not all do so alike."""
    methods = list(timeline.get("methods") or ())
    tell = len(set(methods)) > 1
    return [f"worker {w}" + (f": {methods[w]}" if tell else "") for w in range(int(timeline["num_workers"]))]


def worker_colour(worker: int) -> str:
    return WORKER_COLOURS[worker % len(WORKER_COLOURS)]
