# SPDX-License-Identifier: Apache-2.0
"""From engine totals to the figures that a user reads in NeMo-RL's logger. Raw counts in, ratios last."""

from collections.abc import Sequence
from functools import reduce
from operator import add

from nemo_specrollout.generation.totals import EngineTotals

PREFIX = "specrollout/"


def step_metrics(before: Sequence[EngineTotals], after: Sequence[EngineTotals]) -> dict[str, float]:
    """Figures of what all engines did between two readings, by name (docs/metrics.md)."""
    done = reduce(add, after, EngineTotals()) - reduce(add, before, EngineTotals())
    figures: dict[str, float] = {
        "engine_steps": done.num_steps,
        "weight_updates": done.num_weight_updates / max(len(after), 1),
        "seeds_made_up": done.num_made_up_seeds,
        "decode_s": done.decode_s,
        "router_host_s": done.host_s,
    }
    if done.num_steps:
        figures["steps_with_drafts"] = done.num_steps_with_drafts / done.num_steps
    if done.num_request_steps:
        figures["draft_tokens_per_request_step"] = done.num_rows / done.num_request_steps - 1
    if done.proposed and done.num_request_steps:
        accepted = sum(map(sum, dict(done.accepted).values()))
        figures["tokens_per_request_step"] = 1 + accepted / done.num_request_steps
    if done.estimated_s:
        figures["speedup_estimate"] = (done.plain_s + done.other_s) / (done.estimated_s + done.other_s)
    return {PREFIX + name: float(value) for name, value in {**figures, **_by_drafter(done)}.items()}


def _by_drafter(done: EngineTotals) -> dict[str, float]:
    """For each drafter: its share of all drafts, and its acceptance, in all and by position."""
    figures: dict[str, float] = {}
    accepted = dict(done.accepted)
    total = sum(map(sum, dict(done.proposed).values()))
    for name, proposed_K in done.proposed:
        figures[f"{name}/draft_tokens"] = sum(proposed_K)
        if not sum(proposed_K):
            continue
        figures[f"{name}/share_of_drafts"] = sum(proposed_K) / total
        figures[f"{name}/acceptance"] = sum(accepted[name]) / sum(proposed_K)
        for position, (num_proposed, num_accepted) in enumerate(zip(proposed_K, accepted[name], strict=True), 1):
            if num_proposed:
                figures[f"{name}/acceptance_pos_{position}"] = num_accepted / num_proposed
    return figures
