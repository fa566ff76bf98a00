# SPDX-License-Identifier: Apache-2.0
"""A scenario with some features on: its requests, its workers, and what else than generation a step consists of.

Shapes: P prompts, S samples of a prompt.
"""

from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.fastest_of_n import FastestOfNConfig
from nemo_specrollout.scheduling.racing.response_lengths import LengthEstimator
from nemo_specrollout.simulation.engine_setup import PLAIN, Fleet
from nemo_specrollout.simulation.event_loop import Rollout
from nemo_specrollout.simulation.stragglers import MethodPaces, Tail
from nemo_specrollout.simulation.worker import Worker
from nemo_specrollout.simulation.workload import Workload, workload

# The tail policy is asked at most so often in the time that the longest response would take.
_ASKED = 50
# The rollout that the length estimator has seen before is drawn by the scenario's seed and this.
_SEED_OF_PAST = 1_000_003


@dataclass(frozen=True)
class Variant:
    """Which features are on."""

    name: str
    speculation: str = PLAIN
    """As `Fleet.speculation` has it."""

    tail: FastestOfNConfig | None = None
    """What may be done with the tail; None: each worker does its own share."""

    is_split: bool = False
    """Whether each worker drafts by its own method, though none races; otherwise all do by the first."""


@dataclass(frozen=True)
class Setting:
    """A fleet, a variant, and the lengths of a trace's steps, int64 [P, S] each; without any they are drawn."""

    fleet: Fleet
    variant: Variant
    traced: tuple[np.ndarray, ...] = ()

    def requests(self, num_steps: int) -> Workload:
        """Of `num_steps` steps, one after the other, as many of each."""
        scenario, rng = self.fleet.scenario, np.random.default_rng(self.fleet.scenario.seed)
        lengths = self._traced(num_steps) if self.traced else [self._drawn(rng) for _ in range(num_steps)]
        correlation = scenario.drafting.method_correlation
        return workload(np.concatenate(lengths), scenario.batch.prompt_tokens, self.fleet.terms_M, correlation, rng)

    def rollout(self, requests: Workload) -> Rollout:
        """Workers without requests."""
        return Rollout(requests, self._workers(), self._tail())

    def parts_s(self, num_tokens: int, num_requests: int) -> dict[str, float]:
        """Seconds of all but the generation; a token costs two operations a parameter forward, four more backward."""
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
        """The last step, or those as large as it, over and over."""
        alike = [lengths for lengths in self.traced if lengths.shape == self.traced[-1].shape]
        return [alike[i % len(alike)] for i in range(num_steps)] if num_steps > 1 else [alike[-1]]

    def _workers(self) -> list[Worker]:
        """One for each engine, or for each pair of verifier and drafter."""
        fleet, methods = self.fleet, self._methods()
        kinds = [fleet.speculation(self.variant.speculation, m) for m in range(len(fleet.terms_M))]
        if not fleet.scenario.drafting.freed_workers_switch:
            return [Worker(i, kinds[m], m, fleet.num_slots) for i, m in enumerate(methods)]
        workers = [Worker(i, kinds[0], 0, fleet.num_slots) for i in range(len(methods))]
        for worker, method in zip(workers, methods, strict=True):
            worker.after_dry = (kinds[method], method)
        return workers

    def _methods(self) -> list[int]:
        """Of each worker; they have several where methods race, or where they are split."""
        drafting, num_workers = self.fleet.scenario.drafting, self.fleet.num_workers(self.variant.speculation)
        tail = self.variant.tail
        if not self.variant.is_split and (tail is None or tail.max_racers == 1):
            return [0] * num_workers
        names = [method.name for method in drafting.methods]
        pattern = [names.index(name) for name in drafting.methods_of_workers] or list(range(len(names)))
        return [pattern[i % len(pattern)] for i in range(num_workers)]

    def _tail(self) -> Tail | None:
        if self.variant.tail is None:
            return None
        fleet, scenario = self.fleet, self.fleet.scenario
        methods = tuple(fleet.speculation(self.variant.speculation, m) for m in range(len(fleet.terms_M)))
        context = scenario.batch.prompt_tokens + scenario.lengths.max_tokens / 2
        paces = MethodPaces(methods, tuple(terms.centre for terms in fleet.terms_M), context)
        every_s = scenario.lengths.max_tokens / paces.tokens_per_s(0, 1) / _ASKED
        return Tail(self.variant.tail, paces, self._estimator(), every_s)

    def _estimator(self) -> LengthEstimator:
        """One that has seen a rollout of other prompts."""
        estimator = LengthEstimator(self.fleet.scenario.lengths.max_tokens)
        past_PS = self._drawn(np.random.default_rng(self.fleet.scenario.seed + _SEED_OF_PAST))
        for prompt, lengths_S in enumerate(past_PS.tolist()):
            for length in lengths_S:
                estimator.finished(-1 - prompt, length)
        return estimator
