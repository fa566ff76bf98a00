# SPDX-License-Identifier: Apache-2.0
"""The simulator's prediction for one H100, before any run: what drafts bring that are right with probability p.

    python -m lab.gpu.prediction [--out FILE]

`gpu_check speed` and `speed_experts` measure the same cells (`forced_acceptance.py`). Seconds of a step are the likely ones of
`step_floor.py`. Drafts come from text drafters, and each request's are right with the same probability.

Two predictions are made of the automatic budget. The simulator's budget knows the seconds of every step. The learning one has
seen plain steps of each number of requests, as the check's engine has by then. It learns the others from its own steps.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lab.gpu.gpu_report import Table, as_text
from lab.gpu.step_floor import BATCHES, NAMES, NUM_POSITIONS, TYPICAL, Step, likely_s
from lab.simulation.costs import Costs, Rows
from lab.simulation.data_sheets import DEVICES, MODELS, ModelShape
from lab.simulation.speculation import CoupledSpeculation, NoSpeculation, Speculation, spread
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.drafters.base import NUM_BINS
from nemo_specrollout.speculation.policy import build_policy
from nemo_specrollout.speculation.step_model import StepModel
from nemo_specrollout.storage.files import write_atomically

STORED = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu-prediction.json"
DEVICE = DEVICES["H100"]
RATES = (0.6, 0.8, 0.9)
FIXED = (1, 2, 4, 7)
"""Fixed numbers of drafts that the check measures."""
CONTEXT = 128.0
"""Mean tokens of a text in the check: a prompt of 64, and half of a response of 128."""
AUTO = BudgetConfig("auto")
NEAR = 0.97
"""Share of the best fixed number's speed that the automatic budget should reach."""
PLAIN_STEPS, LEARNING_STEPS, JUDGED_STEPS = 128, 64, 64
"""Steps of the learning budget: plain ones of each number of requests, its own, and its own that count."""
MAX_ROWS = 8192
"""Rows that the engine's table of step times holds: its tokens in a step."""


@dataclass(frozen=True)
class PaperCosts(Costs):
    """The likely seconds of steps on paper."""

    shape: ModelShape

    def step_s(self, num_requests: float, num_rows: Rows, context: float) -> Rows:
        if isinstance(num_rows, np.ndarray):
            return np.array([self.step_s(num_requests, float(n), context) for n in num_rows])
        return likely_s(Step(self.shape, int(num_requests), num_rows, context), DEVICE)


@dataclass(frozen=True)
class Prediction:
    """The figures of a cell before it is measured. Gains are tokens a second over plain decoding."""

    plain_ms: float
    """Milliseconds of a plain step."""
    ms: float
    """Milliseconds of a step under the automatic budget."""
    drafts: float
    """Drafts of a request in such a step."""
    tokens_per_s: float
    """Tokens a second of all requests."""
    over_plain: float
    over_plain_learning: float
    """The gain of a budget that learns the seconds of its steps."""
    best_fixed: int
    """The best of the fixed numbers of drafts."""
    best_fixed_over_plain: float


Predictions = dict[tuple[str, int, float], Prediction]
"""Predictions by geometry, number of requests and p."""


def predicted(geometry: str, p: float, requests: int) -> Prediction:
    """Returns the prediction for drafts that are right with probability p, by the name of a model in `NAMES`."""
    costs, p_B = PaperCosts(MODELS[geometry]), np.full(requests, p)
    plain = NoSpeculation(costs)
    auto = _drafting(costs, AUTO)
    plain_tokens_per_s = plain.tokens_per_s(p_B, CONTEXT)

    def gain(speculation: Speculation) -> float:
        return speculation.tokens_per_s(p_B, CONTEXT) / plain_tokens_per_s

    gains = {k: gain(_drafting(costs, BudgetConfig("fixed", k=k))) for k in FIXED}
    best = max(gains, key=lambda k: gains[k])
    step = auto.decode_step(p_B, CONTEXT)
    return Prediction(
        1e3 / plain_tokens_per_s,
        1e3 * auto.step_s(step, requests, CONTEXT),
        step.num_rows / requests - 1.0,
        requests * auto.tokens_per_s(p_B, CONTEXT),
        gain(auto),
        _learning_tokens_per_s(costs, p, requests) / plain_tokens_per_s,
        best,
        gains[best],
    )


def _drafting(costs: Costs, budget: BudgetConfig) -> CoupledSpeculation:
    return CoupledSpeculation(costs, budget, NUM_POSITIONS, has_weights=False)


def _learning_tokens_per_s(costs: Costs, p: float, requests: int) -> float:
    """Returns the tokens a second of a request under the production policy, with seconds that it learns."""
    model, policy = StepModel(MAX_ROWS), build_policy(AUTO, NUM_POSITIONS)
    for batch in np.repeat(BATCHES, PLAIN_STEPS).tolist():
        model.observe(batch, batch, float(costs.step_s(batch, batch, CONTEXT)))
    survival_K = p ** np.arange(1.0, NUM_POSITIONS + 1)
    spread_FQ = np.zeros((NUM_POSITIONS + 2, NUM_BINS + 1), np.int32)
    spread_FQ[-1, :-1] = requests * spread(survival_K, NUM_BINS)
    spread_FQ[[0, -1], -1] = requests
    survival = np.sort(np.tile(survival_K, requests))[::-1]
    tokens, seconds, num_drafts = 0.0, 0.0, 0
    for number in range(LEARNING_STEPS + JUDGED_STEPS):
        policy.costs = model.costs()
        num_drafts = 0 if policy.ends_step(requests, 0) else policy.num_drafts(requests, requests * NUM_POSITIONS)
        policy.plan(requests, 0)
        policy.observe(spread_FQ)
        step_s = float(costs.step_s(requests, requests + num_drafts, CONTEXT))
        model.observe(requests, requests + num_drafts, step_s)
        if number >= LEARNING_STEPS:
            seconds += step_s
            tokens += 1.0 + float(survival[:num_drafts].sum()) / requests
    return tokens / seconds


def all_predictions() -> Predictions:
    """Returns the predictions of all cells."""
    return {(name, n, p): predicted(name, p, n) for name in NAMES for n in BATCHES for p in RATES}


def as_json(predictions: Predictions) -> str:
    """Returns predictions with their assumptions, to four digits."""
    cells = [
        {"geometry": name, "requests": n, "p": p, **{k: float(f"{v:.4g}") for k, v in asdict(found).items()}}
        for (name, n, p), found in predictions.items()
    ]
    facts = {"device": DEVICE.name, "context": CONTEXT, "positions": NUM_POSITIONS, "assumptions": asdict(TYPICAL)}
    return json.dumps({**facts, "cells": cells}, indent=1) + "\n"


def tables(predictions: Predictions) -> list[Table]:
    """Returns a table of predictions for each geometry."""
    columns = ["requests", "p", "plain step, ms", "step, ms", "drafts", "tokens/s", "over plain", "over plain, learning",
               "best fixed", "its over plain"]  # fmt: skip
    return [Table(name, columns, [_row(*key[1:], found) for key, found in predictions.items() if key[0] == name])
            for name in NAMES]  # fmt: skip


def shortfalls(predictions: Predictions) -> str:
    """Returns a sentence about the cells in which the learning budget misses the best fixed number of drafts."""
    missed = [
        f"{name} with {n} at p {p:g}: {found.over_plain_learning:.2f} of {found.best_fixed_over_plain:.2f}"
        for (name, n, p), found in predictions.items()
        if found.over_plain_learning < NEAR * found.best_fixed_over_plain
    ]
    return (
        f"The learning budget is below {NEAR:g} of the best fixed number in {len(missed)} of {len(predictions)} cells:\n\n"
        + ("\n".join(f"- {cell}" for cell in missed))
    )


def _row(requests: int, p: float, found: Prediction) -> list[str]:
    return [
        str(requests), f"{p:g}", f"{found.plain_ms:.2f}", f"{found.ms:.2f}", f"{found.drafts:.1f}",
        f"{found.tokens_per_s:,.0f}", f"{found.over_plain:.2f}", f"{found.over_plain_learning:.2f}",
        str(found.best_fixed), f"{found.best_fixed_over_plain:.2f}",
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints all predictions, and writes them if asked."""
    parser = argparse.ArgumentParser(description="The simulator's prediction for one H100, before any run.")
    parser.add_argument(
        "--out", type=Path, help=f"a file for the predictions as JSON, such as docs/benchmarks/{STORED.name}"
    )
    args = parser.parse_args(arguments)
    predictions = all_predictions()
    if args.out is not None:
        write_atomically(args.out, as_json(predictions))
    print("\n\n".join([*map(as_text, tables(predictions)), shortfalls(predictions)]))


if __name__ == "__main__":
    main()
