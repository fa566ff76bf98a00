# SPDX-License-Identifier: Apache-2.0
"""From a rollout and the engine's report to the figures that a user reads. Raw counts in, ratios last."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_specrollout.decoupled.supply import DraftSupply
from nemo_specrollout.generation.engine import Rollout
from nemo_specrollout.scheduling.counterfactual import plain_estimate_s


@dataclass(frozen=True)
class RolloutStats:
    """A measured rollout. `plain_estimate_s` is None where the engine learned no step times, `head_is_dormant` where it has no
    drafter with weights, `draft_supply` where none is on another worker."""

    seconds: float
    num_tokens: int
    num_target_steps: int
    num_request_steps: int
    plain_estimate_s: float | None
    router_host_s: float
    num_draft_tokens: int
    num_steps_with_drafts: int
    proposed: dict[str, list[int]]
    accepted: dict[str, list[int]]
    trace: dict[str, Any]
    head_is_dormant: bool | None = None
    draft_supply: dict[str, Any] | None = None

    @property
    def acceptance_length(self) -> float:
        """Tokens that a request gains in a target step: 1 without speculation."""
        return self.num_tokens / self.num_request_steps

    @property
    def speedup_estimate(self) -> float | None:
        return None if self.plain_estimate_s is None else self.plain_estimate_s / self.seconds


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
    estimate = None if table is None else plain_estimate_s(lengths, max_num_seqs, table, max(seconds - decode_s, 0.0))
    return RolloutStats(
        seconds=seconds,
        num_tokens=sum(lengths),
        num_target_steps=len(steps),
        num_request_steps=int(num_requests.sum()),
        plain_estimate_s=estimate,
        router_host_s=float(steps[:, columns["host_s"]].sum()),
        num_draft_tokens=int((num_rows - num_requests).sum()),
        num_steps_with_drafts=int((num_rows > num_requests).sum()),
        proposed=_difference(before, after, "proposed"),
        accepted=_difference(before, after, "accepted"),
        trace=after["trace"],
        head_is_dormant=after.get("head_is_dormant"),
        draft_supply=_supply(before, after),
    )


def _supply(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    if "draft_supply" not in after:
        return None
    then, now = (DraftSupply(**report["draft_supply"]) for report in (before, after))
    return now.since(then).figures()


def _difference(before: dict[str, Any], after: dict[str, Any], key: str) -> dict[str, list[int]]:
    names = after.get("drafters", [])
    return {n: np.subtract(after[key][i], before[key][i]).tolist() for i, n in enumerate(names)}


def count_equal(rollouts: Sequence[Rollout], others: Sequence[Rollout]) -> tuple[int, int]:
    """Tokens equal at their position, and the total, which counts the longer of two responses."""
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(rollouts, others, strict=True)]
    equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    return equal, sum(max(len(a), len(b)) for a, b in pairs)
