# SPDX-License-Identifier: Apache-2.0
"""A training step around its rollout: synchronous, or asynchronous with a lag and GPUs of its own for each side.

Shapes: R requests, of all steps that are simulated; P prompts, S samples of a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.config.tail import FastestOfNConfig
from nemo_specrollout.scheduling.dispatch import in_shards
from nemo_specrollout.scheduling.response_lengths import LengthEstimator
from nemo_specrollout.simulation.fleet import PLAIN, Fleet
from nemo_specrollout.simulation.rollout import Rollout, RolloutResult
from nemo_specrollout.simulation.tail import MethodPaces, Tail
from nemo_specrollout.simulation.worker import Span, Worker
from nemo_specrollout.simulation.workload import Workload, workload

# The tail policy is asked at most so often in the time that the longest response would take.
_ASKED = 50
# Past rollouts that the length estimator has seen.
_SEED_OF_PAST = 1_000_003


@dataclass(frozen=True)
class Variant:
    """Which features are on."""

    name: str
    speculation: str = PLAIN
    tail: FastestOfNConfig | None = None


@dataclass(frozen=True)
class StepResult:
    """A step in the steady state, and the rollout that it is taken from."""

    variant: str
    parts_s: dict[str, float]
    """Seconds of a step by what they went to; in asynchronous training generation is only what is not hidden."""
    rollout_s: float
    """From the start of a batch until its last request ended."""
    idle_share: float
    """Of all GPUs, over a step."""
    rollout: RolloutResult

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def exposed_s(self) -> float:
        """Generation for which training waits."""
        return self.parts_s["generate"]


def simulate_step(fleet: Fleet, variant: Variant, lengths: Sequence[np.ndarray] = ()) -> StepResult:
    """What a step takes; `lengths` are those of a trace's steps, int64 [P, S] each, else they are drawn."""
    if fleet.scenario.training.mode == "sync":
        return _synchronous(fleet, variant, lengths)
    return _asynchronous(fleet, variant, lengths)


def _synchronous(fleet: Fleet, variant: Variant, lengths: Sequence[np.ndarray]) -> StepResult:
    work = _workload(fleet, lengths, 1)
    rollout = Rollout(work, _workers(fleet, variant), _tail(fleet, variant))
    rollout.start(np.arange(len(work.length_R)), in_shards(len(work.length_R), len(rollout.workers)))
    rollout.run()
    result = rollout.result()
    parts = _parts(fleet, work.num_tokens, len(work.length_R))
    parts = {"data": parts["data"], "prepare": parts["prepare"], "generate": result.seconds, **parts}
    idle_share = result.idle_share * result.seconds / sum(parts.values())
    return StepResult(variant.name, parts, result.seconds, idle_share, result)


def _asynchronous(fleet: Fleet, variant: Variant, lengths: Sequence[np.ndarray]) -> StepResult:
    training = fleet.scenario.training
    work = _workload(fleet, lengths, training.num_steps)
    rollout = Rollout(work, _workers(fleet, variant), _tail(fleet, variant))
    run = _AsynchronousRun(fleet, variant, work, rollout)
    run.train_all()
    return run.result()


class _AsynchronousRun:
    """Batch j may be generated once the weights are at most `lag` versions behind those that it will train: j - lag.

    Owns when each batch began, was complete, and was trained.
    """

    def __init__(self, fleet: Fleet, variant: Variant, work: Workload, rollout: Rollout) -> None:
        self.fleet, self.variant, self.work, self.rollout = fleet, variant, work, rollout
        training = fleet.scenario.training
        self.num_steps, self.size = training.num_steps, len(work.length_R) // training.num_steps
        self.ahead = min(training.lag, training.buffer_batches - 1 if training.buffer_batches else training.lag)
        self.left = np.full(self.num_steps, self.size)
        self.began_s, self.complete_s = np.zeros(self.num_steps), np.zeros(self.num_steps)
        self.waited_s, self.trained_s = np.zeros(self.num_steps), np.zeros(self.num_steps)
        self.parts = [self._parts_of(j) for j in range(self.num_steps)]

    def train_all(self) -> None:
        """Trains batch after batch; after each, the next one that may is begun."""
        for j in range(min(1 + self.ahead, self.num_steps)):
            self._begin(j)
        free_s = 0.0
        for j in range(self.num_steps):
            self.rollout.run(stop=lambda j=j: not self.left[j], on_end=self._ended)  # type: ignore[misc]
            begin_s = max(free_s, self.complete_s[j])
            self.waited_s[j] = begin_s - free_s
            free_s = self.trained_s[j] = begin_s + sum(self.parts[j].values())
            self.rollout.run(free_s, on_end=self._ended)
            if j + 1 + self.ahead < self.num_steps:
                self._begin(j + 1 + self.ahead)

    def result(self) -> StepResult:
        """Means over the steps that count."""
        first, last = self._counted()
        counted = slice(first, last)
        parts = {name: float(np.mean([p[name] for p in self.parts[counted]])) for name in self.parts[0]}
        waited_s = float(self.waited_s[counted].mean())
        rollout_s = float((self.complete_s - self.began_s)[counted].mean())
        result = self.rollout.result()
        begin_s = float(self.trained_s[first - 1]) if first else 0.0
        idle = self._idle_share(result.spans, begin_s, float(self.trained_s[last - 1]), waited_s, parts)
        parts = {"data": parts["data"], "prepare": parts["prepare"], "generate": waited_s, **parts}
        return StepResult(self.variant.name, parts, rollout_s, idle, result)

    def _counted(self) -> tuple[int, int]:
        """The later half of the steps, less the last few, beside which no more is generated. Batches that began together come
        together, so steps differ in a cycle as long as there are batches at a time: whole cycles are counted."""
        cycle = self.ahead + 1
        last = self.num_steps - self.ahead
        return last - max(1, last // 2 // cycle) * cycle, last

    def _begin(self, batch: int) -> None:
        self.began_s[batch] = self.rollout.now_s
        requests = np.arange(batch * self.size, (batch + 1) * self.size)
        self.rollout.start(requests, in_shards(self.size, len(self.rollout.workers)))

    def _ended(self, request: int, now_s: float) -> None:
        batch = request // self.size
        self.left[batch] -= 1
        if not self.left[batch]:
            self.complete_s[batch] = now_s

    def _parts_of(self, batch: int) -> dict[str, float]:
        lengths = self.work.length_R[batch * self.size : (batch + 1) * self.size]
        return _parts(self.fleet, int(lengths.sum()), self.size)

    def _idle_share(
        self, spans: tuple[Span, ...], begin_s: float, end_s: float, waited_s: float, parts: dict[str, float]
    ) -> float:
        cluster, num_workers = self.fleet.scenario.cluster, len(self.rollout.workers)
        busy_s = sum(max(0.0, min(s.end_s, end_s) - max(s.begin_s, begin_s)) for s in spans)
        idle_generating = 1.0 - busy_s / (num_workers * (end_s - begin_s))
        idle_training = waited_s / (waited_s + sum(parts.values()))
        gpus = cluster.generating_gpus, cluster.training_gpus
        return (gpus[0] * idle_generating + gpus[1] * idle_training) / sum(gpus)


# What a step consists of


def _workload(fleet: Fleet, lengths: Sequence[np.ndarray], num_steps: int) -> Workload:
    scenario, rng = fleet.scenario, np.random.default_rng(fleet.scenario.seed)
    batch = scenario.batch
    if lengths:
        chosen = [lengths[i % len(lengths)] for i in range(num_steps)] if num_steps > 1 else [lengths[-1]]
    else:
        chosen = [scenario.lengths.draw(batch.num_prompts, batch.num_samples, rng) for _ in range(num_steps)]
    correlation = scenario.drafting.method_correlation
    return workload(np.concatenate(chosen), batch.prompt_tokens, fleet.terms_M, correlation, rng)


def _workers(fleet: Fleet, variant: Variant) -> list[Worker]:
    """One for each engine, or for each pair of verifier and drafter."""
    kinds = [fleet.speculation(variant.speculation, m) for m in range(len(fleet.terms_M))]
    methods = _methods(fleet, variant)
    if not fleet.scenario.drafting.freed_workers_switch:
        return [Worker(i, kinds[m], m, fleet.num_slots) for i, m in enumerate(methods)]
    workers = [Worker(i, kinds[0], 0, fleet.num_slots) for i in range(len(methods))]
    for worker, method in zip(workers, methods, strict=True):
        worker.after_dry = (kinds[method], method)
    return workers


def _methods(fleet: Fleet, variant: Variant) -> list[int]:
    """Of each engine; only where methods race have they several."""
    drafting, num_workers = fleet.scenario.drafting, fleet.num_workers(variant.speculation)
    names = [method.name for method in drafting.methods]
    if variant.tail is None or variant.tail.max_racers == 1:
        return [0] * num_workers
    pattern = [names.index(name) for name in drafting.methods_of_workers] or list(range(len(names)))
    return [pattern[i % len(pattern)] for i in range(num_workers)]


def _tail(fleet: Fleet, variant: Variant) -> Tail | None:
    if variant.tail is None:
        return None
    scenario = fleet.scenario
    methods = tuple(fleet.speculation(variant.speculation, m) for m in range(len(fleet.terms_M)))
    context = scenario.batch.prompt_tokens + scenario.lengths.max_tokens / 2
    paces = MethodPaces(methods, tuple(t.centre for t in fleet.terms_M), context)
    every_s = scenario.lengths.max_tokens / paces.tokens_per_s(0, 1) / _ASKED
    return Tail(variant.tail, paces, _estimator(fleet), every_s, 0)


def _estimator(fleet: Fleet) -> LengthEstimator:
    """One that has seen a rollout of other prompts."""
    scenario = fleet.scenario
    estimator = LengthEstimator(scenario.lengths.max_tokens)
    rng = np.random.default_rng(scenario.seed + _SEED_OF_PAST)
    past_PS = scenario.lengths.draw(scenario.batch.num_prompts, scenario.batch.num_samples, rng)
    for prompt, lengths_S in enumerate(past_PS.tolist()):
        for length in lengths_S:
            estimator.finished(-1 - prompt, length)
    return estimator


def _parts(fleet: Fleet, num_tokens: int, num_requests: int) -> dict[str, float]:
    """Seconds of all but the generation; a token costs two operations a parameter forward, four more backward."""
    scenario, training = fleet.scenario, fleet.scenario.training
    logprob_s, train_s = training.logprob_s, training.train_s
    if fleet.policy is not None:
        all_tokens = num_tokens + num_requests * scenario.batch.prompt_tokens
        flops = 2.0 * fleet.policy.shape.active_params * all_tokens
        peak = fleet.policy.device.bf16_flops * scenario.cluster.training_gpus
        logprob_s = flops / (peak * scenario.calibration.logprob_share) if logprob_s is None else logprob_s
        train_s = 3.0 * flops / (peak * scenario.calibration.train_share) if train_s is None else train_s
    return {
        "data": training.data_s, "prepare": training.prepare_s, "log-prob": logprob_s or 0.0, "train": train_s or 0.0,
        "refit": training.refit_s,
    }  # fmt: skip
