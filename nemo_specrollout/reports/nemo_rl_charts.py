# SPDX-License-Identifier: Apache-2.0
"""Charts and picture of a run in NeMo-RL. Panels without a number are left out."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nemo_specrollout.reports import panels
from nemo_specrollout.reports.charts import DPI, HOW_TO_READ, has_any, save_picture, svg_chart
from nemo_specrollout.reports.panels import BLUE, GREEN, GREY, ORANGE, PALE, PHASES, PINK, RED, over_steps
from nemo_specrollout.reports.records import NemoRlRun, Record, acceptance_totals, series

HALF, WHOLE = (4.4, 2.5), (9.0, 2.3)
"""Sizes of charts with one and with two panels, inches."""
MOST_BARS = 120
"""Steps up to which the phases of a step are drawn as bars."""
MOST_PICTURE_PANELS = 6
STEP_PHASES = {
    "generation": PHASES["rollout"],
    "logprob": PHASES["logprob"],
    "train": PHASES["train"],
    "refit": PHASES["refit"],
    "validation": PINK,
    "checkpoint": GREEN,
    "other": PALE,
}
"""Phases of a step in the order of the stack, with colours. Each is recorded as `<phase>_s`."""
CHARTS = {
    "Reward": (("reward",), HOW_TO_READ["Reward"]),
    "Loss": (("loss",), "The policy loss of a step, as NeMo-RL logs it."),
    "Speculation": (
        ("speedup", "tokens"),
        "Left: estimated seconds without drafts over measured seconds, from the step times of the engines. Right: "
        "tokens that a request gains in an engine step, which is 1 without speculation, and drafts that are verified in the "
        "step.",
    ),
    "Where a step's time goes": (
        ("time",),
        "NeMo-RL's timers, each bar a step; labels are means. Speculation shortens the blue part "
        "only, which in asynchronous GRPO is the time for which the trainer waits.",
    ),
    "Share of generation": (
        ("share",),
        "How much of a step the trainer spends on generation. In asynchronous GRPO that is the time for which it waits.",
    ),
    "Acceptance by position": (("positions",), HOW_TO_READ["Acceptance by position"]),
    "Acceptance, step by step": (
        ("acceptance",),
        "Of each drafter's tokens, the share that equalled the policy's own token.",
    ),
    "Engine against trainer": (
        ("gap",),
        HOW_TO_READ["Engine against trainer"] + " Above the dashed line an alarm is raised.",
    ),
    "Staleness": (
        ("staleness",),
        "Training steps by which the policy that began a sample lags behind the trained one: for the samples that "
        "ended in a step and, by NeMo-RL's count, for the samples that the step was trained on.",
    ),
    "Draft head": (("head_acceptance", "head_age"), HOW_TO_READ["Draft head"]),
    "The tail": (
        ("moves", "saved"),
        "When an engine runs out of requests, requests of other engines move to it or are raced. All racers make the "
        "same tokens, so the first to end delivers the response.",
    ),
    "Remote drafters": (
        ("drafts_in_time", "run_ahead"),
        "In time: share of the request steps with a draft, of those that wanted one. Wasted: share of all "
        "drafts without use. Drafts at hand: at most as many as one step may take.",
    ),
}
"""Charts in the order of the page: title -> names of panels, explanation."""
PICTURE = ("reward", "speedup", "time", "tokens", "acceptance", "gap", "share")
"""Panels of the picture, the most important first."""
GAP_LINES = (("KL error", "gen_kl_error", ORANGE), ("gap", "logprob_gap.mean", BLUE))
Draw = Callable[[Axes, Sequence[Record]], None]


@dataclass(frozen=True)
class LinePanel:
    """Draws lines over the steps, each with its label at its end."""

    title: str
    lines: Sequence[tuple[str, str, str]]
    """Label, key of the step and colour of each line. A label may contain the line's {last}, {mean} and {total}."""
    floor: float | None = None
    """Lower end of the y axis, or None to fit the lines."""
    top: float = math.nan
    """Least upper end of the y axis, if it has a floor."""
    level: float | None = None
    """Height of a grey line across the panel."""
    is_share: bool = False
    """Whether the values are shares of a whole, shown in per cent."""
    is_count: bool = False
    """Whether the y axis has whole numbers only."""

    def __call__(self, ax: Axes, steps: Sequence[Record]) -> None:
        over_steps(ax, steps, self.title)
        labels, highest = [], self.top
        for label, key, colour in self.lines:
            values = series(steps, key)
            known = values[np.isfinite(values)]
            if len(known):
                ax.plot(series(steps, "step"), values, panels.line_format(steps), color=colour)
                text = label.format(last=known[-1], mean=known.mean(), total=known.sum())
                labels.append((float(known[-1]), text, colour))
                highest = float(np.nanmax([highest, known.max() * 1.08]))
        if self.is_share:
            ax.set_ylim(0, 1.02)
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif self.floor is not None:
            ax.set_ylim(self.floor, highest if highest > self.floor else self.floor + 1)
        panels.label_right(ax, labels)
        if self.is_count:
            ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        if self.level is not None:
            ax.axhline(self.level, color=GREY, linewidth=1)


LINE_PANELS = {
    "loss": LinePanel("Loss of a step", [("{last:.2g}", "loss", BLUE)], level=0),
    "tokens": LinePanel(
        "Tokens a request gains in a step",
        [("tokens", "tokens_per_request_step", BLUE), ("drafts", "draft_tokens_per_request_step", ORANGE)],
        floor=0,
        level=1,
    ),
    "share": LinePanel("Of a step's seconds", [("mean {mean:.0%}", "generation_share", BLUE)], is_share=True),
    "staleness": LinePanel(
        "Training steps behind",
        [
            ("oldest", "policy_lag_max", GREY),
            ("mean", "policy_lag_mean", BLUE),
            ("trained on", "avg_trajectory_age", ORANGE),
        ],
        floor=0,
        top=1.2,
        is_count=True,
    ),
    "head_age": LinePanel("Age of the head (policy versions)", [("oldest", "head_age", BLUE)], floor=0, is_count=True),
    "moves": LinePanel(
        "Requests that moved, or were raced",
        [
            ("moves", "tail/moves", BLUE),
            ("races", "tail/races", ORANGE),
            ("won by racer", "tail/won_by_racer", GREEN),
        ],
        floor=0,
        is_count=True,
    ),
    "saved": LinePanel("Seconds saved in a step, by estimate", [("all {total:.3g} s", "tail/saved_s", BLUE)], level=0),
    "drafts_in_time": LinePanel(
        "Drafts in time, and wasted",
        [("in time", "draft_occupancy", BLUE), ("wasted", "draft_waste", RED)],
        is_share=True,
    ),
    "run_ahead": LinePanel("Drafts at hand, per request and step", [("tokens", "draft_run_ahead", BLUE)], floor=0),
}
"""Panels with lines that do not depend on the run's block or drafters."""


def panels_of(run: NemoRlRun) -> dict[str, Draw]:
    """Returns the panels for which the run has numbers, by name."""
    acceptance = LinePanel(
        "Accepted of a drafter's tokens",
        [(name, f"{name}/acceptance", panels.drafter_colour(i)) for i, name in enumerate(run.drafters)],
        is_share=True,
    )
    lines = {**LINE_PANELS, "acceptance": acceptance}
    found: dict[str, tuple[Draw, bool]] = {
        name: (panel, has_any(run.steps, *(key for _, key, _ in panel.lines))) for name, panel in lines.items()
    }
    is_stale = any(run.most(key) > 0 for key in ("policy_lag_max", "avg_trajectory_age"))
    found["staleness"] = (LINE_PANELS["staleness"], is_stale)
    totals = acceptance_totals(run.steps)
    ratios, overall = series(run.steps, "speedup_estimate"), run.mean("speedup_estimate")
    title = "Log-prob gap and KL error (nats a token)"
    gap = partial(panels.draw_gaps, title=title, lines=GAP_LINES, alarm=run.alarm_bound)
    has_refreshed_head = has_any(run.steps, "head_age", "heads_published", "draft_refresh.refresh_s")
    found |= {
        "reward": (panels.draw_reward, has_any(run.steps, "reward")),
        "speedup": (
            partial(
                panels.draw_ratios,
                title="Decoding speedup, by estimate (x)",
                ratios=ratios,
                overall=overall,
                name="mean",
            ),
            has_any(run.steps, "speedup_estimate"),
        ),
        "time": (_draw_time, has_any(run.steps, "step_s")),
        "positions": (lambda ax, steps: panels.draw_acceptance(ax, totals), bool(totals)),
        "gap": (gap, has_any(run.steps, *(key for _, key, _ in GAP_LINES))),
        "head_acceptance": (
            panels.draw_head_acceptance,
            has_refreshed_head and bool((panels.head_acceptance(run.steps) >= 0).any()),
        ),
    }
    return {name: draw for name, (draw, has_numbers) in found.items() if has_numbers}


def charts_of(run: NemoRlRun) -> Iterator[tuple[str, str, str, bool]]:
    """Yields the charts in the order of the page: title, SVG, explanation, and whether it is as wide as the page."""
    drawn = panels_of(run)
    for title, (names, how_to_read) in CHARTS.items():
        shown = [drawn[name] for name in names if name in drawn]
        if shown:
            id_prefix = "".join(letter for letter in title.lower() if letter.isalpha())
            is_wide = len(shown) > 1
            yield title, svg_chart(id_prefix, WHOLE if is_wide else HALF, run.steps, *shown), how_to_read, is_wide


def picture(run: NemoRlRun, path: Path) -> None:
    """Writes the run in one PNG with at most two rows of three panels."""
    drawn = panels_of(run)
    chosen = [drawn[name] for name in PICTURE if name in drawn][:MOST_PICTURE_PANELS]
    save_picture([(draw, run.steps) for draw in chosen], path)


def _draw_time(ax: Axes, steps: Sequence[Record]) -> None:
    panels.label_right(ax, panels.stack_phases(ax, steps, STEP_PHASES, MOST_BARS))


def figure_of(path: Path) -> Figure:
    """Returns the picture at `path` as a figure with the same pixels, for loggers that take figures.

    Weights & Biases turns a figure without an image into a chart of its own, which lacks much of the figure.
    """
    pixels = imread(path)
    figure = Figure((pixels.shape[1] / DPI, pixels.shape[0] / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.imshow(pixels, aspect="auto", interpolation="none")
    ax.set_axis_off()
    return figure
