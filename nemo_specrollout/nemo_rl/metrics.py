# SPDX-License-Identifier: Apache-2.0
"""Metrics of a training step, computed from counters that are summed over all engines. Ratios are computed last."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from operator import add
from typing import Any

from nemo_specrollout.heads.decisions.refresh_schedule import DecodeCosts, StepFacts, head_use
from nemo_specrollout.reports.records import PREFIX
from nemo_specrollout.telemetry.engine_stats import EngineTotals
from nemo_specrollout.telemetry.sample_stats import SampleStats, StepEnd


def step_metrics(done_E: Sequence[EngineTotals]) -> dict[str, float]:
    """Returns the metrics of a training step by name, from what each engine has done in it (docs/reference/metrics.md)."""
    num_engines = len(done_E)
    done = reduce(add, done_E)
    metrics: dict[str, float] = {
        "engine_steps": done.num_steps,
        "request_steps": done.num_request_steps,
        "seeds_derived": done.num_derived_seeds,
    }
    rollout_s, plain_s = _seconds(done, num_engines)
    if rollout_s:
        metrics |= {"rollout_s": rollout_s, "host_share": done.host_s / num_engines / rollout_s}
        metrics["draft_s"] = done.draft_s / num_engines
        if num_engines > 1:
            longest_s = max(own.decode_s + own.other_s for own in done_E)
            metrics |= {"num_engines": num_engines, "engine_idle_share": 1.0 - rollout_s / longest_s}
    if plain_s is not None:
        metrics |= {"plain_estimate_s": plain_s, "speedup_estimate": plain_s / rollout_s}
    if done.num_steps:
        metrics["steps_with_drafts"] = done.num_steps_with_drafts / done.num_steps
    if done.num_request_steps:
        metrics["draft_tokens_per_request_step"] = done.num_rows / done.num_request_steps - 1
    if done.proposed and done.num_request_steps:
        metrics |= {"num_tokens": _num_tokens(done), "acceptance_length": _num_tokens(done) / done.num_request_steps}
    return {PREFIX + name: float(value) for name, value in {**metrics, **_by_drafter(done)}.items()}


def _seconds(done: EngineTotals, num_engines: int) -> tuple[float, float | None]:
    """Returns the seconds of a step's rollout, and an estimate for the same tokens without drafts (None if unknown).

    Both are means over the engines.
    """
    rollout_s = (done.decode_s + done.other_s) / num_engines
    if not done.estimated_s:
        return rollout_s, None
    return rollout_s, (done.plain_s * done.decode_s / done.estimated_s + done.other_s) / num_engines


def metrics_below(name: str, figures: Mapping[str, Any]) -> dict[str, float]:
    return {f"{PREFIX}{name}/{key}": float(x) for key, x in figures.items() if isinstance(x, int | float)}


def _by_drafter(done: EngineTotals) -> dict[str, float]:
    """Returns each drafter's share of all drafts, and its acceptance rate overall and by position."""
    metrics: dict[str, float] = {}
    accepted = dict(done.accepted)
    total = sum(map(sum, dict(done.proposed).values()))
    for name, proposed_K in done.proposed:
        metrics[f"{name}/draft_tokens"] = sum(proposed_K)
        if not sum(proposed_K):
            continue
        metrics[f"{name}/share_of_drafts"] = sum(proposed_K) / total
        metrics[f"{name}/acceptance"] = sum(accepted[name]) / sum(proposed_K)
        for position, (num_proposed, num_accepted) in enumerate(zip(proposed_K, accepted[name], strict=True), 1):
            if num_proposed:
                metrics[f"{name}/acceptance_pos_{position}"] = num_accepted / num_proposed
    return metrics


def weight_updates(last: EngineTotals, after: EngineTotals, num_engines: int) -> dict[str, float]:
    """Returns metrics of the refits between the ends of two steps, at which the engines' totals were `last` and `after`.

    Other metrics cover the time from `begin_step` to `end_step`. Synchronous GRPO refits outside this time, so refits are
    counted from one `end_step` to the next.
    """
    return {f"{PREFIX}weight_updates": (after - last).num_weight_updates / num_engines}


def acceptance_counts(done: EngineTotals) -> dict[str, Any]:
    """Returns the proposed and the accepted draft tokens by position, for each drafter whose drafts were verified."""
    accepted = dict(done.accepted)
    return {
        name: {"proposed": list(proposed_K), "accepted": list(accepted[name])}
        for name, proposed_K in done.proposed
        if sum(proposed_K)
    }


def step_facts(done: EngineTotals, num_engines: int, seconds: float, steps_to_come: int) -> StepFacts | None:
    """Returns facts about a step of `seconds`, by which it is decided whether to refresh a draft head.

    `steps_to_come` is the number of steps until the end of the run. Returns None if nothing was decoded in the step.
    """
    if not done.num_request_steps:
        return None
    costs = DecodeCosts.measured(*_seconds(done, num_engines), _num_tokens(done), done.num_request_steps)
    length, share = head_use(dict(done.proposed), dict(done.accepted), done.num_request_steps)
    return StepFacts(length, _num_tokens(done), seconds, steps_to_come, costs, share)


def _num_tokens(done: EngineTotals) -> int:
    """Returns the number of tokens that the engines have generated.

    In each engine step, every request gets one token besides the accepted draft tokens.
    """
    return done.num_request_steps + sum(map(sum, dict(done.accepted).values()))


def head_metrics(ends: Sequence[StepEnd]) -> dict[str, float]:
    """Returns metrics of the draft heads by name.

    They are the number of alarms, the age of the oldest head in policy versions, and the share of engines whose head is
    dormant.
    """
    metrics = {"canary_alarms": float(sum("event" in alarm for end in ends for alarm in end.alarms))}
    ages = [end.policy_version - end.head_version for end in ends if end.head_version is not None]
    if ages:
        metrics["head_age"] = float(max(ages))
    dormant = [end.head_is_dormant for end in ends if end.head_is_dormant is not None]
    if dormant:
        metrics["head_dormant"] = sum(dormant) / len(dormant)
    return {PREFIX + name: value for name, value in metrics.items()}


def history_facts(ends: Sequence[StepEnd]) -> dict[str, int]:
    """Returns what the history of responses held at the start, and what was done with it since. Empty without a history.

    All engines read the same history, so its content at the start is counted once.
    """
    of_engines = [end.history for end in ends if end.history is not None]
    if not of_engines:
        return {}
    once = ("num_read", "bytes_read")
    return {name: (max if name in once else sum)(facts[name] for facts in of_engines) for name in of_engines[0]}


def sample_lines(ends: Sequence[StepEnd], seeds: Sequence[int] | None) -> list[dict[str, Any]]:
    """Returns the sample stats at the end of a step in the order of `seeds`, or all of them if `seeds` is None."""
    found = dict[int, SampleStats]()
    for seed, stats in (pair for end in ends for pair in end.sample_stats):
        found[seed] = found[seed].merged(stats) if seed in found else stats
    order = found if seeds is None else (seed for seed in seeds if seed in found)
    return [{"seed": seed, **asdict(found[seed])} for seed in order]
