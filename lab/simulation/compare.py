# SPDX-License-Identifier: Apache-2.0
"""Simulates RL steps, and compares plain decoding with variants that have further features.

The features are added one by one, or a run's config says which there are. Steps are synchronous, or they are asynchronous
with a lag and with separate GPUs for generation and training.

Shapes: R requests, T steps, B requests of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.simulation.dealing import in_shards
from lab.simulation.event_loop import Rollout, StepResult
from lab.simulation.run_ahead import AUTO as AUTO_STEPS
from lab.simulation.run_ahead import rolling_steps
from lab.simulation.scenario import Scenario
from lab.simulation.setting import APART, AUTO, FIXED, PLAIN, Fleet, Setting, Variant
from nemo_specrollout.config.block import FastestOfNConfig, SpecrolloutConfig


def simulate_step(setting: Setting) -> StepResult:
    """Simulates an RL step in a setting, and returns its times. If steps overlap, these are means over several steps."""
    return _synchronous(setting) if setting.fleet.scenario.training.mode == "sync" else _asynchronous(setting)


def _synchronous(setting: Setting) -> StepResult:
    requests = setting.requests(1)
    num_requests = len(requests.length_R)
    rollout = setting.rollout(requests)
    rollout.start(np.arange(num_requests), in_shards(num_requests, len(rollout.engines)))
    rollout.run()
    result = rollout.result()
    parts_s = setting.parts_s(requests.num_tokens, num_requests) | {"generate": result.seconds}
    idle_share = result.idle_share * result.seconds / sum(parts_s.values())
    return StepResult(setting.variant.name, parts_s, result.seconds, idle_share, result)


def _asynchronous(setting: Setting) -> StepResult:
    """Simulates overlapping steps, and returns means over their later half.

    The last steps are left out, because no generation runs beside them. If n batches are generated at the same time, they also
    end at about the same time, so the times of steps repeat every n steps. Therefore the mean is over whole cycles of n steps.
    """
    cluster = setting.fleet.scenario.cluster
    training = setting.fleet.scenario.training
    requests = setting.requests(training.num_steps)
    rollout = setting.rollout(requests)
    length_TB = requests.length_R.reshape(training.num_steps, -1)
    parts_T = [setting.parts_s(int(length_B.sum()), len(length_B)) for length_B in length_TB]
    ahead = min(training.lag, (training.buffer_batches or training.lag + 1) - 1)
    generated_s_T, waited_s_T, trained_s_T = _train_all(rollout, [sum(parts.values()) for parts in parts_T], ahead)
    cycle = ahead + 1
    last = training.num_steps - ahead
    first = last - max(1, last // 2 // cycle) * cycle
    parts_s = {name: float(np.mean([parts[name] for parts in parts_T[first:last]])) for name in parts_T[0]}
    waited_s = float(waited_s_T[first:last].mean())
    result = rollout.result()
    idle_training = waited_s / (waited_s + sum(parts_s.values()))
    idle_generating = result.idle_share_between(float(trained_s_T[first - 1]), float(trained_s_T[last - 1]))
    idle_gpus = cluster.generating_gpus * idle_generating + cluster.training_gpus * idle_training
    rollout_s = float(generated_s_T[first:last].mean())
    parts_s["generate"] = waited_s
    return StepResult(setting.variant.name, parts_s, rollout_s, idle_gpus / cluster.num_gpus, result)


def _train_all(rollout: Rollout, train_s_T: list[float], ahead: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Simulates training on one batch after another, while up to `ahead` later batches are generated.

    So the generation of batch j begins with policy version j - `ahead`. Returns three arrays with a value for each batch. They
    are the seconds of its generation, the seconds that training waited for it, and the second at which training on it ended.
    """
    requests_TB = np.arange(len(rollout.end_R)).reshape(len(train_s_T), -1)
    engine_B = in_shards(requests_TB.shape[1], len(rollout.engines))
    generated_s_T, waited_s_T, trained_s_T = np.zeros((3, len(train_s_T)))
    began_s: list[float] = []
    for requests_B in requests_TB[: 1 + ahead]:
        rollout.start(requests_B, engine_B)
        began_s.append(0.0)
    free_s = 0.0
    for step, requests_B in enumerate(requests_TB):
        rollout.run(until_ended=requests_B)
        complete_s = float(rollout.end_R[requests_B].max())
        begin_s = max(free_s, complete_s)
        generated_s_T[step] = complete_s - began_s[step]
        waited_s_T[step] = begin_s - free_s
        free_s = trained_s_T[step] = begin_s + train_s_T[step]
        rollout.run(free_s)
        if len(began_s) < len(requests_TB):
            rollout.start(requests_TB[len(began_s)], engine_B)
            began_s.append(rollout.now_s)
    return generated_s_T, waited_s_T, trained_s_T


DECOUPLED, MOVING, RACING, RUN_AHEAD = "decoupled", "moving", "racing", "run_ahead"
ON_POLICY = "on policy"
"""Name of a variant of asynchronous scenarios. Its steps are synchronous on the same cluster, so the engines wait while the
training GPUs train."""
TAIL = "fastest_of_n"


@dataclass(frozen=True)
class Comparison:
    """The simulated variants of a scenario, of which plain decoding is the first."""

    scenario: Scenario
    steps: tuple[StepResult, ...]

    @property
    def lengths(self) -> np.ndarray:
        """Response lengths of all simulated steps, int64."""
        return self.plain.rollout.length_R

    @property
    def plain(self) -> StepResult:
        return self.steps[0]

    @property
    def best(self) -> StepResult:
        """The variant with the shortest step. Ties are broken by the shortest rollout."""
        return min(self.steps, key=lambda step: (round(step.step_s, 3), step.rollout_s))

    def speedup(self, step: StepResult) -> float:
        """Returns the speedup of the whole step over plain decoding."""
        return self.plain.step_s / step.step_s

    def rollout_speedup(self, step: StepResult) -> float:
        """Returns the speedup of the rollout over plain decoding."""
        return self.plain.rollout_s / step.rollout_s

    def peak_share(self, step: StepResult) -> float | None:
        """Returns the share of the GPUs' peak arithmetic that response tokens need, or None without a data sheet."""
        policy = Fleet(self.scenario).policy
        rollout = step.rollout
        if policy is None:
            return None
        gpus_s = self.scenario.cluster.generating_gpus * rollout.seconds
        return policy.ideal_s(rollout.num_tokens) * policy.num_gpus / gpus_s


def compare(scenario: Scenario, traced: Sequence[np.ndarray] = ()) -> Comparison:
    """Simulates a scenario with features added one by one, and returns all variants.

    The first variants are plain decoding, a fixed budget, `auto`, and separate drafters if they can be placed. Moves, races
    and `run_ahead` are then added to separate drafters if these are faster than `auto`, and otherwise to `auto`. `traced` are
    measured response lengths, as in `Setting`.
    """
    fleet = Fleet(scenario)

    def simulated(name: str, kind: str, tail: FastestOfNConfig | None = None) -> StepResult:
        return simulate_step(Setting(fleet, Variant(name, kind, tail), tuple(traced)))

    steps = [simulated(kind, kind) for kind in (PLAIN, FIXED, AUTO)]
    kind = AUTO
    if fleet.placement is not None:
        steps.append(simulated(DECOUPLED, APART))
        kind = APART if steps[-1].step_s < steps[-2].step_s else AUTO
    if fleet.num_engines(kind) > 1:
        steps.append(simulated(MOVING, kind, FastestOfNConfig(max_racers=1)))
        if len(scenario.drafting.methods) > 1:
            steps.append(simulated(RACING, kind, FastestOfNConfig()))
    steps += _with_texts_in_flight(fleet, kind, tuple(traced))
    return Comparison(scenario, tuple(steps))


def _with_texts_in_flight(fleet: Fleet, kind: str, traced: tuple[np.ndarray, ...]) -> list[StepResult]:
    """Simulates synchronous steps with early texts, and returns the result of each variant.

    The variants have early texts for one coming step, for two and so on up to the scenario's number, and for as many as the
    production code chooses (`auto`). With several engines there are two more, which are `auto` with moves, and moves without
    early texts. Returns an empty list if the scenario has no `run_ahead`.
    """
    training = fleet.scenario.training
    ahead = training.run_ahead
    if ahead is None:
        return []
    numbers = {f"{RUN_AHEAD} {number}": number for number in range(1, ahead.steps + 1)}
    variants: dict[str, tuple[int, FastestOfNConfig | None]] = {
        name: (number, None) for name, number in (numbers | {f"{RUN_AHEAD} auto": AUTO_STEPS}).items()
    }
    if training.mode == "async":
        variants = {ON_POLICY: (0, None)} | variants
    if fleet.num_engines(kind) > 1:
        moving = FastestOfNConfig(max_racers=1)
        variants |= {f"{ON_POLICY}, {MOVING}": (0, moving), f"{RUN_AHEAD} auto, {MOVING}": (AUTO_STEPS, moving)}
    return [
        rolling_steps(Setting(fleet, Variant(name, kind, tail), traced), number)
        for name, (number, tail) in variants.items()
    ]


def as_configured(scenario: Scenario, block: SpecrolloutConfig) -> Comparison:
    """Simulates plain decoding, drafting as `block` configures it, and its `fastest_of_n` if there are several engines."""
    fleet = Fleet(scenario)
    kind = drafting_kind(fleet, block)
    tail = block.fastest_of_n
    is_split = bool(scenario.drafting.methods_of_workers)
    variants = [Variant(PLAIN, PLAIN)] + ([Variant(kind, kind, is_split=is_split)] if kind != PLAIN else [])
    if tail is not None and tail.enabled and fleet.num_engines(kind) > 1:
        variants.append(Variant(TAIL, kind, tail, is_split))
    return Comparison(scenario, tuple(simulate_step(Setting(fleet, variant)) for variant in variants))


def drafting_kind(fleet: Fleet, block: SpecrolloutConfig) -> str:
    """Returns the kind of drafting that a block configures, which is `plain`, `fixed`, `auto` or `apart`.

    `apart` means a separate drafter (`Fleet.speculation`). It is returned only if a separate drafter can be placed.
    """
    if not block.enabled or not block.drafters:
        return PLAIN
    if block.remote is not None and fleet.placement is not None:
        return APART
    return FIXED if block.budget.policy == "fixed" else AUTO


def onset(step: StepResult) -> tuple[float, float] | None:
    """Returns when a step's first move or race happens, in seconds, and the share of requests that have ended by then.

    Returns None if no request moves and no engines race.
    """
    if not step.rollout.changes:
        return None
    at_s = step.rollout.changes[0].at_s
    return at_s, float(np.mean(step.rollout.end_R <= at_s))


@dataclass(frozen=True)
class Drafted:
    """What an engine drafts in an engine step with a given number of typical requests."""

    num_requests: int
    drafts: float
    tokens: float
    speedup: float
    """Speedup over plain decoding with the same number of requests."""


def drafted(scenario: Scenario, block: SpecrolloutConfig) -> list[Drafted]:
    """Returns what an engine with the first draft method drafts for 1, 4, 16 and more requests.

    The largest number is the engine's share of the requests of a training step.
    """
    fleet = Fleet(scenario)
    kind = drafting_kind(fleet, block)
    if kind == PLAIN:
        return []
    share = -(-scenario.batch.num_requests // fleet.num_engines(kind))
    most = min(share, fleet.num_slots)
    context = scenario.batch.prompt_tokens + scenario.lengths.median / 2
    speculation = fleet.speculation(kind, 0)
    plain = fleet.speculation(PLAIN, 0)
    rows = []
    for size in sorted({4**i for i in range(12) if 4**i < most} | {most}):
        p_B = np.full(size, scenario.drafting.methods[0].centre)
        step = speculation.decode_step(p_B, context)
        speedup = speculation.tokens_per_s(p_B, context) / plain.tokens_per_s(p_B, context)
        rows.append(Drafted(size, step.num_rows / size - 1.0, float(step.tokens_B.mean()), speedup))
    return rows
