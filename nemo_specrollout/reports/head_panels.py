# SPDX-License-Identifier: Apache-2.0
"""Panels and summary of a draft head that is refreshed during a run: acceptance of its drafts, and cost."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from nemo_specrollout.config.drafter_configs import MODEL_DRAFTERS
from nemo_specrollout.reports.chart_panels import BLUE, GREEN, GREY, MAX_MARKERS, PHASES, RED, over_steps
from nemo_specrollout.reports.records import Record, number, series


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
