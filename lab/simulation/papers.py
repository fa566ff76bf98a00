# SPDX-License-Identifier: Apache-2.0
"""Compares the simulator's predictions with the figures of two papers, which are called Paper B and SpecActor.

Paper B is NVIDIA's (arXiv 2604.26779), and SpecActor is arXiv 2511.16193. Some of their figures were inputs of the simulated
scenarios, so only the others test the simulator.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from lab.simulation.compare import StepResult, simulate_step
from lab.simulation.scenario import read_scenario
from lab.simulation.setting import APART, FIXED, PLAIN, Fleet, Setting, Variant
from nemo_specrollout.config.block import FastestOfNConfig

ZERO, THINK, ASYNC = "nvidia-8b-zero", "nvidia-8b-think", "nvidia-8b-async"
SMALL, LARGE, DAPO = "nvidia-235b-512", "nvidia-235b-2048", "specactor-dapo-32b"
INPUT, PREDICTION = "input", "prediction"
_MOVING = Variant("decoupled, moving", APART, FastestOfNConfig(max_racers=1))
_RACING = Variant("decoupled, racing", APART, FastestOfNConfig())


@dataclass(frozen=True)
class Cell:
    """One figure of a paper, and the simulator's prediction of it."""

    table: str
    name: str
    role: str
    """`input` if the scenario was fitted to the figure, and otherwise `prediction`."""
    low: float
    """Figure of the paper, or the lower end of a range that the paper gives."""
    high: float
    """Upper end of the range, or the figure itself."""
    predicted: float
    unit: str = "x"

    @property
    def error(self) -> float:
        """Relative error of the prediction to the nearer end of the range, or 0 within the range."""
        nearest = min(max(self.predicted, self.low), self.high)
        return self.predicted / nearest - 1.0 if nearest else float(self.predicted != 0.0)


def account() -> Iterator[Cell]:
    """Yields all compared figures of both papers."""
    yield from step_table()
    yield from k_sweep()
    yield from draft_table()
    yield from asynchronous()
    yield from projections()
    yield from specactor()


def step_table() -> Iterator[Cell]:
    """Yields Paper B's times of a training step of Qwen3-8B with and without speculation.

    The times without speculation are inputs.
    """
    plain_parts = {ZERO: (0.2, 1.9, 17.8, 31.3), THINK: (0.3, 2.1, 17.9, 31.4)}
    speculated = {ZERO: (0.2, 2.1, 56.6, 18.1, 30.5, 107.5), THINK: (0.2, 1.6, 87.0, 18.1, 30.5, 137.4)}
    plain_totals = {ZERO: (100.0, 151.2), THINK: (133.6, 185.3)}
    names = ("data", "prepare", "generate", "log-prob", "train")
    for scenario in (ZERO, THINK):
        plain = _step(scenario, PLAIN)
        step = _step(scenario, FIXED)
        generate_s, total_s = plain_totals[scenario]
        data_s, prepare_s, *rest = plain_parts[scenario]
        for name, paper in zip(names, (data_s, prepare_s, generate_s, *rest), strict=True):
            yield _cell("step, plain", f"{scenario} {name}", INPUT, paper, plain.parts_s[name], "s")
        yield _cell("step, plain", f"{scenario} total", INPUT, total_s, plain.step_s, "s")
        for name, paper in zip((*names, "total"), speculated[scenario], strict=True):
            role = INPUT if (scenario, name) == (ZERO, "generate") else PREDICTION
            predicted = step.step_s if name == "total" else step.parts_s[name]
            yield _cell("step, EAGLE-3", f"{scenario} {name}", role, paper, predicted, "s")


def k_sweep() -> Iterator[Cell]:
    """Yields Paper B's acceptance lengths and speedups for different numbers k of drafts.

    Inputs are the acceptance lengths at k=3, and RL-Zero's speedups at k=3 and k=5.
    """
    paper = {
        ZERO: {3: (3.32, 1.77), 5: (4.35, 1.44), 7: (5.06, 1.21)},
        THINK: {3: (2.77, 1.53), 5: (3.23, 0.84), 7: (3.48, 0.71)},
    }
    for scenario, sweep in paper.items():
        for k, (length, speedup) in sweep.items():
            plain = _step(scenario, PLAIN)
            step = _step(scenario, FIXED, f"drafting.k={k}")
            predicted = step.rollout.num_tokens / step.rollout.num_request_steps
            name = f"{scenario} k={k}"
            yield _cell("k sweep", f"{name} length", INPUT if k == 3 else PREDICTION, length, predicted, "tokens")
            role = INPUT if scenario == ZERO and k in (3, 5) else PREDICTION
            yield _cell("k sweep", f"{name} rollout", role, speedup, plain.rollout_s / step.rollout_s)


def draft_table() -> Iterator[Cell]:
    """Yields Paper B's speedups of differently trained heads at k=3, from their acceptance lengths."""
    paper = {
        ZERO: {"chat, offline": (2.88, 1.51), "chat, online": (3.04, 1.63), "in-domain, online": (3.29, 1.78)},
        THINK: {"chat, offline": (2.40, 1.19), "chat, online": (2.55, 1.26), "in-domain, online": (2.74, 1.52)},
    }
    for scenario, rows in paper.items():
        for name, (length, speedup) in rows.items():
            method = f"drafting.methods=[{{name: eagle3, acceptance_length: {length}, at_k: 3}}]"
            gain = _step(scenario, PLAIN).rollout_s / _step(scenario, FIXED, method).rollout_s
            yield _cell("drafts", f"{scenario} {name}", PREDICTION, speedup, gain)


def asynchronous() -> Iterator[Cell]:
    """Yields Paper B's figures of asynchronous training of the 8B model with lag 1, each with the simulator's prediction."""
    plain = _step(ASYNC, PLAIN)
    step = _step(ASYNC, FIXED)
    yield _cell("async 8B", "plain exposed", INPUT, 10.4, plain.parts_s["generate"], "s")
    yield _cell("async 8B", "plain step", INPUT, 75.0, plain.step_s, "s")
    yield _cell("async 8B", "EAGLE-3 exposed", PREDICTION, 0.6, step.parts_s["generate"], "s")
    yield _cell("async 8B", "EAGLE-3 step", PREDICTION, 60.5, step.step_s, "s")
    yield _cell("async 8B", "step", PREDICTION, 1.24, plain.step_s / step.step_s)


def projections() -> Iterator[Cell]:
    """Yields Paper B's projections for a model of 235B parameters.

    The paper does not say for how many GPUs its projection at k=7 is. 512 GPUs are assumed, because then the share of
    generation fits.
    """
    longer = ("drafting.k=7", "drafting.methods=[{name: eagle3, acceptance_length: 5.0, at_k: 7}]")
    surest = ("drafting.k=7", "drafting.methods=[{name: eagle3, acceptance_length: 8.0, at_k: 7}]")
    cells = (
        ("512, k=3, length 3", SMALL, (), 2.72, 1.70, INPUT),
        ("512, k=7, length 5", SMALL, longer, 4.07, 1.96, PREDICTION),
        ("512, best, taken for k=7, length 8", SMALL, surest, 6.49, 2.22, PREDICTION),
        ("2,048, lag 2, k=5, length 4", LARGE, (), 3.5, 2.5, PREDICTION),
    )
    for name, scenario, overrides, rollout, whole, role in cells:
        plain = _step(scenario, PLAIN)
        step = _step(scenario, FIXED, *overrides)
        yield _cell("235B", f"{name}: rollout", PREDICTION, rollout, plain.rollout_s / step.rollout_s)
        yield _cell("235B", f"{name}: step", role, whole, plain.step_s / step.step_s)


def specactor() -> Iterator[Cell]:
    """Yields SpecActor's figures, each with the simulator's prediction.

    A figure of the paper is a range over several traces. The prediction is for the one trace that resembles DAPO.
    """
    plain = _step(DAPO, PLAIN)
    vanilla = _step(DAPO, FIXED)
    figures = [
        ("plain: idle share of the rollout", INPUT, 0.45, 0.55, plain.rollout.idle_share, ""),
        ("plain: rollout's share of a step", INPUT, 0.7, 0.8, plain.rollout_s / plain.step_s, ""),
        ("vanilla: rollout over plain", INPUT, 1.1, 1.2, plain.rollout_s / vanilla.rollout_s, "x"),
    ]
    for variant in (_MOVING, _RACING):
        step = _simulate(DAPO, variant, ())
        name = variant.name
        figures += [
            (f"{name}: rollout over plain", PREDICTION, 2.0, 2.7, plain.rollout_s / step.rollout_s, "x"),
            (f"{name}: rollout over vanilla", PREDICTION, 1.1, 2.6, vanilla.rollout_s / step.rollout_s, "x"),
            (f"{name}: step over plain", PREDICTION, 1.4, 2.3, plain.step_s / step.step_s, "x"),
        ]
    costs = Fleet(read_scenario(DAPO, [])).costs(0)
    context = 1500.0
    ratio = float(costs.step_s(256, 256.0, context)) / float(costs.step_s(128, 128.0, context))
    figures.append(("verification of 256 over 128", PREDICTION, 1.4, 1.4, ratio, "x"))
    yield from (Cell("SpecActor", *figure) for figure in figures)


def _cell(table: str, name: str, role: str, paper: float, predicted: float, unit: str = "x") -> Cell:
    return Cell(table, name, role, paper, paper, predicted, unit)


def _step(scenario: str, kind: str, *overrides: str) -> StepResult:
    return _simulate(scenario, Variant(kind, kind), overrides)


@cache
def _simulate(scenario: str, variant: Variant, overrides: tuple[str, ...]) -> StepResult:
    return simulate_step(Setting(Fleet(read_scenario(scenario, list(overrides))), variant))
