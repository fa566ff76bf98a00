# SPDX-License-Identifier: Apache-2.0
"""Statistics of rollouts, computed from engine stats (`RolloutEngine.stats`) at the beginning and at the end of a rollout."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.local.engine_stats import EngineStats
from nemo_specrollout.generation.engine.requests import Rollout
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats
from nemo_specrollout.telemetry.engine_stats import EngineTotals


@dataclass(frozen=True)
class RolloutStats:
    """Statistics of one rollout, whose counts are sums over engines."""

    seconds: float
    num_tokens: int
    num_engine_steps: int
    num_request_steps: int
    """Sum over all engine steps of the number of requests in the step."""
    plain_estimate_s: float | None
    """Seconds that the rollout would have taken without speculation, by estimate, or None if the engine has learned no step
    times."""
    host_s: float
    """Seconds that our own code took on the host during engine steps."""
    num_draft_tokens: int
    num_steps_with_drafts: int
    proposed: dict[str, list[int]]
    """Counts of verified draft tokens. The key is the drafter, and the list has a count for each draft position."""
    accepted: dict[str, list[int]]
    """Counts of accepted draft tokens, with the same keys and lists as `proposed`."""
    trace: dict[str, Any]
    """A line for `trace.jsonl`, with every engine step of the rollout."""
    head_is_dormant: bool | None = None
    """Whether the drafter with weights is dormant, or None without such a drafter."""
    drafter_stats: dict[str, Any] | None = None
    """Metrics of remote drafters, or None without any."""
    tail: dict[str, Any] | None = None
    """Metrics of moves and races, or None with one engine."""
    engine_s: tuple[float, ...] = ()
    """Seconds that each engine spent in engine steps. Empty with one engine."""
    draft_s: float = 0.0
    """Seconds that a drafter with weights took during engine steps. With several engines this is their mean."""

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens that a request gets in an engine step. It is 1 without speculation or without any step."""
        return self.num_tokens / self.num_request_steps if self.num_request_steps else 1.0

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics of the rollout, which are a part of a line of `metrics.jsonl`."""
        plain_s = self.plain_estimate_s
        optional: dict[str, Any] = {
            "head_dormant": None if self.head_is_dormant is None else int(self.head_is_dormant),
            "draft_supply": self.drafter_stats,
            "tail": self.tail,
        }
        if self.engine_s:
            idle_share = 1.0 - sum(self.engine_s) / (len(self.engine_s) * max(*self.engine_s, 1e-9))
            optional |= {"num_engines": len(self.engine_s), "engine_idle_share": idle_share}
        return {
            "num_tokens": self.num_tokens,
            "rollout_s": self.seconds,
            "plain_estimate_s": plain_s,
            "speedup_estimate": None if plain_s is None or not self.seconds else plain_s / self.seconds,
            "engine_steps": self.num_engine_steps,
            "request_steps": self.num_request_steps,
            "acceptance_length": self.acceptance_length,
            "acceptance": {n: {"proposed": self.proposed[n], "accepted": self.accepted[n]} for n in self.proposed},
            "draft_tokens_per_request_step": self.num_draft_tokens / max(self.num_request_steps, 1),
            "steps_with_drafts": self.num_steps_with_drafts / max(self.num_engine_steps, 1),
            "host_share": self.host_s / self.seconds if self.seconds else 0.0,
            "draft_s": self.draft_s,
            **{name: value for name, value in optional.items() if value is not None},
        }


def stock_stats(rollouts: Sequence[Rollout], seconds: float, num_engine_steps: int) -> RolloutStats:
    """Returns the statistics of a rollout by an engine with vLLM's own worker, which counts nothing and never drafts."""
    tokens = sum(len(r.token_ids) for r in rollouts)
    return RolloutStats(seconds, tokens, num_engine_steps, tokens, None, 0.0, 0, 0, {}, {}, {"columns": [], "rows": []})


def rollout_stats(
    before: EngineStats, after: EngineStats, rollouts: Sequence[Rollout], seconds: float, max_num_seqs: int
) -> RolloutStats:
    """Returns the statistics of an engine that generated `rollouts` in `seconds`, from its stats `before` and `after`."""
    num_requests = after.trace.column("num_requests")
    num_rows = after.trace.column("num_rows")
    decode_s = float((after.trace.column("seconds") * after.trace.column("is_decode")).sum())
    table = after.plain_step_s
    lengths = [len(r.token_ids) for r in rollouts]
    estimate = None
    if table is not None and lengths:
        estimate = plain_estimate_s(lengths, max_num_seqs, table, max(seconds - decode_s, 0.0))
    return RolloutStats(
        seconds=seconds,
        num_tokens=sum(lengths),
        num_engine_steps=len(num_requests),
        num_request_steps=int(num_requests.sum()),
        plain_estimate_s=estimate,
        host_s=float(after.trace.column("host_s").sum()),
        draft_s=float(after.trace.column("draft_s").sum()),
        num_draft_tokens=int((num_rows - num_requests).sum()),
        num_steps_with_drafts=int((num_rows > num_requests).sum()),
        proposed=_difference(before, after, "proposed"),
        accepted=_difference(before, after, "accepted"),
        trace={"columns": after.trace.columns, "rows": after.trace.rows},
        head_is_dormant=after.head_is_dormant,
        drafter_stats=_drafter_stats(before, after),
    )


def fleet_stats(
    before: Mapping[int, EngineStats],
    after: Mapping[int, EngineStats],
    rollouts: Sequence[Rollout],
    shards: np.ndarray,
    seconds: float,
    max_num_seqs: int,
) -> RolloutStats:
    """Returns the statistics of several engines that work at the same time, from the stats of each `before` and `after`.

    `shards` has the engine of each request. Counts are sums over engines, `host_s` and `draft_s` are means, and the trace has
    one part for each engine. `plain_estimate_s` is the largest of the engines' estimates. It assumes that each request stays
    in its engine of `shards`.
    """
    parts = {}
    for engine, now in after.items():
        busy_s = float(now.trace.column("seconds").sum())
        shard = [rollouts[i] for i in np.flatnonzero(shards == engine)]
        parts[engine] = rollout_stats(before[engine], now, shard, busy_s, max_num_seqs)
    of_all = list(parts.values())
    estimates, dormant = ([getattr(p, key) for p in of_all] for key in ("plain_estimate_s", "head_is_dormant"))
    counts = ("num_engine_steps", "num_request_steps", "num_draft_tokens", "num_steps_with_drafts")
    return RolloutStats(
        seconds=seconds,
        num_tokens=sum(len(r.token_ids) for r in rollouts),
        plain_estimate_s=max(estimates) if estimates and None not in estimates else None,
        host_s=sum(p.host_s for p in of_all) / max(len(of_all), 1),
        draft_s=sum(p.draft_s for p in of_all) / max(len(of_all), 1),
        engine_s=tuple(p.seconds for p in of_all),
        proposed=_sum_counts([p.proposed for p in of_all]),
        accepted=_sum_counts([p.accepted for p in of_all]),
        trace={"columns": [], "rows": [], "workers": [{"worker": e, **p.trace} for e, p in parts.items()]},
        head_is_dormant=None if None in dormant else all(dormant),
        drafter_stats=next((p.drafter_stats for p in of_all if p.drafter_stats is not None), None),
        **{key: sum(getattr(p, key) for p in of_all) for key in counts},
    )


def work_stats(before: Mapping[int, EngineStats], after: Mapping[int, EngineStats], max_num_seqs: int) -> RolloutStats:
    """Returns the statistics of engines whose rollouts overlap, from all of their engine steps between `before` and `after`.

    `seconds` is the time that an engine spent in steps, as a mean over engines. `plain_estimate_s` is the time that an engine
    would have needed for as many tokens without speculation, also as a mean over engines.
    """
    stats = fleet_stats(before, after, [], np.zeros(0), 0.0, max_num_seqs)
    tables = [None if now.plain_step_s is None else np.array(now.plain_step_s) for now in after.values()]
    totals = [EngineTotals.of(now.trace, table) for now, table in zip(after.values(), tables, strict=True)]
    busy_s = sum(t.decode_s + t.other_s for t in totals) / max(len(totals), 1)
    plain_s = sum(t.plain_s + t.decode_s - t.estimated_s + t.other_s for t in totals) / max(len(totals), 1)
    is_known = totals and all(table is not None for table in tables)
    num_tokens = stats.num_request_steps + sum(map(sum, stats.accepted.values()))
    return replace(stats, num_tokens=num_tokens, seconds=busy_s, plain_estimate_s=plain_s if is_known else None)


def draft_counts(before: EngineStats, after: EngineStats) -> tuple[int, int]:
    """Returns how many draft tokens an engine has verified, and how many it has accepted, from `before` to `after`."""
    return after.num_proposed - before.num_proposed, after.num_accepted - before.num_accepted


def count_equal(rollouts: Sequence[Rollout], others: Sequence[Rollout]) -> tuple[int, int]:
    """Compares two lists of responses to the same requests, position by position.

    Returns how many tokens are equal, and how many positions were compared. If the two responses to a request differ in
    length, the positions that only the longer one has are compared too, and are not equal.
    """
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(rollouts, others, strict=True)]
    equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    return equal, sum(max(len(a), len(b)) for a, b in pairs)


def _difference(before: EngineStats, after: EngineStats, key: str) -> dict[str, list[int]]:
    """Returns by how much the counts named `key` have grown, by drafter and draft position."""
    counts = zip(after.drafters, getattr(after, key), getattr(before, key), strict=True)
    return {name: np.subtract(now, then).tolist() for name, now, then in counts}


def _sum_counts(counts: Sequence[dict[str, list[int]]]) -> dict[str, list[int]]:
    names = dict.fromkeys(name for c in counts for name in c)
    return {n: np.sum([c[n] for c in counts if n in c], 0).tolist() for n in names}


def _drafter_stats(before: EngineStats, after: EngineStats) -> dict[str, Any] | None:
    if before.drafter_stats is None or after.drafter_stats is None:
        return None
    then = DrafterStats(**before.drafter_stats)
    now = DrafterStats(**after.drafter_stats)
    return now.since(then).figures()


def plain_batch_sizes(lengths: Sequence[int], max_num_seqs: int) -> np.ndarray:
    """Returns the number of requests in each decode step, int64, if each request gets one token per step.

    `lengths` are the response lengths. The first token of a request comes from its prefill, so it needs no decode step. At
    most `max_num_seqs` requests run at a time, and they start in the given order.
    """
    running: list[int] = []
    spans = []
    for length in lengths:
        start = heapq.heappop(running) if len(running) == max_num_seqs else 0
        spans.append((start, start + length - 1))
        heapq.heappush(running, spans[-1][1])
    changes = np.zeros(max(end for _, end in spans) + 1, np.int64)
    for start, end in spans:
        changes[start] += 1
        changes[end] -= 1
    return np.cumsum(changes)[:-1]


def plain_estimate_s(lengths: Sequence[int], max_num_seqs: int, plain_step_s: Sequence[float], other_s: float) -> float:
    """Returns the estimated seconds of a rollout without speculation, for responses of these lengths.

    `plain_step_s[b]` are the seconds of a decode step of b requests. `other_s` are the seconds outside of decode steps, such
    as those of prefill.
    """
    batches = plain_batch_sizes(lengths, max_num_seqs)
    return other_s + float(np.asarray(plain_step_s)[batches].sum())
