# SPDX-License-Identifier: Apache-2.0
"""Engines of a scenario: their costs, drafting and number.

Shapes: R requests, M draft methods.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.scheduling.placement.cost_tables import CostCurve, CostTables
from nemo_specrollout.scheduling.placement.planner import DECOUPLED, Option, place
from nemo_specrollout.simulation.costs import Costs, tabled
from nemo_specrollout.simulation.devices import device_named
from nemo_specrollout.simulation.roofline import Parallel, RooflineCosts, drafter_costs
from nemo_specrollout.simulation.scenario import Scenario
from nemo_specrollout.simulation.scenario_blocks import HEAD, TEXT, MethodConfig
from nemo_specrollout.simulation.speculation import (
    CoupledSpeculation,
    DecoupledSpeculation,
    NoSpeculation,
    Speculation,
)
from nemo_specrollout.simulation.transformer import eagle3_head, model_named
from nemo_specrollout.simulation.workload import AcceptanceTerms, acceptance_for

PLAIN, FIXED, AUTO, APART = "plain", "fixed", "auto", "apart"


@dataclass(frozen=True)
class Fleet:
    """Builds the engines of a scenario on demand."""

    scenario: Scenario

    @cached_property
    def policy(self) -> RooflineCosts | None:
        """Roofline of the policy's engine; None if the scenario has other costs."""
        s = self.scenario
        if s.costs.kind != "roofline":
            return None
        parallel = Parallel(s.cluster.gpus_per_engine, s.cluster.expert_parallel)
        device = device_named(s.cluster.device, "cluster.device")
        return RooflineCosts(
            model_named(s.model, "model"), device, parallel, s.precision, s.kv_precision, s.calibration
        )

    @cached_property
    def terms_M(self) -> tuple[AcceptanceTerms, ...]:
        """Acceptance of each method."""
        return tuple(AcceptanceTerms(_typical(m), m.spread) for m in self.scenario.drafting.methods)

    @cached_property
    def num_slots(self) -> int:
        """Requests that an engine decodes at a time, limited by the config and by its memory at the mean length.

        Raises ConfigError if a single request does not fit.
        """
        most = self.scenario.batch.max_requests
        if self.policy is None:
            return most
        lengths = self.scenario.lengths
        tokens = self.scenario.batch.prompt_tokens + min(lengths.median * 1.5, lengths.max_tokens)
        capacity = int(self.policy.kv_tokens)
        if capacity < tokens:
            raise ConfigError(
                f"batch.prompt_tokens: {self.scenario.batch.prompt_tokens}; a request of {tokens:.0f} tokens with its "
                f"response does not fit beside the weights, which leave space for {max(0, capacity)}: lower it, or "
                "raise cluster.gpus_per_engine"
            )
        return min(most, int(capacity / tokens))

    def num_engines(self, kind: str) -> int:
        """Returns the number of engines, or of pairs of a verifier and a separate drafter."""
        if kind == APART and self.placement is not None:
            return self.placement.num_groups
        return self.scenario.cluster.generating_gpus // self.scenario.cluster.gpus_per_engine

    def costs(self, method: int) -> Costs:
        """Returns the costs of an engine that drafts by a method."""
        s = self.scenario
        if s.costs.kind == "tables":
            tables = CostTables.read(Path(str(s.costs.profile)), "costs.profile")
            return tabled(tables, s.cluster.gpus_per_engine, "cluster.gpus_per_engine")
        own = s.costs.rounds or s.costs.linear
        if own is not None:
            return own
        assert self.policy is not None
        drafter = self._drafter(self.policy, s.drafting.methods[method])
        return replace(self.policy, drafter=drafter)

    def speculation(self, kind: str, method: int) -> Speculation:
        """Returns the speculation of an engine.

        `kind` is `plain`, `fixed`, `auto`, or `apart` for a separate drafter, which becomes `auto` if none can be placed.
        """
        drafting, costs = self.scenario.drafting, self.costs(method)
        if kind == PLAIN:
            return NoSpeculation(costs)
        if kind == APART and self.placement is not None and drafting.methods[method].draft not in (HEAD, TEXT):
            return DecoupledSpeculation(costs, self._remote(self.placement.drafter_size, method), drafting.max_k)
        fixed = kind == FIXED
        budget = BudgetConfig("fixed", k=drafting.k) if fixed else BudgetConfig("auto")
        has_weights = drafting.methods[method].draft != TEXT and self.scenario.costs.kind != "rounds"
        return CoupledSpeculation(costs, budget, drafting.k if fixed else drafting.max_k, has_weights)

    @cached_property
    def placement(self) -> Option | None:
        """Best pairs of verifier and drafter by the production planner; None if separate drafters are disabled or do
        not fit."""
        s = self.scenario
        if not s.drafting.drafter_gpus or self.policy is None:
            return None
        tables = self._tables()
        found = place(tables, s.batch.num_requests, s.cluster.generating_gpus, self.terms_M[0].centre, s.drafting.max_k)
        return next((option for option in found.options if option.mode == DECOUPLED), None)

    def _tables(self) -> CostTables:
        """Returns the cost model as cost tables for the planner."""
        s, counts = self.scenario, tuple(2**i for i in range(12))
        context = s.batch.prompt_tokens + s.lengths.median / 2
        costs, size = self.costs(0), s.cluster.gpus_per_engine

        def verify_s(num_rows: int) -> float:
            num_requests = max(1, num_rows // (1 + s.drafting.k))
            return float(costs.step_s(num_requests, float(num_rows), context))

        drafters = {g: self._remote(g) for g in s.drafting.drafter_gpus}
        curves = tuple(
            CostCurve(g, counts, tuple(float(d.step_s(n, float(n), context)) for n in counts))
            for g, d in drafters.items()
        )
        verify = CostCurve(size, counts, tuple(verify_s(n) for n in counts))
        coupled = CostCurve(size, counts, tuple(costs.draft_s(n, context) for n in counts))
        return CostTables(s.cluster.device, s.model, s.drafting.methods[0].draft, (verify,), "GPU", curves, (coupled,))

    def _remote(self, num_gpus: int, method: int = 0) -> Costs:
        assert self.policy is not None
        shape = model_named(self.scenario.drafting.methods[method].draft, "drafting.methods.draft")
        return drafter_costs(self.policy, shape, num_gpus)

    def _drafter(self, policy: RooflineCosts, method: MethodConfig) -> RooflineCosts | None:
        if method.draft == TEXT:
            return None
        is_head = method.draft == HEAD
        shape = eagle3_head(policy.shape) if is_head else model_named(method.draft, "drafting.methods.draft")
        return drafter_costs(policy, shape)


def _typical(method: MethodConfig) -> float:
    if method.acceptance is not None:
        return method.acceptance
    if method.acceptance_length is None:
        raise ConfigError(f"drafting.methods: {method.name!r} has no acceptance; give it")
    return acceptance_for(method.acceptance_length, method.at_k, method.spread)
