# SPDX-License-Identifier: Apache-2.0
"""Setting of a simulation: a scenario with some features enabled, its requests, engines and other parts of a step.

Shapes: P prompts, S samples of a prompt.
"""

from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.block import FastestOfNConfig
from nemo_specrollout.scheduling.racing.response_lengths import LengthEstimator
from nemo_specrollout.simulation.engine_setup import PLAIN, Fleet
from nemo_specrollout.simulation.event_loop import Rollout
from nemo_specrollout.simulation.simulated_engine import SimulatedEngine
from nemo_specrollout.simulation.stragglers import SimulatedSpeeds, TailPolicy
from nemo_specrollout.simulation.workload import Workload, workload

_ASKED = 50
"""Maximum number of times that the tail policy is asked within the decoding time of the longest response."""
_SEED_OF_PAST = 1_000_003
"""Offset of the seed for the past rollout that the length estimator has seen."""


@dataclass(frozen=True)
class Variant:
    """Enabled features."""

    name: str
    speculation: str = PLAIN
    """Kind of drafting, as in `Fleet.speculation`."""

    tail: FastestOfNConfig | None = None
    """Config of the straggler policy; None if each engine keeps its share."""

    is_split: bool = False
    """Whether each engine drafts by its own method even without races. Otherwise all use the first method."""


@dataclass(frozen=True)
class Setting:
    """A fleet and a variant. `traced` has the lengths of measured steps, int64 [P, S] each; if empty, lengths are drawn."""

    fleet: Fleet
    variant: Variant
    traced: tuple[np.ndarray, ...] = ()

    def requests(self, num_steps: int) -> Workload:
        """Returns the requests of `num_steps` steps, one after the other, equally many of each."""
        scenario, rng = self.fleet.scenario, np.random.default_rng(self.fleet.scenario.seed)
        lengths = self._traced(num_steps) if self.traced else [self._drawn(rng) for _ in range(num_steps)]
        correlation = scenario.drafting.method_correlation
        return workload(np.concatenate(lengths), scenario.batch.prompt_tokens, self.fleet.terms_M, correlation, rng)

    def rollout(self, requests: Workload) -> Rollout:
        """Returns a rollout whose engines have no requests yet."""
        return Rollout(requests, self._engines(), self._tail())

    def parts_s(self, num_tokens: int, num_requests: int) -> dict[str, float]:
        """Returns the seconds of all parts except generation.

        A token costs two operations for each parameter in a forward pass, and four more in a backward pass.
        """
        scenario, training, policy = self.fleet.scenario, self.fleet.scenario.training, self.fleet.policy
        logprob_s, train_s = training.logprob_s, training.train_s
        if policy is not None:
            all_tokens = num_tokens + num_requests * scenario.batch.prompt_tokens
            forward_s = 2.0 * policy.shape.active_params * all_tokens
            forward_s /= policy.device.bf16_flops * scenario.cluster.training_gpus
            logprob_s = forward_s / scenario.calibration.logprob_share if logprob_s is None else logprob_s
            train_s = 3.0 * forward_s / scenario.calibration.train_share if train_s is None else train_s
        return {
            "data": training.data_s, "prepare": training.prepare_s, "log-prob": logprob_s or 0.0, "train": train_s or 0.0,
            "refit": training.refit_s,
        }  # fmt: skip

    def _drawn(self, rng: np.random.Generator) -> np.ndarray:
        batch = self.fleet.scenario.batch
        return self.fleet.scenario.lengths.draw(batch.num_prompts, batch.num_samples, rng)

    def _traced(self, num_steps: int) -> list[np.ndarray]:
        """Returns the last step, or repeats the steps of the same shape."""
        alike = [lengths for lengths in self.traced if lengths.shape == self.traced[-1].shape]
        return [alike[i % len(alike)] for i in range(num_steps)] if num_steps > 1 else [alike[-1]]

    def _engines(self) -> list[SimulatedEngine]:
        """Returns an engine for each policy engine, or for each pair of verifier and drafter."""
        fleet, methods = self.fleet, self._methods()
        kinds = [fleet.speculation(self.variant.speculation, m) for m in range(len(fleet.terms_M))]
        if not fleet.scenario.drafting.freed_workers_switch:
            return [SimulatedEngine(i, kinds[m], m, fleet.num_slots) for i, m in enumerate(methods)]
        engines = [SimulatedEngine(i, kinds[0], 0, fleet.num_slots) for i in range(len(methods))]
        for engine, method in zip(engines, methods, strict=True):
            engine.after_idle = (kinds[method], method)
        return engines

    def _methods(self) -> list[int]:
        """Returns the method of each engine. Methods differ only if they race or are split."""
        drafting, num_engines = self.fleet.scenario.drafting, self.fleet.num_engines(self.variant.speculation)
        tail = self.variant.tail
        if not self.variant.is_split and (tail is None or tail.max_racers == 1):
            return [0] * num_engines
        names = [method.name for method in drafting.methods]
        pattern = [names.index(name) for name in drafting.methods_of_workers] or list(range(len(names)))
        return [pattern[i % len(pattern)] for i in range(num_engines)]

    def _tail(self) -> TailPolicy | None:
        if self.variant.tail is None:
            return None
        fleet, scenario = self.fleet, self.fleet.scenario
        methods = tuple(fleet.speculation(self.variant.speculation, m) for m in range(len(fleet.terms_M)))
        context = scenario.batch.prompt_tokens + scenario.lengths.max_tokens / 2
        speeds = SimulatedSpeeds(methods, tuple(terms.centre for terms in fleet.terms_M), context)
        every_s = scenario.lengths.max_tokens / speeds.tokens_per_s(0, 1) / _ASKED
        return TailPolicy(self.variant.tail, speeds, self._estimator(), every_s)

    def _estimator(self) -> LengthEstimator:
        """Returns an estimator that has seen a rollout of other prompts."""
        estimator = LengthEstimator(self.fleet.scenario.lengths.max_tokens)
        past_PS = self._drawn(np.random.default_rng(self.fleet.scenario.seed + _SEED_OF_PAST))
        for prompt, lengths_S in enumerate(past_PS.tolist()):
            for length in lengths_S:
                estimator.finished(-1 - prompt, length)
        return estimator
