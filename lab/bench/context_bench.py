# SPDX-License-Identifier: Apache-2.0
"""Measures whether the automatic budget knows what it costs to verify a draft token at short and at long contexts.

    python -m lab.bench.context_bench --out DIR [--contexts 1024,4096,16384] [--drafts 0,1,2,4,8] [--rates 0.8] [--rounds 3]

The policy is the shipped one with more layers (`lab/policies/deep_policy.py`). An oracle drafts for it. It knows the responses
from a plain run, and makes each draft token right with a given probability (`lab/gpu/forced_acceptance.py`). An arm of the
bench is a way to choose the number of drafts, and the arms differ in nothing else. They share one engine and its cached
prompts, and take turns. Contexts take turns too, so the automatic budget meets another length of context in every turn, as an
engine does between two rollouts. It learns the seconds of engine steps from its own turns only.

On a machine that others use, `--cpu-time` counts the CPU time of this process. Set OMP_NUM_THREADS=1 with it.

For each context, an arm is compared with the fixed number of drafts that made the most tokens per second there. The ratio of
their speeds is taken within each round, and the table has the median over rounds. All arms must make the same tokens.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console

from lab.bench.bench_command import write_facts
from lab.bench.bench_tables import new_table
from lab.gpu.forced_acceptance import ForcedEngine, never_draft
from lab.gpu.gpu_stage import POLICY
from lab.policies.deep_policy import deepen_policy
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest
from nemo_specrollout.speculation.policy import SpeculationPolicy, build_policy
from nemo_specrollout.speculation.step_model import StepModel
from nemo_specrollout.telemetry import engine_stats

DEEPEN = 6
AUTO = "auto"
WORDS = (10, 90)
"""Range of the token ids of random prompts."""
ROOM = 256
"""Number of tokens by which a text may be longer than the longest context."""
KV_ROOM = 32_000
"""Bytes of KV cache reserved for each token of a context, which is somewhat more than the policy needs."""


@dataclass
class Arm:
    """A way to choose the number of drafts, with its measurements."""

    name: str
    policy: SpeculationPolicy
    model: StepModel
    """The step model that learns the seconds of this arm's engine steps."""
    speeds: dict[str, list[float]] = field(default_factory=dict)
    """Tokens per second in each round, by the name of the cell."""
    drafts: dict[str, list[float]] = field(default_factory=dict)
    """Draft tokens per request and engine step in each round, by the name of the cell."""


@dataclass(frozen=True)
class Cell:
    """A workload of the bench. Its requests have one length of context, and their drafts are right with one probability."""

    context: int
    rate: float
    requests: tuple[RolloutRequest, ...]

    @property
    def name(self) -> str:
        """Returns a name made of the context's length and the probability."""
        return f"{self.context} tokens, p {self.rate:g}"


def requests_of(context: int, num: int, length: int) -> tuple[RolloutRequest, ...]:
    """Returns `num` requests for samples of one random prompt, with responses of `length` tokens.

    The prompt is shorter than `context` by half a response, so the length of the context is `context` on average.
    """
    prompt = np.random.default_rng(context).integers(*WORDS, max(context - length // 2, 1)).tolist()
    return tuple(RolloutRequest(prompt, context, sample, exact_length=length) for sample in range(num))


@contextmanager
def deep_engine(longest: int, num: int, most_drafts: int, kv_bytes: int) -> Iterator[ForcedEngine]:
    """Yields an engine of the deepened policy for up to `num` requests at once, with texts of up to `longest` tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        deepen_policy(POLICY, folder, DEEPEN)
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "max_position_embeddings": longest}), encoding="utf-8")
        options = {
            "max_num_seqs": num, "length": longest, "kv_cache_memory_bytes": kv_bytes, "load_format": "auto",
            "enable_prefix_caching": True,
        }  # fmt: skip
        forced = ForcedEngine(folder, options, most_drafts)
        yield forced
        forced.engine.close()


def arms_of(drafts: Sequence[int], num: int) -> list[Arm]:
    """Returns an arm for each fixed number of drafts, and the arm of the automatic budget as the last one."""
    most = max(drafts)
    model = partial(StepModel, num * (1 + most))
    fixed = [
        Arm(str(k), build_policy(BudgetConfig("fixed", k=k), most) if k else never_draft(most), model()) for k in drafts
    ]
    return [*fixed, Arm(AUTO, build_policy(BudgetConfig(AUTO), most), model())]


def play(forced: ForcedEngine, arm: Arm, cell: Cell, keep: bool) -> list[tuple[int, ...]]:
    """Plays the requests of a cell with an arm, and returns the tokens of each response.

    If `keep` is false, no figures are kept.
    """
    forced.engine.run_in_worker(partial(_use, arm=arm))
    found = forced.measure(cell.requests)
    if keep:
        arm.speeds.setdefault(cell.name, []).append(found["tokens a second"])
        arm.drafts.setdefault(cell.name, []).append(found["drafts"])
    return [tuple(rollout.token_ids) for rollout in forced.rollouts]


def _use(worker: Any, arm: Arm) -> None:
    worker.specrollout_router.policy = arm.policy
    worker.specrollout_accounts.step_model = arm.model


def table_of(arms: Sequence[Arm], cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Returns a row for each cell, with the best fixed number of drafts and each arm's speed over the speed with this number.

    The ratios are medians over rounds.
    """
    found = []
    for cell in cells:
        name = cell.name
        best = max((arm for arm in arms if arm.name != AUTO), key=lambda arm: statistics.median(arm.speeds[name]))
        ratios = {
            arm.name: [ours / theirs for ours, theirs in zip(arm.speeds[name], best.speeds[name], strict=True)]
            for arm in arms
        }
        found.append(
            {
                "cell": name,
                "best fixed": best.name,
                "tokens a second": statistics.median(best.speeds[name]),
                "over best": {arm: statistics.median(values) for arm, values in ratios.items()},
                "auto by round": ratios[AUTO],
                "auto drafts": statistics.median(arms[-1].drafts[name]),
            }
        )
    return found


def measure(arms: Sequence[Arm], cells: Sequence[Cell], num_rounds: int, console: Console) -> int:
    """Plays all rounds. Returns the number of responses that differ from plain decoding.

    A round without measurements comes first. Only the arm with the automatic budget plays it, to learn step times.
    """
    contexts = {cell.context: cell.requests for cell in cells}
    num = len(cells[0].requests)
    kv_bytes = int(sum(contexts) * KV_ROOM) + (256 << 20)
    num_differ = 0
    with deep_engine(max(contexts) + ROOM, num, arms[-1].policy.most_drafts, kv_bytes) as forced:
        forced.use_budget(None)
        plain = {}
        for context, requests in contexts.items():
            plain[context] = forced.engine.generate(requests)
            console.print(f"{context} tokens: the prompt is read")
        for number in range(num_rounds + 1):
            for cell in cells:
                forced.oracle.know(cell.requests, plain[cell.context])
                forced.oracle.force(cell.rate)
                expected = [tuple(rollout.token_ids) for rollout in plain[cell.context]]
                for arm in (arms if number % 2 else arms[::-1]) if number else arms[-1:]:
                    tokens = play(forced, arm, cell, keep=number > 0)
                    num_differ += sum(map(tuple.__ne__, tokens, expected))
            console.print(f"round {number} of {num_rounds}")
    return num_differ


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the bench. Prints a table, and writes `context.json` into the folder `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", default="1024,4096,16384", help="tokens, separated by commas")
    parser.add_argument("--drafts", default="0,1,2,4,8", help="fixed numbers of drafts of a request")
    parser.add_argument("--rates", default="0.8", help="probabilities that a draft is right")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4, help="requests at a time")
    parser.add_argument("--length", type=int, default=40, help="tokens of a response")
    parser.add_argument("--cpu-time", action="store_true", help="count this process's seconds of a core")
    options = parser.parse_args(arguments)
    rates = [float(rate) for rate in options.rates.split(",")]
    sets = {int(n): requests_of(int(n), options.requests, options.length) for n in options.contexts.split(",")}
    cells = [Cell(context, rate, requests) for context, requests in sets.items() for rate in rates]
    arms = arms_of([int(n) for n in options.drafts.split(",")], options.requests)
    console = Console(highlight=False, width=100)
    clock = SimpleNamespace(perf_counter=time.process_time if options.cpu_time else time.perf_counter)
    with mock.patch.object(engine_stats, "time", clock):
        num_differ = measure(arms, cells, options.rounds, console)
    rows = table_of(arms, cells)
    write_facts(options.out / "context.json", {"responses that differ": num_differ, "cells": rows})
    table = new_table("tokens a second over those of the best fixed number of drafts")
    for title in ("", *(arm.name for arm in arms), "best", "drafts of auto"):
        table.add_column(title, justify="right" if title else "left")
    for row in rows:
        speeds = [f"{row['over best'][arm.name]:.3f}" for arm in arms]
        table.add_row(row["cell"], *speeds, row["best fixed"], f"{row['auto drafts']:.1f}")
    console.print(table)
    console.print(f"{num_differ} responses differ from plain decoding")


if __name__ == "__main__":
    main()
