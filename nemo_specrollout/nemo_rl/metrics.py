# SPDX-License-Identifier: Apache-2.0
"""From engine totals to the figures that a user reads in NeMo-RL's logger. Raw counts in, ratios last."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from nemo_specrollout.generation.totals import EngineTotals
from nemo_specrollout.reports.nemo_rl_run import PREFIX
from nemo_specrollout.scheduling.heads.refresh_schedule import HeadUse, StepFacts
from nemo_specrollout.scheduling.heads.refresh_trigger import DecodeCosts


def step_metrics(before: Sequence[EngineTotals], after: Sequence[EngineTotals]) -> dict[str, float]:
    """Figures of what all engines did between two readings, by name (docs/reference/metrics.md)."""
    done = _done(before, after)
    figures: dict[str, float] = {
        "engine_steps": done.num_steps,
        "seeds_derived": done.num_derived_seeds,
        # Of several engines, the one that a request happens to reach is part of such a seed.
        "seeds_made_up": done.num_derived_seeds if len(after) > 1 else 0,
        "decode_s": done.decode_s,
        "draft_host_s": done.host_s,
    }
    if done.num_steps:
        figures["steps_with_drafts"] = done.num_steps_with_drafts / done.num_steps
    if done.num_request_steps:
        figures["draft_tokens_per_request_step"] = done.num_rows / done.num_request_steps - 1
    if done.proposed and done.num_request_steps:
        figures["tokens_per_request_step"] = _num_tokens(done) / done.num_request_steps
    if done.estimated_s:
        figures["speedup_estimate"] = (done.plain_s + done.other_s) / (done.estimated_s + done.other_s)
    return {PREFIX + name: float(value) for name, value in {**figures, **_by_drafter(done)}.items()}


def weight_updates(last: Sequence[EngineTotals] | None, after: Sequence[EngineTotals]) -> dict[str, float]:
    """Returns the refits of an engine since `last`, the reading at the end of the step before; None: since the start.

    Synchronous GRPO refits between two steps, outside of the window of the other figures.
    """
    return {f"{PREFIX}weight_updates": _done(last or (), after).num_weight_updates / max(len(after), 1)}


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


def acceptance_counts(before: Sequence[EngineTotals], after: Sequence[EngineTotals]) -> dict[str, Any]:
    """For each drafter that had drafts verified: how many, and those accepted, by position in the draft."""
    done = _done(before, after)
    accepted = dict(done.accepted)
    return {n: {"proposed": [*p], "accepted": [*accepted[n]]} for n, p in done.proposed if sum(p)}


def step_facts(
    before: Sequence[EngineTotals], after: Sequence[EngineTotals], seconds: float, steps_to_come: int
) -> StepFacts | None:
    """What the trigger of refreshes is told of a step that took `seconds`; None if nothing was decoded in it.

    Engines run side by side: the rollout took as long as the mean of them.
    """
    done = _done(before, after)
    if not done.num_request_steps:
        return None
    plain_s = done.plain_s * done.decode_s / done.estimated_s if done.estimated_s else None
    rollout_s, plain_rollout_s = done.decode_s + done.other_s, None if plain_s is None else plain_s + done.other_s
    costs = DecodeCosts.measured(
        rollout_s / len(after),
        None if plain_rollout_s is None else plain_rollout_s / len(after),
        _num_tokens(done),
        done.num_request_steps,
    )
    use = HeadUse.counted(dict(done.proposed), dict(done.accepted), done.num_request_steps)
    return StepFacts(use.acceptance_length, _num_tokens(done), seconds, steps_to_come, costs, use.share)


def head_figures(ends: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the engines' replies to `specrollout_end_step`: alarms, the age of the oldest head in policy versions, the share of
    engines in which it lies dormant."""
    figures = {"canary_alarms": float(sum(len(end["alarms"]) for end in ends))}
    ages = [end["policy_version"] - end["head_version"] for end in ends if end["head_version"] is not None]
    if ages:
        figures["head_age"] = float(max(ages))
    dormant = [end["head_is_dormant"] for end in ends if end.get("head_is_dormant") is not None]
    if dormant:
        figures["head_dormant"] = sum(dormant) / len(dormant)
    return {PREFIX + name: value for name, value in figures.items()}


def sample_lines(ends: Sequence[Mapping[str, Any]], seeds: Sequence[int] | None) -> list[dict[str, Any]]:
    """Returns the sample stats of the same replies in the order of `seeds`, or of all samples with None."""
    sample_stats = dict[int, Mapping[str, Any]]()
    for seed, sample in (pair for end in ends for pair in end["sample_stats"]):
        sample_stats[seed] = sample if seed not in sample_stats else _of_both(sample_stats[seed], sample)
    order = sample_stats if seeds is None else (seed for seed in seeds if seed in sample_stats)
    return [{"seed": seed, **sample_stats[seed]} for seed in order]


def _of_both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Of a sample that went on elsewhere, or was raced: each engine has stamped it."""
    began: dict[int, int] = {}
    for version, first in sorted((*one["policy_spans"], *other["policy_spans"]), key=lambda span: span[1]):
        began.setdefault(version, first)
    heads = [*one["head_versions"], *other["head_versions"]]
    counts = {name: one[name] + other[name] for name in ("num_drafted", "num_accepted")}
    return {"policy_spans": [[*span] for span in began.items()], "head_versions": [min(heads), max(heads)], **counts}


def _done(before: Sequence[EngineTotals], after: Sequence[EngineTotals]) -> EngineTotals:
    return reduce(add, after, EngineTotals()) - reduce(add, before, EngineTotals())


def _num_tokens(done: EngineTotals) -> int:
    """Those that steps emitted: one a request, and the drafts accepted."""
    return done.num_request_steps + sum(map(sum, dict(done.accepted).values()))
