# SPDX-License-Identifier: Apache-2.0
"""Computes the rows of `bench.json` from the rounds of a bench. Compares seconds per token, round by round.

Shapes: N bins of running requests.
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
# A batch counts as full from this share of the most requests on.
FULL = 0.75
FEWEST_TOKENS = 32
"""Fewest tokens that a row must make in a bin and a round before its speed there counts. With fewer, one step decides it."""


def figures_of(groups: Sequence[Sequence[Entrant]]) -> list[Figures]:
    """Returns the rows of `bench.json`. Rows of ours are also compared with the best fixed row.

    Each group of entrants took turns, and has a `plain` of its own, which its other rows are compared with.
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
    """Returns a row of `bench.json`."""
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
    """Returns the fastest row, by seconds per token, with a fixed method and number of drafts, or None without such a row."""
    fixed = [row for row in rows if row["kind"] == FIXED]
    return max(fixed, key=lambda row: row["speedup_vs_plain"]) if fixed else None


def best_by_running(rows: Sequence[Figures]) -> dict[str, Figures]:
    """Returns the fastest row of each bin in which tokens were generated, by the label of the bin."""
    winners = {}
    for i, label in enumerate(LABELS):
        known = [row for row in rows if row["by_running"][i]["speedup_vs_plain"] is not None]
        if known:
            winners[label] = max(known, key=lambda row: row["by_running"][i]["speedup_vs_plain"])
    return winners


def estimate_errors(ours: Sequence[RolloutStats], plain: Sequence[RolloutStats]) -> list[float]:
    """Returns each round's relative error of the plain time that ours estimates while it speculates."""
    pairs = zip(ours, plain, strict=True)
    return [s.plain_estimate_s / p.seconds - 1 for s, p in pairs if s.plain_estimate_s]


def host_share(stats: Sequence[RolloutStats]) -> float:
    """Returns our host time as a share of the rollout."""
    return sum(s.host_s for s in stats) / sum(s.seconds for s in stats)


def host_shares(stats: Sequence[RolloutStats]) -> tuple[float, float | None, float]:
    """Returns our host time as a share of the rollout and of full decode steps, and the fewest requests of a full step.

    A step is full if it has nearly as many requests as there ever are. The second share is None without such a step.
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
    """Returns median, least and greatest ratio, by name."""
    return {median_name or name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}


def _by_running(rounds: Sequence[BinnedStats], plain: Sequence[BinnedStats]) -> list[Figures]:
    """Returns for each bin the seconds and tokens of all rounds, tokens per second, and the median speedup over plain.

    The speedup is None if no round had `FEWEST_TOKENS` of both.
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
