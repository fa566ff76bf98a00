# SPDX-License-Identifier: Apache-2.0
"""The charts of a run as SVG texts, and its picture as a PNG file. A panel for which the run has no number is left out."""

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.layout_engine import ConstrainedLayoutEngine

from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.reports import panels
from nemo_specrollout.reports.panels import BLUE, GREEN, GREY, ORANGE, RED, LinePanel
from nemo_specrollout.reports.records import Run, acceptance_totals, accepted_shares
from nemo_specrollout.storage.files import replacing_file

DPI = 150
PANELS_IN_ROW, MAX_PANELS = 3, 6
HALF = (4.4, 2.5)
"""Size of a chart with one panel, in inches."""
WHOLE = (9.0, 2.4)
"""Size of a chart with two panels, in inches."""
Draw = Callable[[Axes, Any], None]
"""Function that draws data into a pair of matplotlib axes."""
CHARTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Charts in the order of the page. Each title has the names of the chart's panels and a text that says how to read it."""
PICTURE = ("reward", "speedup", "time", "tokens", "acceptance", "gap")
"""Names of the picture's panels, the most important first."""
LINE_PANELS = {
    "seconds": LinePanel(
        "Seconds of a rollout",
        [("measured", "rollout_s", BLUE), ("plain, estimated", "plain_estimate_s", GREY)],
        is_filled=True,
    ),
    "tokens": LinePanel(
        "Tokens per request and engine step",
        [("tokens", "acceptance_length", BLUE), ("drafts", "draft_tokens_per_request_step", ORANGE)],
        level=1,
    ),
    "head_age": LinePanel("Age of the head (policy versions)", [("oldest", "head_age", BLUE)], is_count=True),
    "moves": LinePanel(
        "Requests that moved, or were raced",
        [("moves", "tail.moves", BLUE), ("races", "tail.races", ORANGE), ("won by racer", "tail.won_by_racer", GREEN)],
        is_count=True,
    ),
    "saved": LinePanel(
        "Seconds saved in a step, by estimate",
        [("all {total:.3g} s", "tail.saved_s", BLUE)],
        level=0,
        is_from_zero=False,
    ),
    "in_time": LinePanel(
        "Drafts in time, and wasted",
        [("in time", "draft_supply.occupancy", BLUE), ("wasted", "draft_supply.waste", RED)],
        is_share=True,
    ),
    "ahead": LinePanel(
        "Tokens of a step's responses",
        [("right when made ahead", "ahead_kept", BLUE), ("with branches", "ahead_right", GREEN)],
        is_share=True,
    ),
    "ahead_flight": LinePanel(
        "Tokens in flight as a step began",
        [
            ("for it", "ahead_tokens", BLUE),
            ("next step", "ahead_tokens_2", GREEN),
            ("third", "ahead_tokens_3", ORANGE),
            ("fourth", "ahead_tokens_4", GREY),
        ],
        is_count=True,
    ),
    "ahead_parted": LinePanel(
        "Texts that an update has changed",
        [("changed", "ahead_parted", ORANGE), ("on a branch again", "ahead_followed", GREEN)],
        is_count=True,
    ),
    "ahead_s": LinePanel(
        "Seconds of a step",
        [
            ("idle engines worked ahead", "ahead_s", GREY),
            ("own requests waited, by prices", "ahead_delay_s", ORANGE),
            ("saved, by estimate", "ahead_saved_s", BLUE),
        ],
        is_from_zero=False,
    ),
    "run_ahead": LinePanel("Drafts at hand, per request and step", [("tokens", "draft_supply.run_ahead", BLUE)]),
}
GAP_LINES = (("KL error", "gen_kl_error", ORANGE), ("largest", "logprob_gap_max", GREY), ("gap", "logprob_gap", BLUE))
_HEAD_SHARES = partial(accepted_shares, drafters=MODEL_DRAFTERS)
HEAD = LinePanel("Accepted of the head's drafts", [("of all", _HEAD_SHARES, BLUE)], is_share=True)
STALENESS = LinePanel(
    "Training steps behind",
    [
        ("oldest", "policy_lag_max", GREY),
        ("mean", "policy_lag_mean", BLUE),
        ("trained on", "avg_trajectory_age", ORANGE),
    ],
    is_count=True,
)


def panels_of(run: Run) -> dict[str, Draw]:
    """Returns the functions that draw the run's panels, by the panels' names. Panels without numbers are left out."""
    totals = acceptance_totals(run.steps)
    lines = [
        (name, partial(accepted_shares, drafters=(name,)), panels.drafter_colour(i)) for i, name in enumerate(totals)
    ]
    gap = LinePanel("Engine to trainer (nats a token)", GAP_LINES, alarm=run.alarm_bound, is_log=True)
    found: dict[str, tuple[Draw, Any]] = {
        **{name: (panel, math.isfinite(panel.largest(run.steps))) for name, panel in LINE_PANELS.items()},
        "staleness": (STALENESS, STALENESS.largest(run.steps) > 0),
        "reward": (panels.draw_reward, run.has("reward")),
        "speedup": (panels.draw_speedup, run.has("speedup_estimate")),
        "time": (panels.draw_time, run.has("other_s")),
        "positions": (lambda ax, _: panels.draw_acceptance(ax, totals), totals),
        "acceptance": (LinePanel("Accepted of a drafter's tokens", lines, is_share=True), totals),
        "gap": (gap, math.isfinite(gap.largest(run.steps))),
        "head_acceptance": (HEAD, run.has("head_age") and math.isfinite(HEAD.largest(run.steps))),
    }
    return {name: draw for name, (draw, has_numbers) in found.items() if has_numbers}


def charts_of(run: Run) -> Iterator[tuple[str, str, str, bool]]:
    """Yields for each chart its title, its SVG, a text that says how to read it, and whether it is as wide as the page.

    The charts come in the order of the page.
    """
    drawn = panels_of(run)
    for title, chart in CHARTS.items():
        shown = [drawn[name] for name in chart["panels"] if name in drawn]
        if shown:
            with style():
                figure = Figure(WHOLE if len(shown) > 1 else HALF, layout="constrained")
                for ax, draw in zip(figure.subplots(1, len(shown), squeeze=False).ravel(), shown, strict=True):
                    draw(ax, run.steps)
                yield title, svg_of(figure, title), chart["how_to_read"], len(shown) > 1


def style() -> Any:
    return matplotlib.rc_context(panels.STYLE)


def svg_of(figure: Figure, title: str) -> str:
    """Returns a figure as SVG. All ids begin with the letters of `title`, so that several charts can be on one page."""
    name = "".join(letter for letter in title.lower() if letter.isalpha())
    buffer = io.StringIO()
    metadata: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    svg = buffer.getvalue()
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])


def save_picture(run: Run, path: Path, extra: Sequence[tuple[Draw, Any]] = ()) -> None:
    """Writes a picture of the run as one PNG file of at most two rows of panels. A row is 1200 x 420 pixels.

    `extra` are further panels, which follow the first two.
    """
    drawn = panels_of(run) if run.steps else {}
    drawings: list[tuple[Draw, Any]] = [(drawn[name], run.steps) for name in PICTURE if name in drawn]
    drawings = [*drawings[:2], *extra, *drawings[2:]][:MAX_PANELS]
    num_rows = max(1, math.ceil(len(drawings) / PANELS_IN_ROW))
    with style():
        figure = Figure((8.0, 2.8 * num_rows), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.08))
        FigureCanvasAgg(figure)
        if drawings:
            axes = figure.subplots(num_rows, min(len(drawings), PANELS_IN_ROW), squeeze=False).ravel()
            for ax, (draw, data) in zip(axes, drawings, strict=False):
                draw(ax, data)
            for ax in axes[len(drawings) :]:
                ax.set_axis_off()
        else:
            figure.text(0.5, 0.5, "no finished step yet", ha="center", color=GREY, fontsize=12)
        with replacing_file(path) as temporary:
            figure.savefig(temporary, dpi=DPI, format="png")


def figure_of(path: Path) -> Figure:
    """Returns the picture at `path` as a figure with the same pixels, for loggers that take figures.

    The figure consists of one image. Other figures would be turned into charts of Weights & Biases, and lose much of their
    content.
    """
    pixels = imread(path)
    figure = Figure((pixels.shape[1] / DPI, pixels.shape[0] / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.imshow(pixels, aspect="auto", interpolation="none")
    ax.set_axis_off()
    return figure
