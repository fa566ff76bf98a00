# SPDX-License-Identifier: Apache-2.0
"""The setting of a simulation, which is a scenario with some features enabled.

From it follow the simulated engines, the requests, and the seconds of the other parts of a step.

Shapes: R requests, M draft methods, P prompts, S samples of a prompt.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from lab.placement.cost_tables import CostCurve, CostTables
from lab.placement.planner import DECOUPLED, Option, place
from lab.simulation.costs import Costs, RooflineCosts, TabledCosts, drafter_costs
from lab.simulation.data_sheets import device_named, eagle3_head, model_named
from lab.simulation.event_loop import Rollout
from lab.simulation.scenario import HEAD, TEXT, Scenario
from lab.simulation.simulated_engine import SimulatedEngine, SimulatedSpeeds, TailPolicy
from lab.simulation.speculation import CoupledSpeculation, DecoupledSpeculation, NoSpeculation, Speculation
from lab.simulation.workload import Workload, workload
from nemo_specrollout.config.block import BudgetConfig, FastestOfNConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.stragglers.decisions.request_estimates import LengthEstimator

PLAIN, FIXED, AUTO, APART = "plain", "fixed", "auto", "apart"
_ASKED = 50
"""Maximum number of times that the tail policy is asked within the decoding time of the longest response."""
_SEED_OF_PAST = 1_000_003
"""Offset of the seed for the past rollout that the length estimator has seen."""


@dataclass(frozen=True)
class Fleet:
    """The engines of a scenario, with their number, costs and ways to draft. Every figure is computed when it is needed."""

    scenario: Scenario

    @cached_property
    def policy(self) -> RooflineCosts | None:
        """Roofline costs of the policy's engine, or None if the scenario has other costs."""
        s = self.scenario
        if s.costs.kind != "roofline":
            return None
        return RooflineCosts(
            model_named(s.model, "model"),
            device_named(s.cluster.device, "cluster.device"),
            s.precision,
            s.kv_precision,
            s.calibration,
            s.cluster.gpus_per_engine,
            s.cluster.expert_parallel,
        )

    @cached_property
    def num_slots(self) -> int:
        """Most requests that an engine decodes at a time, limited by the config and by its memory for requests of mean length.

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
        """Returns the number of engines for a kind of drafting. A verifier and its separate drafter count as one engine."""
        if kind == APART and self.placement is not None:
            return self.placement.num_groups
        return self.scenario.cluster.generating_gpus // self.scenario.cluster.gpus_per_engine

    def costs(self, method: int) -> Costs:
        """Returns the costs of an engine that drafts by the method with this number."""
        s = self.scenario
        if s.costs.kind == "tables":
            return _tabled(CostTables.read(Path(str(s.costs.profile)), "costs.profile"), s.cluster.gpus_per_engine)
        own = s.costs.rounds or s.costs.linear
        if own is not None:
            return own
        assert self.policy is not None
        draft = s.drafting.methods[method].draft
        if draft == TEXT:
            return self.policy
        is_head = draft == HEAD
        shape = eagle3_head(self.policy.shape) if is_head else model_named(draft, "drafting.methods.draft")
        return replace(self.policy, drafter=drafter_costs(self.policy, shape))

    def speculation(self, kind: str, method: int) -> Speculation:
        """Returns a `Speculation`, which simulates how an engine drafts, for a kind of drafting and a draft method's number.

        `kind` is `plain`, `fixed`, `auto`, or `apart` for a separate drafter. If no separate drafter can be placed, `apart`
        means `auto`.
        """
        drafting = self.scenario.drafting
        costs = self.costs(method)
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
        """The best pairs of a verifier and a separate drafter, as the production planner finds them.

        None if separate drafters are disabled or do not fit.
        """
        s = self.scenario
        if not s.drafting.drafter_gpus or self.policy is None:
            return None
        tables = self.tables()
        p = s.drafting.methods[0].centre
        found = place(tables, s.batch.num_requests, s.cluster.generating_gpus, p, s.drafting.max_k)
        return next((option for option in found.options if option.mode == DECOUPLED), None)

    def tables(self) -> CostTables:
        """Returns the scenario's cost model as cost tables, which the planner needs."""
        s = self.scenario
        counts = tuple(2**i for i in range(12))
        context = s.batch.prompt_tokens + s.lengths.median / 2
        costs = self.costs(0)
        size = s.cluster.gpus_per_engine

        def verify_s(num_rows: int) -> float:
            num_requests = max(1, num_rows // (1 + s.drafting.k))
            return float(costs.step_s(num_requests, float(num_rows), context))

        def drafter_curve(num_gpus: int) -> CostCurve:
            drafter = self._remote(num_gpus)
            return CostCurve(num_gpus, counts, tuple(float(drafter.step_s(n, float(n), context)) for n in counts))

        curves = tuple(drafter_curve(num_gpus) for num_gpus in s.drafting.drafter_gpus)
        verify = CostCurve(size, counts, tuple(verify_s(n) for n in counts))
        coupled = CostCurve(size, counts, tuple(costs.draft_s(n, context) for n in counts))
        return CostTables(s.cluster.device, s.model, s.drafting.methods[0].draft, (verify,), "GPU", curves, (coupled,))

    def _remote(self, num_gpus: int, method: int = 0) -> Costs:
        assert self.policy is not None
        shape = model_named(self.scenario.drafting.methods[method].draft, "drafting.methods.draft")
        return drafter_costs(self.policy, shape, num_gpus)


def _tabled(tables: CostTables, size: int) -> TabledCosts:
    """Returns the costs of an engine of `size` threads or GPUs. Raises ConfigError if the size was not measured."""
    verify = {curve.size: curve for curve in tables.verify_s}
    if size not in verify:
        raise ConfigError(f"cluster.gpus_per_engine: {size}; measured were {sorted(verify)}: take one of those")
    return TabledCosts(verify[size], {curve.size: curve for curve in tables.coupled_draft_s}.get(size))


@dataclass(frozen=True)
class Variant:
    """The features that are enabled in a simulation."""

    name: str
    speculation: str = PLAIN
    """Kind of drafting, which is `plain`, `fixed`, `auto` or `apart` (`Fleet.speculation`)."""
    tail: FastestOfNConfig | None = None
    """Config of the tail policy, or None if requests never move and engines never race."""
    is_split: bool = False
    """Whether each engine drafts by its own method even if engines do not race. Otherwise all engines use the first method."""
    is_blind: bool = False
    """Whether the tail policy ignores the early requests that a move displaces. This shows the benefit of counting them."""


@dataclass(frozen=True)
class Setting:
    """A fleet and the features of a variant. `traced` has the response lengths of measured steps, int64 [P, S] each.

    If `traced` is empty, lengths are drawn at random.
    """

    fleet: Fleet
    variant: Variant
    traced: tuple[np.ndarray, ...] = ()

    def requests(self, num_steps: int) -> Workload:
        """Returns the requests of `num_steps` steps, one step after another. All steps have equally many requests."""
        scenario = self.fleet.scenario
        rng = np.random.default_rng(self.fleet.scenario.seed)
        lengths = self._traced(num_steps) if self.traced else [self._drawn(rng) for _ in range(num_steps)]
        drafting = scenario.drafting
        centres_M, spreads_M = np.array([(m.centre, m.spread) for m in drafting.methods]).T
        return workload(
            np.concatenate(lengths),
            scenario.batch.prompt_tokens,
            centres_M,
            spreads_M,
            drafting.method_correlation,
            rng,
        )

    def rollout(self, requests: Workload) -> Rollout:
        """Returns a rollout whose engines have no requests yet."""
        return Rollout(requests, self._engines(), self.tail())

    def parts_s(self, num_tokens: int, num_requests: int) -> dict[str, float]:
        """Returns the seconds of each part of a step, with 0 for generation, which is simulated separately.

        A token costs two operations for each parameter in a forward pass, and four more in a backward pass.
        """
        scenario = self.fleet.scenario
        training = self.fleet.scenario.training
        policy = self.fleet.policy
        logprob_s = training.logprob_s
        train_s = training.train_s
        if policy is not None:
            all_tokens = num_tokens + num_requests * scenario.batch.prompt_tokens
            forward_s = 2.0 * policy.shape.active_params * all_tokens
            forward_s /= policy.device.bf16_flops * scenario.cluster.training_gpus
            logprob_s = forward_s / scenario.calibration.logprob_share if logprob_s is None else logprob_s
            train_s = 3.0 * forward_s / scenario.calibration.train_share if train_s is None else train_s
        return {
            "data": training.data_s,
            "prepare": training.prepare_s,
            "generate": 0.0,
            "log-prob": logprob_s or 0.0,
            "train": train_s or 0.0,
            "refit": training.refit_s,
        }

    def _drawn(self, rng: np.random.Generator) -> np.ndarray:
        batch = self.fleet.scenario.batch
        return self.fleet.scenario.lengths.draw(batch.num_prompts, batch.num_samples, rng)

    def _traced(self, num_steps: int) -> list[np.ndarray]:
        """Returns measured response lengths for `num_steps` steps, int64 [P, S] for each step.

        A single step gets the lengths of the last measured step. Several steps get the lengths of one measured step after
        another, from the beginning again where these run out. Measured steps with other numbers of prompts or samples than
        the last one are left out.
        """
        alike = [lengths for lengths in self.traced if lengths.shape == self.traced[-1].shape]
        return [alike[i % len(alike)] for i in range(num_steps)] if num_steps > 1 else [alike[-1]]

    def _engines(self) -> list[SimulatedEngine]:
        """Returns a simulated engine for each engine of the policy, or for each pair of a verifier and a separate drafter."""
        fleet = self.fleet
        methods = self._methods()
        kinds = self._speculations()
        if not fleet.scenario.drafting.freed_workers_switch:
            return [SimulatedEngine(i, kinds[m], m, fleet.num_slots) for i, m in enumerate(methods)]
        engines = [SimulatedEngine(i, kinds[0], 0, fleet.num_slots) for i in range(len(methods))]
        for engine, method in zip(engines, methods, strict=True):
            engine.after_idle = (kinds[method], method)
        return engines

    def _speculations(self) -> list[Speculation]:
        """Returns a `Speculation` for each draft method of the scenario, which simulates how an engine drafts with it."""
        num_methods = len(self.fleet.scenario.drafting.methods)
        return [self.fleet.speculation(self.variant.speculation, m) for m in range(num_methods)]

    def _methods(self) -> list[int]:
        """Returns the number of each engine's draft method.

        Methods differ only if engines race or if the variant gives each engine its own method. Otherwise all are method 0.
        """
        drafting = self.fleet.scenario.drafting
        num_engines = self.fleet.num_engines(self.variant.speculation)
        tail = self.variant.tail
        if not self.variant.is_split and (tail is None or tail.max_racers == 1):
            return [0] * num_engines
        names = [method.name for method in drafting.methods]
        pattern = [names.index(name) for name in drafting.methods_of_workers] or list(range(len(names)))
        return [pattern[i % len(pattern)] for i in range(num_engines)]

    def tail(self) -> TailPolicy | None:
        """Returns a tail policy whose length estimator has seen another rollout, or None if the variant has no tail policy."""
        if self.variant.tail is None:
            return None
        scenario = self.fleet.scenario
        context = scenario.batch.prompt_tokens + scenario.lengths.max_tokens / 2
        centres = tuple(method.centre for method in scenario.drafting.methods)
        speeds = SimulatedSpeeds(tuple(self._speculations()), centres, context)
        every_s = scenario.lengths.max_tokens / speeds.tokens_per_s(0, 1) / _ASKED
        return TailPolicy(self.variant.tail, speeds, self._estimator(), every_s, is_blind=self.variant.is_blind)

    def _estimator(self) -> LengthEstimator:
        """Returns a length estimator that has seen a rollout of other prompts."""
        estimator = LengthEstimator(self.fleet.scenario.lengths.max_tokens)
        past_PS = self._drawn(np.random.default_rng(self.fleet.scenario.seed + _SEED_OF_PAST))
        for prompt, lengths_S in enumerate(past_PS.tolist()):
            for length in lengths_S:
                estimator.finished(-1 - prompt, length)
        return estimator
