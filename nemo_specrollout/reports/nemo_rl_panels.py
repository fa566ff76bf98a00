# SPDX-License-Identifier: Apache-2.0
"""How the panels look that only a run in NeMo-RL has; colours mean what they mean in a local run's report."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nemo_specrollout.reports.chart_panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PHASES,
    PINK,
    RED,
    drafter_colour,
    draw_gaps,
    draw_ratios,
    label_right,
    line_format,
    over_steps,
    stack_phases,
)
from nemo_specrollout.reports.records import Record, series

STEP_PHASES = {
    "generation": PHASES["rollout"],
    "logprob": PHASES["logprob"],
    "train": PHASES["train"],
    "refit": PHASES["refit"],
    "validation": PINK,
    "checkpoint": GREEN,
    "other": PALE,
}
"""Parts of a step in the order that they are stacked; each is recorded as `<part>_s`."""
MOST_BARS = 120
Line = tuple[str, str, str]
"""Name, key of the step, colour."""


def draw_lines(
    ax: Axes,
    steps: Sequence[Record],
    title: str,
    lines: Sequence[Line],
    floor: float | None = None,
    top: float = math.nan,
    ceiling: float | None = None,
) -> None:
    """Lines with their names at their ends; from `floor` on, and up to `ceiling`, or to `top` at least."""
    over_steps(ax, steps, title)
    labels, highest = [], top
    for name, key, colour in lines:
        values = series(steps, key)
        known = values[np.isfinite(values)]
        if len(known):
            ax.plot(series(steps, "step"), values, line_format(steps), color=colour)
            labels.append((float(known[-1]), name, colour))
            highest = float(np.nanmax([highest, known.max() * 1.08]))
    if floor is not None:
        ax.set_ylim(floor, ceiling or (highest if highest > floor else floor + 1))
    label_right(ax, labels)


def draw_shares(ax: Axes, steps: Sequence[Record], title: str, lines: Sequence[Line]) -> None:
    """The same of shares of a whole."""
    draw_lines(ax, steps, title, lines, floor=0, ceiling=1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def draw_loss(ax: Axes, steps: Sequence[Record]) -> None:
    losses = series(steps, "loss")
    draw_lines(ax, steps, "Loss of a step", [(f"{losses[np.isfinite(losses)][-1]:.2g}", "loss", BLUE)])
    ax.axhline(0, color=GREY, linewidth=1)


def draw_speedup_estimate(ax: Axes, steps: Sequence[Record]) -> None:
    ratios = series(steps, "speedup_estimate")
    draw_ratios(ax, steps, "Decoding speedup, by estimate (x)", ratios, float(np.nanmean(ratios)), "mean")


def draw_tokens(ax: Axes, steps: Sequence[Record]) -> None:
    lines = (("tokens", "tokens_per_request_step", BLUE), ("drafts", "draft_tokens_per_request_step", ORANGE))
    draw_lines(ax, steps, "Tokens a request gains in a step", lines, floor=0)
    ax.axhline(1, color=GREY, linewidth=1)


def draw_step_time(ax: Axes, steps: Sequence[Record]) -> None:
    label_right(ax, stack_phases(ax, steps, STEP_PHASES, MOST_BARS))


def draw_generation_share(ax: Axes, steps: Sequence[Record]) -> None:
    mean = float(np.nanmean(series(steps, "generation_share")))
    draw_shares(ax, steps, "Of a step's seconds", [(f"mean {mean:.0%}", "generation_share", BLUE)])


def draw_acceptance_of(ax: Axes, steps: Sequence[Record], names: Sequence[str]) -> None:
    """Colours are by the order of `names`, as in the chart by position."""
    lines = [(name, f"{name}/acceptance", drafter_colour(i)) for i, name in enumerate(names)]
    draw_shares(ax, steps, "Accepted of a drafter's tokens", lines)


def draw_differences(ax: Axes, steps: Sequence[Record], bound: float) -> None:
    lines = (("KL error", "gen_kl_error", ORANGE), ("gap", "logprob_gap.mean", BLUE))
    draw_gaps(ax, steps, "Log-prob gap and KL error (nats a token)", lines, bound)


def draw_staleness(ax: Axes, steps: Sequence[Record]) -> None:
    lines = (
        ("oldest", "policy_lag_max", GREY),
        ("mean", "policy_lag_mean", BLUE),
        ("trained on", "avg_trajectory_age", ORANGE),
    )
    draw_lines(ax, steps, "Training steps behind", lines, floor=0, top=1.2)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def draw_head_age(ax: Axes, steps: Sequence[Record]) -> None:
    draw_lines(ax, steps, "Age of the head (policy versions)", [("oldest", "head_age", BLUE)], floor=0)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def draw_moves(ax: Axes, steps: Sequence[Record]) -> None:
    lines = (
        ("moves", "tail/moves", BLUE),
        ("races", "tail/races", ORANGE),
        ("won by racer", "tail/won_by_racer", GREEN),
    )
    draw_lines(ax, steps, "Requests that moved, or were raced", lines, floor=0)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def draw_saved(ax: Axes, steps: Sequence[Record]) -> None:
    total = float(np.nansum(series(steps, "tail/saved_s")))
    draw_lines(ax, steps, "Seconds saved in a step, by estimate", [(f"all {total:.3g} s", "tail/saved_s", BLUE)])
    ax.axhline(0, color=GREY, linewidth=1)


def draw_supply(ax: Axes, steps: Sequence[Record]) -> None:
    lines = (("in time", "draft_occupancy", BLUE), ("wasted", "draft_waste", RED))
    draw_shares(ax, steps, "Drafts in time, and wasted", lines)


def draw_run_ahead(ax: Axes, steps: Sequence[Record]) -> None:
    draw_lines(ax, steps, "Drafts at hand, per request and step", [("tokens", "draft_run_ahead", BLUE)], floor=0)
