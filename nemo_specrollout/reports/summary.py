# SPDX-License-Identifier: Apache-2.0
"""Figures of a whole run, for `summary.json` and for the cards of the report."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_specrollout.reports.records import (
    PHASES,
    Record,
    number,
    ratio_of_sums,
    reduced,
    refreshes,
    reward_window,
    series,
)

_COUNTS = ("tokens_checked", "tokens_equal", "deaths", "seeds_derived")
_TAIL_COUNTS = ("moves", "races", "won_by_racer", "deaths", "diverged")


def summary_of(steps: Sequence[Record]) -> dict[str, Any]:
    """Returns the figures of a run's steps; docs/reference/metrics.md names every key. A ratio without counts is None."""
    if not steps:
        return {"steps": 0}
    rewards, window = series(steps, "reward"), reward_window(len(steps))
    return {
        "steps": len(steps),
        "speedup_estimate": _known(ratio_of_sums(steps, "plain_estimate_s", "rollout_s")),
        "acceptance_length": _known(ratio_of_sums(steps, "num_tokens", "request_steps")),
        "reward_first": _known(reduced(np.mean, rewards[:window])),
        "reward_last": _known(reduced(np.mean, rewards[-window:])),
        "reward_averaged_over_steps": window,
        "largest_logprob_gap": _known(reduced(np.max, series(steps, "logprob_gap"))),
        "alarms": sum(len(step.get("alarms") or ()) for step in steps),
        **{key: int(total) for key in _COUNTS if math.isfinite(total := reduced(np.sum, series(steps, key)))},
        **_head_summary(steps),
        **_tail_summary(steps),
    }


def _head_summary(steps: Sequence[Record]) -> dict[str, Any]:
    """Returns the refreshes and published heads of a run, and the seconds of refreshes with their share of the run."""
    if not any("draft_refresh" in step for step in steps):
        return {}
    trained = refreshes(steps)
    refresh_s = sum(number(record, "refresh_s") for _, record in trained)
    run_s = np.nansum([series(steps, f"{phase}_s") for phase in PHASES])
    return {
        "refreshes": len(trained),
        "heads_published": sum(bool(record.get("published")) for _, record in trained),
        "refresh_s": refresh_s,
        "refresh_share": _known(refresh_s / (run_s + refresh_s) if run_s + refresh_s else math.nan),
    }


def _tail_summary(steps: Sequence[Record]) -> dict[str, Any]:
    """Returns what moves and races did, or nothing for a run with one engine. `tail_saved_s` is None without an estimate."""
    tails = [step for step in steps if "tail" in step]
    if not tails:
        return {}
    counts = {key: reduced(np.sum, series(tails, f"tail.{key}")) for key in _TAIL_COUNTS}
    seconds = series(tails, "rollout_s")
    idle_share = reduced(np.sum, series(tails, "tail.idle_share") * seconds) / reduced(np.sum, seconds)
    return {
        **{f"tail_{key}": int(count) for key, count in counts.items() if math.isfinite(count)},
        **({"tail_idle_share": idle_share} if math.isfinite(idle_share) else {}),
        "tail_saved_s": _known(reduced(np.sum, series(tails, "tail.saved_s"))),
    }


def _known(value: float) -> float | None:
    """Returns None for NaN, which JSON does not have."""
    return float(value) if math.isfinite(value) else None
