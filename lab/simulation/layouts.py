# SPDX-License-Identifier: Apache-2.0
"""Simulates layouts of drafting on the GPUs of a policy, with measured costs. The command is `lab.bench.layouts`."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from lab.placement.cost_tables import CostCurve, CostTables
from lab.placement.planner import COUPLED, DECOUPLED, PLAIN, Option, place
from lab.simulation.compare import simulate_step
from lab.simulation.measured_gpus import fitted_calibration
from lab.simulation.run_ahead import rolling_steps
from lab.simulation.scenario import HEAD, TEXT, Scenario
from lab.simulation.setting import APART, AUTO, FIXED, Fleet, Setting, Variant
from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.config.strict import ConfigError, build

POLICIES = {"Qwen3-8B": "Qwen3-0.6B", "Qwen3-32B": "Qwen3-0.6B"}
"""Name of each policy, with the name of its draft model."""
GPUS = (8, 16, 32, 64)
PER_GPU = (8, 32)
"""Numbers of requests of a training step for each GPU."""
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
TEXT_LESS = 0.25
"""How much lower a text drafter's acceptance rate is than that of a drafter with weights (`ASSUMED_ACCEPTANCE`,
lab/cli/simulated_config.py)."""
SIZES = (1, 2, 4, 8)
SAMPLES = 8
TAIL_P, TAIL_GPUS = 0.8, 16
TAIL_SIZES = {"Qwen3-8B": 2, "Qwen3-32B": 4}
"""Number of GPUs per engine where moves and races are compared. It is small enough that there are several engines."""
MOVING, RACING = FastestOfNConfig(max_racers=1), FastestOfNConfig()
RATIOS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
REGION_PER_GPU = (1, 4, 16, 64)
REGION_GPUS = 8
NO_DRAFTS, REMOTE = "no drafts", "remote drafter"
AHEAD_LAYOUTS = (NO_DRAFTS, "EAGLE-3 head", REMOTE)
"""Names of the layouts that are also simulated with `run_ahead`."""
STEPS_AHEAD = 2


@dataclass(frozen=True)
class Layout:
    """A way to draft, either in the policy's engine or on separate GPUs."""

    name: str
    kind: str
    """Kind of drafting, which is `plain`, `fixed`, `auto` or `apart` (`Fleet.speculation`)."""
    draft: str
    """Source of the drafts, as in `MethodConfig.draft`, or `model` for the policy's draft model."""


LAYOUTS = (
    Layout(NO_DRAFTS, "plain", TEXT),
    Layout("draft model, k=3", FIXED, "model"),
    Layout("draft model", AUTO, "model"),
    Layout("EAGLE-3 head", AUTO, HEAD),
    Layout("texts", AUTO, TEXT),
    Layout(REMOTE, APART, "model"),
)
VANILLA = LAYOUTS[1].name
"""Name of vanilla speculation, where a draft model in the policy's engine always makes three drafts."""
COUPLED_LAYOUTS = tuple(layout.name for layout in LAYOUTS[1:5])


@dataclass(frozen=True)
class Case:
    """A policy on some GPUs, with its number of requests for each GPU and its acceptance `p`."""

    policy: str
    device: str
    num_gpus: int
    per_gpu: int
    p: float
    seed: int = 0

    def scenario(
        self, layout: Layout, size: int, *, more: dict[str, Any] | None = None, races: bool = False
    ) -> Scenario:
        """Returns the scenario of a layout whose engines have `size` GPUs. Raises ConfigError if the policy does not fit."""
        model = POLICIES[self.policy]
        drafts = [model if layout.draft == "model" else layout.draft]
        if races:
            drafts.append(HEAD if layout.draft == "model" else model)
        methods = [
            {"name": d, "draft": d, "acceptance": self.p - (TEXT_LESS if d == TEXT else 0.0), "spread": 0.5}
            for d in drafts
        ]
        drafters = [d for d in SIZES if d <= size] if layout.kind == APART else []
        return build(
            Scenario,
            {
                "title": f"{self.policy}, {layout.name}",
                "model": self.policy,
                "cluster": {"device": self.device, "num_gpus": self.num_gpus, "gpus_per_engine": size},
                "batch": {"num_prompts": self.num_gpus * self.per_gpu // SAMPLES, "num_samples": SAMPLES},
                "lengths": {"median": 1500, "sigma": 1.0, "max_tokens": 16_384},
                "drafting": {"methods": methods, "drafter_gpus": drafters},
                "calibration": asdict(fitted_calibration()),
                "seed": self.seed,
                **(more or {}),
            },
            "",
        )


def cases(device: str, gpus: Sequence[int] = GPUS, acceptances: Sequence[float] = ACCEPTANCES) -> Iterator[Case]:
    """Yields a case for each policy and each combination of numbers of GPUs, requests per GPU, and acceptances."""
    for policy, num_gpus, per_gpu, p in itertools.product(POLICIES, gpus, PER_GPU, acceptances):
        yield Case(policy, device, num_gpus, per_gpu, p)


def fleets(case: Case, layout: Layout) -> dict[int, Fleet]:
    """Returns a fleet for each number of GPUs per engine with which the layout fits, by this number."""
    found = {}
    for size in (size for size in SIZES if size <= case.num_gpus):
        try:
            fleet = Fleet(case.scenario(layout, size))
            is_placed = layout.kind != APART or fleet.placement is not None
            if fleet.num_slots and is_placed:
                found[size] = fleet
        except ConfigError:
            continue  # the weights, or a single request, do not fit beside them
    return found


def layout_rows(all_cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yields for each case and layout the seconds of a rollout with the best number of GPUs per engine."""
    plain: dict[tuple[str, int, int], dict[str, Any]] = {}
    for case in all_cases:
        for layout in LAYOUTS:
            known = plain.get((case.policy, case.num_gpus, case.per_gpu)) if layout.name == NO_DRAFTS else None
            row = known or _layout_row(case, layout)
            if layout.name == NO_DRAFTS:
                plain[case.policy, case.num_gpus, case.per_gpu] = row
            yield {**row, **asdict(case)}


def _layout_row(case: Case, layout: Layout) -> dict[str, Any]:
    built = fleets(case, layout)
    seconds = {
        size: simulate_step(Setting(fleet, Variant(layout.name, layout.kind))).rollout_s
        for size, fleet in built.items()
    }
    size = min(seconds, key=seconds.__getitem__)
    row: dict[str, Any] = {"layout": layout.name, "size": size, "seconds": seconds[size], "sizes": seconds}
    placed = {s: option for s, fleet in built.items() if layout.kind == APART and (option := fleet.placement)}
    if placed:
        planned = max(placed, key=lambda s: placed[s].tokens_per_s)
        option = placed[size]
        row |= {"drafter": option.drafter_size, "groups": option.num_groups}
        row |= {"planned_size": planned, "planned_drafter": placed[planned].drafter_size, "planned": seconds[planned]}
    return row


def tail_rows(device: str, seeds: range) -> Iterator[dict[str, Any]]:
    """Yields the gains of moves, races and `run_ahead` for each case and layout, as means over `seeds`.

    A gain is the ratio of the seconds of two rollouts. The engines of a policy have `TAIL_SIZES` GPUs.
    """
    for case, layout in itertools.product(cases(device, (TAIL_GPUS,), (TAIL_P,)), LAYOUTS):
        ratios = [_tail_ratios(replace(case, seed=seed), layout) for seed in seeds]
        means = {name: mean(r[name] for r in ratios) for name in ratios[0]}
        yield {**asdict(case), "layout": layout.name, "size": TAIL_SIZES[case.policy], **means}


def _tail_ratios(case: Case, layout: Layout) -> dict[str, float]:
    """Returns by name the seconds of rollouts with moves, races or `run_ahead`, divided by the seconds of a rollout without.

    The key `seconds` has the seconds of the rollout without. Engines race only if they draft by two methods, and the second
    method makes some engines slower. So there is also a ratio for two methods without races. Rollouts with `run_ahead` are
    means over six steps, and are divided by such a mean.
    """
    size = TAIL_SIZES[case.policy]
    alone, racing = (Fleet(case.scenario(layout, size, races=races)) for races in (False, True))

    def one(fleet: Fleet, tail: FastestOfNConfig | None) -> float:
        return simulate_step(Setting(fleet, Variant(layout.name, layout.kind, tail))).rollout_s

    seconds = one(alone, None)
    found = {
        "seconds": seconds,
        "moving": one(alone, MOVING) / seconds,
        "two methods": one(racing, None) / seconds,
        "racing": one(racing, RACING) / seconds,
    }
    if layout.name not in AHEAD_LAYOUTS:
        return found
    more = {"training": {"run_ahead": {"tokens_to_flip": 30_000}}}
    fleet = Fleet(case.scenario(layout, size, more=more))

    def rolling(num_ahead: int, tail: FastestOfNConfig | None) -> float:
        return rolling_steps(Setting(fleet, Variant(layout.name, layout.kind, tail)), num_ahead).rollout_s

    neither_s = rolling(0, None)
    return found | {
        "moving, six steps": rolling(0, MOVING) / neither_s,
        "run_ahead": rolling(STEPS_AHEAD, None) / neither_s,
        "run_ahead, moving": rolling(STEPS_AHEAD, MOVING) / neither_s,
    }


def region_rows(device: str) -> Iterator[dict[str, Any]]:
    """Yields rows with the speed of remote drafters, as the planner predicts it, divided by the speed of the best other way.

    The other ways are drafting in the policy's engine and plain decoding. The batch never drains. `ratio` is the time to draft
    a token for all requests, divided by the time of the policy's plain engine step for these requests. It is the same in the
    policy's engine and on separate GPUs. The figure `free` does not count the GPUs of remote drafters, so it is the most that
    sharing drafters can gain.
    """
    for policy in POLICIES:
        case = Case(policy, device, REGION_GPUS, PER_GPU[0], TAIL_P)
        tables = [fleet.tables() for fleet in fleets(case, Layout("", AUTO, "model")).values()]
        verify = tuple(table.verify_s[0] for table in tables)
        known = replace(tables[0], verify_s=verify)
        for ratio, per_gpu, p in itertools.product(RATIOS, REGION_PER_GPU, ACCEPTANCES):
            yield {
                "policy": policy,
                "ratio": ratio,
                "per_gpu": per_gpu,
                "p": p,
                **_region_row(known, ratio, per_gpu, p),
            }


def _region_row(known: CostTables, ratio: float, per_gpu: int, p: float) -> dict[str, Any]:
    verify = known.verify_s
    coupled = tuple(_cheaper(curve, ratio) for curve in verify)
    remote = tuple(
        replace(_cheaper(verify[0], ratio) if d < verify[0].size else c, size=d)
        for d, c in zip((1, 2), coupled, strict=False)
    )
    num_requests = per_gpu * REGION_GPUS

    def best(curves: CostTables, num_gpus: int) -> dict[str, Option]:
        options = place(curves, num_requests, num_gpus, p, 8).options
        return {m: o for m in (PLAIN, COUPLED, DECOUPLED) if (o := next((o for o in options if o.mode == m), None))}

    found = best(replace(known, coupled_draft_s=coupled, draft_s=remote), REGION_GPUS)
    free = [
        best(replace(known, verify_s=(one,), draft_s=(d,)), REGION_GPUS // one.size * (one.size + d.size))[DECOUPLED]
        for one, d in itertools.product(verify, remote)
    ]
    pair = found[DECOUPLED]
    others = max(found[COUPLED].tokens_per_s, found[PLAIN].tokens_per_s)
    return {
        "over_coupled": pair.tokens_per_s / others,
        "free": max(option.tokens_per_s for option in free) / others,
        "pair": [pair.verifier_size, pair.drafter_size, pair.k],
        "coupled": [found[COUPLED].verifier_size, found[COUPLED].k],
        "coupled_over_plain": found[COUPLED].tokens_per_s / found[PLAIN].tokens_per_s,
    }


def _cheaper(curve: CostCurve, ratio: float) -> CostCurve:
    return replace(curve, seconds=tuple(ratio * seconds for seconds in curve.seconds))
