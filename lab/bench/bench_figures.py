# SPDX-License-Identifier: Apache-2.0
"""Computes the rows of `bench.json` from the rounds of a bench, by comparing seconds per token within each round.

Shapes: N bins by number of running requests.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.bench.bench_rounds import Entrant
from lab.bench.bench_rows import FIXED, OURS, PLAIN
from lab.bench.running_bins import LABELS, BinnedStats
from lab.local.statistics import RolloutStats
from lab.local.traces import column

Figures = dict[str, Any]
# A batch counts as full if it has more than this share of the largest number of requests.
FULL = 0.75
FEWEST_TOKENS = 32
"""A row's speed in a bin counts for a round only if the row made at least this many tokens there. With fewer tokens, a single
engine step could decide the speed."""


def figures_of(groups: Sequence[Sequence[Entrant]]) -> list[Figures]:
    """Returns the rows of `bench.json`.

    The entrants of a group took turns. Each group has a `plain` of its own, with which its other rows are compared. Our own
    rows are also compared with the fastest row that has a fixed method and number of drafts.
    """
    rows = []
    speedups = {}
    for number, entrants in enumerate(groups):
        plain = next(e for e in entrants if e.row.kind == PLAIN)
        for entrant in entrants:
            if entrant is not plain or number == 0:
                rows.append(row_figures(entrant, plain))
                speedups[entrant.row.name] = _over(plain, entrant)
    if (best := best_fixed(rows)) is not None:
        for row in (r for r in rows if r["kind"] == OURS):
            pairs = zip(speedups[row["mode"]], speedups[best["mode"]], strict=True)
            row |= {"best_fixed": best["mode"], **_spread("over_best_fixed", [ours / rival for ours, rival in pairs])}
    winners = best_by_running(rows)
    for row in rows:
        for entry in row["by_running"]:
            entry["is_best"] = winners.get(entry["running"]) is row
    return rows


def row_figures(entrant: Entrant, plain: Entrant) -> Figures:
    """Returns the row of `bench.json` for `entrant`, whose speed is compared with that of `plain`."""
    stats = [r.stats for r in entrant.rounds]
    seconds = sum(s.seconds for s in stats)
    tokens = sum(s.num_tokens for s in stats)
    has_plain_tokens = entrant.row.has_plain_tokens
    # An engine without our worker counts no request steps itself, so the bench counts them from outside.
    counted = (r if entrant.row.is_vllms_own else r.stats for r in entrant.rounds)
    return {
        "mode": entrant.row.name,
        "kind": entrant.row.kind,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "engine_steps": sum(s.num_engine_steps for s in stats),
        "acceptance_length": tokens / sum(found.num_request_steps for found in counted),
        **_spread("speedup", _over(plain, entrant), "speedup_vs_plain"),
        "tokens_equal": entrant.tokens_equal if has_plain_tokens else None,
        "tokens_total": entrant.tokens_total if has_plain_tokens else tokens,
        "by_running": _by_running(entrant.rounds, plain.rounds),
    }


def best_fixed(rows: Sequence[Figures]) -> Figures | None:
    """Returns the row with the highest speedup among those with a fixed method and number of drafts, or None if none has."""
    fixed = [row for row in rows if row["kind"] == FIXED]
    return max(fixed, key=lambda row: row["speedup_vs_plain"]) if fixed else None


def best_by_running(rows: Sequence[Figures]) -> dict[str, Figures]:
    """Returns the fastest row in each bin of running requests, by the bin's label. Leaves out bins without tokens."""
    winners = {}
    for i, label in enumerate(LABELS):
        known = [row for row in rows if row["by_running"][i]["speedup_vs_plain"] is not None]
        if known:
            winners[label] = max(known, key=lambda row: row["by_running"][i]["speedup_vs_plain"])
    return winners


def estimate_errors(ours: Sequence[RolloutStats], plain: Sequence[RolloutStats]) -> list[float]:
    """Returns for each round the relative error of an estimate of plain decoding's time.

    An engine of ours makes this estimate while it speculates. `plain` has the measured times.
    """
    pairs = zip(ours, plain, strict=True)
    return [s.plain_estimate_s / p.seconds - 1 for s, p in pairs if s.plain_estimate_s]


def host_share(stats: Sequence[RolloutStats]) -> float:
    """Returns the time of our own work on the host as a share of the rollouts' time."""
    return sum(s.host_s for s in stats) / sum(s.seconds for s in stats)


def host_shares(stats: Sequence[RolloutStats]) -> tuple[float, float | None, float]:
    """Returns our host time's share of the rollouts, its share of full decode steps, and the fewest requests of such a step.

    A decode step is full if it has nearly as many requests as the engine step with the most. If no decode step is full, the
    second value is None and the third is 0.
    """
    share = host_share(stats)
    requests, seconds, is_decode, host_s = (
        np.concatenate([column(s.trace, name) for s in stats])
        for name in ("num_requests", "seconds", "is_decode", "host_s")
    )
    is_full = (requests > FULL * requests.max()) & (is_decode > 0)
    if not is_full.any():
        return share, None, 0
    return share, float(host_s[is_full].sum() / seconds[is_full].sum()), float(requests[is_full].min())


def _over(slower: Entrant, faster: Entrant) -> list[float]:
    """Returns the speedup of `faster` over `slower` in each round, by seconds per token."""
    pairs = zip(slower.rounds, faster.rounds, strict=True)
    return [_token_s(a.stats) / _token_s(b.stats) for a, b in pairs]


def _token_s(stats: RolloutStats) -> float:
    return stats.seconds / stats.num_tokens


def _spread(name: str, ratios: Sequence[float], median_name: str = "") -> Figures:
    """Returns the median, the least and the greatest of `ratios`, as figures whose names are derived from `name`."""
    return {median_name or name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}


def _by_running(rounds: Sequence[BinnedStats], plain: Sequence[BinnedStats]) -> list[Figures]:
    """Returns for each bin of running requests its seconds and tokens in all rounds, tokens per second, and median speedup.

    The speedup is over plain decoding. It is None if there is no round in which both have at least `FEWEST_TOKENS` in the bin.
    """
    found = []
    for i, label in enumerate(LABELS):
        seconds = sum(r.seconds_N[i] for r in rounds)
        tokens = sum(r.tokens_N[i] for r in rounds)
        pairs = [
            (p, r) for p, r in zip(plain, rounds, strict=True) if min(p.tokens_N[i], r.tokens_N[i]) >= FEWEST_TOKENS
        ]
        ratios = [(p.seconds_N[i] / p.tokens_N[i]) / (r.seconds_N[i] / r.tokens_N[i]) for p, r in pairs]
        found.append(
            {
                "running": label,
                "seconds": float(seconds),
                "tokens": int(tokens),
                "tokens_per_s": float(tokens / seconds) if tokens else None,
                "speedup_vs_plain": float(statistics.median(ratios)) if ratios else None,
            }
        )
    return found
