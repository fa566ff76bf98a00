# SPDX-License-Identifier: Apache-2.0
"""A run as its block has it, beside a plain one: what is expected, when its tail is first changed, how much is drafted."""

from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.simulation.compare import Comparison
from nemo_specrollout.simulation.engine_setup import APART, AUTO, FIXED, PLAIN, Fleet
from nemo_specrollout.simulation.rl import StepResult, simulate_step
from nemo_specrollout.simulation.scenario import Scenario
from nemo_specrollout.simulation.setting import Setting, Variant

TAIL = "fastest_of_n"


def as_configured(scenario: Scenario, block: SpecrolloutConfig) -> Comparison:
    """Plain, drafting as the block has it, and then also its tail, if it has one and there are workers for it."""
    fleet = Fleet(scenario)
    kind, tail = drafting_kind(fleet, block), block.fastest_of_n
    is_split = bool(scenario.drafting.methods_of_workers)
    variants = [Variant(PLAIN, PLAIN)] + ([Variant(kind, kind, is_split=is_split)] if kind != PLAIN else [])
    if tail is not None and tail.enabled and fleet.num_workers(kind) > 1:
        variants.append(Variant(TAIL, kind, tail, is_split))
    steps = tuple(simulate_step(Setting(fleet, variant)) for variant in variants)
    return Comparison(scenario, steps, steps[0].rollout.length_R)


def drafting_kind(fleet: Fleet, block: SpecrolloutConfig) -> str:
    """How engines draft, as `Fleet.speculation` has it."""
    if not block.enabled or not block.drafters:
        return PLAIN
    if block.remote is not None and fleet.placement is not None:
        return APART
    return FIXED if block.budget.policy == "fixed" else AUTO


@dataclass(frozen=True)
class Onset:
    """When the tail is first changed."""

    at_s: float
    finished_share: float
    """Of the requests, by then."""


def onset(step: StepResult) -> Onset | None:
    """Of a step with a tail; None if nothing is worth a change."""
    if not step.rollout.changes:
        return None
    at_s = step.rollout.changes[0].at_s
    return Onset(at_s, float(np.mean(step.rollout.end_R <= at_s)))


@dataclass(frozen=True)
class Drafted:
    """What each of an engine's typical requests gets in a step, by their number."""

    num_requests: int
    drafts: float
    tokens: float
    speedup: float
    """Over plain, at the same number of requests."""


def drafted(scenario: Scenario, block: SpecrolloutConfig) -> list[Drafted]:
    """With one request in an engine, four, sixteen and so on, up to its share of a step; of the first method."""
    fleet = Fleet(scenario)
    kind = drafting_kind(fleet, block)
    share = -(-scenario.batch.num_requests // fleet.num_workers(kind))
    most = min(share, fleet.num_slots)
    sizes = sorted({4**i for i in range(12) if 4**i < most} | {most})
    return [_drafted(fleet, kind, size) for size in sizes] if kind != PLAIN else []


def _drafted(fleet: Fleet, kind: str, size: int) -> Drafted:
    scenario = fleet.scenario
    context = scenario.batch.prompt_tokens + scenario.lengths.median / 2
    p_B = np.full(size, fleet.terms_M[0].centre)
    speculation, plain = fleet.speculation(kind, 0), fleet.speculation(PLAIN, 0)
    pace = speculation.pace(p_B, context)
    speedup = speculation.tokens_per_s(p_B, context) / plain.tokens_per_s(p_B, context)
    return Drafted(size, pace.num_rows / size - 1.0, float(pace.tokens_B.mean()), speedup)
