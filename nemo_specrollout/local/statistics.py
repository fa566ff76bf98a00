# SPDX-License-Identifier: Apache-2.0
"""From a rollout and the engine's report to the figures that a user reads. Raw counts in, ratios last."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_specrollout.generation.engine import Rollout
from nemo_specrollout.generation.totals import totals_of
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.scheduling.speculation.counterfactual import plain_estimate_s


@dataclass(frozen=True)
class RolloutStats:
    """A measured rollout. `plain_estimate_s` is None where the engine learned no step times, `head_is_dormant` where it has no
    drafter with weights, `draft_supply` where none is on another worker, `tail` where there is one worker. `host_s` is our own
    time on the host within steps."""

    seconds: float
    num_tokens: int
    num_target_steps: int
    num_request_steps: int
    plain_estimate_s: float | None
    host_s: float
    num_draft_tokens: int
    num_steps_with_drafts: int
    proposed: dict[str, list[int]]
    accepted: dict[str, list[int]]
    trace: dict[str, Any]
    head_is_dormant: bool | None = None
    draft_supply: dict[str, Any] | None = None
    tail: dict[str, Any] | None = None

    @property
    def acceptance_length(self) -> float:
        """Tokens that a request gains in a target step: 1 without speculation, or without a step."""
        return self.num_tokens / self.num_request_steps if self.num_request_steps else 1.0

    @property
    def speedup_estimate(self) -> float | None:
        """None too where no engine took a step."""
        return self.plain_estimate_s / self.seconds if self.plain_estimate_s is not None and self.seconds else None


def stock_stats(rollouts: Sequence[Rollout], seconds: float, num_target_steps: int) -> RolloutStats:
    """Figures of an engine without our worker, which reports nothing and drafts nothing."""
    tokens = sum(len(r.token_ids) for r in rollouts)
    return RolloutStats(seconds, tokens, num_target_steps, tokens, None, 0.0, 0, 0, {}, {}, {"columns": [], "rows": []})


def rollout_stats(
    before: dict[str, Any], after: dict[str, Any], rollouts: Sequence[Rollout], seconds: float, max_num_seqs: int
) -> RolloutStats:
    """Figures of what happened between two reports of an engine, which generated `rollouts` in `seconds`."""
    columns = {name: i for i, name in enumerate(after["trace"]["columns"])}
    steps = np.array(after["trace"]["rows"], float).reshape(-1, len(columns))
    num_requests, num_rows = steps[:, columns["num_requests"]], steps[:, columns["num_rows"]]
    decode_s = float((steps[:, columns["seconds"]] * steps[:, columns["is_decode"]]).sum())
    table = after.get("plain_step_s")
    lengths = [len(r.token_ids) for r in rollouts]
    estimate = (
        None
        if table is None or not lengths
        else plain_estimate_s(lengths, max_num_seqs, table, max(seconds - decode_s, 0.0))
    )
    return RolloutStats(
        seconds=seconds,
        num_tokens=sum(lengths),
        num_target_steps=len(steps),
        num_request_steps=int(num_requests.sum()),
        plain_estimate_s=estimate,
        host_s=float(steps[:, columns["host_s"]].sum()),
        num_draft_tokens=int((num_rows - num_requests).sum()),
        num_steps_with_drafts=int((num_rows > num_requests).sum()),
        proposed=_difference(before, after, "proposed"),
        accepted=_difference(before, after, "accepted"),
        trace=after["trace"],
        head_is_dormant=after.get("head_is_dormant"),
        draft_supply=_drafter_stats(before, after),
    )


def fleet_stats(
    before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]], rollouts: Sequence[Rollout],
    shards: np.ndarray, seconds: float, max_num_seqs: int,
) -> RolloutStats:  # fmt: skip
    """Figures of several engines side by side, by worker: sums, but of seconds, which are the rollout's.

    The plain estimate is that of requests dealt out as `shards` says, worker of each, who stay where they are: the last of
    the workers to end tells. `host_s` is the workers' mean. Of the trace every worker's is there.
    """
    parts = {w: _worker_stats(before[w], after[w], [rollouts[i] for i in np.flatnonzero(shards == w)], max_num_seqs)
             for w in after}  # fmt: skip
    estimates = [p.plain_estimate_s for p in parts.values() if p.plain_estimate_s is not None]
    remote = [p.draft_supply for p in parts.values() if p.draft_supply is not None]
    return RolloutStats(
        seconds=seconds,
        num_tokens=sum(len(r.token_ids) for r in rollouts),
        num_target_steps=sum(p.num_target_steps for p in parts.values()),
        num_request_steps=sum(p.num_request_steps for p in parts.values()),
        plain_estimate_s=max(estimates) if len(estimates) == len(parts) and parts else None,
        host_s=sum(p.host_s for p in parts.values()) / max(len(parts), 1),
        num_draft_tokens=sum(p.num_draft_tokens for p in parts.values()),
        num_steps_with_drafts=sum(p.num_steps_with_drafts for p in parts.values()),
        proposed=_added([p.proposed for p in parts.values()]),
        accepted=_added([p.accepted for p in parts.values()]),
        trace={"columns": [], "rows": [], "workers": [{"worker": w, **p.trace} for w, p in parts.items()]},
        head_is_dormant=None if any(p.head_is_dormant is None for p in parts.values()) else all(
            p.head_is_dormant for p in parts.values()
        ),
        draft_supply=remote[0] if remote else None,
    )  # fmt: skip


def work_stats(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]], max_num_seqs: int) -> RolloutStats:
    """Figures of engines side by side whose rollouts overlap: of the steps between the reports, whichever requests they were
    for. `seconds` are those of the steps, and the estimate is what their tokens would have taken one a step; both means over
    workers."""
    stats = fleet_stats(before, after, [], np.zeros(0), 0.0, max_num_seqs)
    tables = {w: r.get("plain_step_s") for w, r in after.items()}
    totals = [totals_of(r["trace"], None if tables[w] is None else np.array(tables[w])) for w, r in after.items()]
    busy_s = sum(t.decode_s + t.other_s for t in totals) / max(len(totals), 1)
    plain_s = sum(t.plain_s + t.decode_s - t.estimated_s + t.other_s for t in totals) / max(len(totals), 1)
    is_known = totals and all(table is not None for table in tables.values())
    num_tokens = stats.num_request_steps + sum(map(sum, stats.accepted.values()))
    return replace(stats, num_tokens=num_tokens, seconds=busy_s, plain_estimate_s=plain_s if is_known else None)


def _worker_stats(
    before: dict[str, Any], after: dict[str, Any], shard: Sequence[Rollout], max_num_seqs: int
) -> RolloutStats:
    """Of one engine, in the seconds in which it worked."""
    at = after["trace"]["columns"].index("seconds")
    return rollout_stats(before, after, shard, sum(row[at] for row in after["trace"]["rows"]), max_num_seqs)


def _added(counts: Sequence[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Sums by name and position."""
    names = dict.fromkeys(name for c in counts for name in c)
    return {n: np.sum([c[n] for c in counts if n in c], 0).tolist() for n in names}


def _drafter_stats(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    if "draft_supply" not in after:
        return None
    then, now = (DrafterStats(**report["draft_supply"]) for report in (before, after))
    return now.since(then).figures()


def _difference(before: dict[str, Any], after: dict[str, Any], key: str) -> dict[str, list[int]]:
    names = after.get("drafters", [])
    return {n: np.subtract(after[key][i], before[key][i]).tolist() for i, n in enumerate(names)}


def draft_counts(before: dict[str, Any], after: dict[str, Any]) -> tuple[int, int]:
    """Draft tokens that an engine verified between two of its reports, and those of them that were accepted."""
    proposed, accepted = (_difference(before, after, key) for key in ("proposed", "accepted"))
    return sum(map(sum, proposed.values())), sum(map(sum, accepted.values()))


def count_equal(rollouts: Sequence[Rollout], others: Sequence[Rollout]) -> tuple[int, int]:
    """Tokens equal at their position, and the total, which counts the longer of two responses."""
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(rollouts, others, strict=True)]
    equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    return equal, sum(max(len(a), len(b)) for a, b in pairs)
