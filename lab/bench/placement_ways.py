# SPDX-License-Identifier: Apache-2.0
"""What the benches of placements share, which are ways of drafting, timed rollouts, and child processes."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from nemo_specrollout.config.block import BudgetConfig, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DrafterConfig, DraftModelDrafterConfig, RemoteDrafterConfig

if TYPE_CHECKING:
    from lab.local.engine import RolloutEngine
    from nemo_specrollout.generation.engine.requests import RolloutRequest

MAX_DRAFTS = 12
COUPLED_KS = (2, 4, 8, 12)


@dataclass(frozen=True)
class Way:
    """A way of drafting that is measured."""

    mode: str
    """`plain`, `coupled` or `decoupled`."""
    k: int = 0
    """Draft tokens per request and engine step, or 0 for as many as pay."""

    def __str__(self) -> str:
        return self.mode if self.mode == "plain" else f"{self.mode} {f'k={self.k}' if self.k else 'auto'}"

    def block(self, draft: str) -> SpecrolloutConfig:
        """Returns the block that makes an engine draft in this way."""
        if self.mode == "plain":
            return SpecrolloutConfig(drafters=())
        drafter: DrafterConfig = DraftModelDrafterConfig(model=draft)
        if self.mode == "decoupled":
            drafter = RemoteDrafterConfig(model=draft, workers=1)
        budget = BudgetConfig("fixed", k=self.k) if self.k else BudgetConfig("auto")
        return SpecrolloutConfig(drafters=(drafter,), num_speculative_tokens=self.k or MAX_DRAFTS, budget=budget)


@dataclass(frozen=True)
class Timed:
    """The seconds, engine steps and tokens of a rollout, and the engine's draft statistics before and after it."""

    seconds: float
    num_steps: int
    token_ids: list[list[int]]
    before: dict[str, Any]
    after: dict[str, Any]


def roll_out_in(engine: "RolloutEngine", requests: "Sequence[RolloutRequest]") -> Timed:
    """Times a rollout of requests in an engine of this process."""
    before = _counts(engine)
    steps = engine.num_steps
    started = time.perf_counter()
    rollouts = engine.generate(requests)
    seconds = time.perf_counter() - started
    return Timed(seconds, engine.num_steps - steps, [r.token_ids for r in rollouts], before, _counts(engine))


def decode_in(engine: "RolloutEngine", requests: "Sequence[RolloutRequest]") -> Timed:
    """Rolls out requests, and times only the engine steps after the one in which the last request gets its first token.

    Reading the prompts is not timed, because engines find some of them in their prefix caches, depending on what they rolled
    out before.
    """
    ids = engine.submit(requests, {})
    done: dict[str, Any] = {}
    while not all(i in done or engine.progress(i)[0] for i in ids):
        done.update(engine.step())
    before = _counts(engine)
    steps = engine.num_steps
    started = time.perf_counter()
    while len(done) < len(ids):
        done.update(engine.step())
    seconds = time.perf_counter() - started
    return Timed(seconds, engine.num_steps - steps, [done[i].token_ids for i in ids], before, _counts(engine))


def _counts(engine: "RolloutEngine") -> dict[str, Any]:
    stats = engine.stats(engine.num_steps)
    if stats is None:
        return {"proposed": 0, "accepted": 0, "supply": None}
    return {"proposed": stats.num_proposed, "accepted": stats.num_accepted, "supply": stats.drafter_stats}


def child_with(threads: int) -> ProcessPoolExecutor:
    """Returns an executor with one new process, in which torch has this number of threads.

    A process of its own is needed, because torch reads the number only once, when it is loaded.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    child = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    child.submit(os.getpid).result()
    return child


def acceptance_of(rows: list[dict[str, Any]]) -> float:
    """Returns the probability that a draft token is right if the ones before it are, assumed to be equal at all positions.

    It is computed from the row of the `Way` that drafts the fewest tokens in the policy's engine.
    """
    row = next(r for r in rows if r["mode"] == "coupled")
    k = COUPLED_KS[0]
    mean = row["accepted"] / row["proposed"] * k
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, k + 1)) < mean else (low, middle)
    return low
