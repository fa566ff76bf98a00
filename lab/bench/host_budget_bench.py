# SPDX-License-Identifier: Apache-2.0
"""Measures the host's milliseconds per engine step for the choice of drafts, if the device or if the host makes this choice.

    OMP_NUM_THREADS=1 python -m lab.bench.host_budget_bench [--batches 64,256,1024] [--drafts 8,32] [--rounds 15]

Both ways get the same drafts and the same speculation policy, and take turns. "device" is our budget in vLLM's adaptive
verification. Its figure is a little too small, because it leaves out the ranking of the drafts, which a GPU would compute.
"host" is `HostBudget` with acceptance rates that are one engine step old. Both include the time in which the speculation
policy chooses the number of drafts. This time is also shown alone.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from lab.bench.bench_tables import new_table
from nemo_specrollout.config.block import BudgetConfig
from nemo_specrollout.drafters.base import LEVEL_PRIORS, NUM_BINS
from nemo_specrollout.drafters.board import BoardShape, DraftBoard
from nemo_specrollout.generation.engine.arguments import set_process_environment
from nemo_specrollout.speculation.policy import AutoPolicy, SpeculationPolicy, build_policy
from nemo_specrollout.speculation.spread import Spread
from nemo_specrollout.speculation.step_model import StepModel

STEPS = 20
"""Number of engine steps of each way in a round."""
SHARE_OF_TEXTS = 0.1
"""Share of requests whose drafts come from a text that is nearly certain. The other requests have less certain drafts or
none."""


class World:
    """The drafts of a batch of requests, and the parts of an engine that both ways need for an engine step."""

    def __init__(self, num_requests: int, num_positions: int) -> None:
        from nemo_specrollout.generation.drafting.draft_router import DraftRouter

        rng = np.random.default_rng(0)
        self._rng = rng
        self.names = [f"{i}-{i * 7919:08x}" for i in range(num_requests)]
        self.num_positions = num_positions
        board = DraftBoard(["suffix"], LEVEL_PRIORS[None], BoardShape(num_requests, num_positions), torch.device("cpu"))
        self.rates_SK = board.tables.rates_SK
        self.policy = _policy(num_requests, num_positions)
        self.router = DraftRouter.__new__(DraftRouter)
        self.router.board = board
        self.router.policy = self.policy
        self.router.host_s = 0.0
        has_text_S = rng.random(num_requests) < SHARE_OF_TEXTS
        sides = (num_requests, num_positions)
        self._mean_SK = np.where(has_text_S[:, None], 0.98, rng.uniform(0.2, 0.9, sides))
        self._found_S = np.where(has_text_S, num_positions, rng.integers(0, 5, num_requests))
        slots = dict(zip(self.names, rng.permutation(num_requests).tolist(), strict=True))
        states = SimpleNamespace(
            req_id_to_index=slots,
            max_num_reqs=num_requests,
            num_speculative_steps=num_positions,
            device=torch.device("cpu"),
            max_num_batched_tokens=num_requests * (1 + num_positions),
        )
        self.runner: Any = SimpleNamespace(
            req_states=states,
            input_buffers=SimpleNamespace(query_start_loc=torch.zeros(num_requests + 1, dtype=torch.int32)),
            model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
            vocab_size=64,
            model_config=None,
            vllm_config=SimpleNamespace(aux_output_config=None),
        )
        self.scheduled = _scheduled(self.names, num_positions)

    def draw_rates(self) -> None:
        """Draws new acceptance rates of the drafts. They are nearly as high as before, or 0 where a request has no draft."""
        rates_SK = np.clip(self._mean_SK + self._rng.normal(0.0, 0.05, self._mean_SK.shape), 0.01, 0.98)
        found_S = np.maximum(self._found_S + self._rng.integers(-1, 2, len(self._found_S)), 0)
        rates_SK[np.arange(self.num_positions) >= found_S[:, None]] = 0.0
        self.rates_SK.copy_(torch.from_numpy(rates_SK))


def _policy(num_requests: int, num_positions: int) -> SpeculationPolicy:
    """Returns an automatic speculation policy that knows step times like a GPU's, and the survival of `World`'s drafts."""
    policy = build_policy(BudgetConfig("auto"), num_positions)
    assert isinstance(policy, AutoPolicy)
    most_rows = num_requests * (1 + num_positions)
    graphs = [rows for rows in (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)) if rows <= most_rows]
    model = StepModel(most_rows, graphs)
    for rows in sorted({*graphs, most_rows}):
        model.observe(min(rows, num_requests), rows, 0.005 + 1e-5 * rows)
    policy.costs = model.costs()
    spread_FQ = np.zeros((num_positions + 2, NUM_BINS + 1), np.int32)
    spread_FQ[:, :NUM_BINS:4] = num_requests // 8
    spread_FQ[:, -1] = num_requests
    policy.observe(Spread.of_table(spread_FQ))
    return policy


def _scheduled(names: Sequence[str], num_positions: int) -> Any:
    """Returns the output of vLLM's scheduler for an engine step in which each request has `num_positions` drafts."""
    from vllm.v1.core.sched.output import SchedulerOutput

    scheduled = SchedulerOutput.make_empty()
    scheduled.num_scheduled_tokens = dict.fromkeys(names, 1 + num_positions)
    scheduled.total_num_scheduled_tokens = len(names) * (1 + num_positions)
    placeholders = [-1] * num_positions
    scheduled.scheduled_spec_decode_tokens = {name: placeholders for name in names}
    return scheduled


def device_step(world: World) -> Callable[[], None]:
    """Returns a function that does the host's work of an engine step in which the device chooses the drafts.

    It makes the calls that vLLM makes on its manager of adaptive verification.
    """
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllm_budget

    from nemo_specrollout.generation.step.verification_budget import VerificationBudget

    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = lambda *_, **__: None  # which a CPU lacks, and this part of a step does not use
    vllm_budget._assign_draft_token_budget_compiled = lambda *_: None  # the device's part
    budget = VerificationBudget(world.runner, world.router)
    scheduled = world.scheduled
    num_requests = len(world.names)
    slots_B = torch.arange(num_requests)
    caps_B = np.full(num_requests, world.num_positions, np.int32)
    starts = np.arange(num_requests + 1, dtype=np.int32) * (1 + world.num_positions)

    def step() -> None:
        budget.get_num_tokens(scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens)
        budget.compact_batch(caps_B, caps_B + 1, starts)
        budget.reallocate_drafts(world.names, slots_B)

    return step


def host_step(world: World) -> Callable[[], None]:
    """Returns a function that does the host's work of an engine step in which the host chooses the drafts."""
    from nemo_specrollout.generation.engine.transfers import HostCopy
    from nemo_specrollout.generation.step.host_budget import HostBudget

    budget = HostBudget(world.runner, world.router)
    budget.read(HostCopy(world.rates_SK, is_late=True))

    def step() -> None:
        budget.trimmed(world.scheduled)
        budget.record()

    return step


def policy_step(world: World) -> Callable[[], None]:
    """Returns a function that lets the speculation policy choose the number of drafts, which is a part of both ways."""
    most = len(world.names) * world.num_positions
    return lambda: (world.router.num_drafts(len(world.names), most), None)[1]


def measure(num_requests: int, num_positions: int, num_rounds: int) -> dict[str, list[float]]:
    """Returns the median milliseconds of an engine step in each round, by way. The ways take turns after a warm-up round."""
    world = World(num_requests, num_positions)
    ways = {"device": device_step(world), "host": host_step(world), "policy alone": policy_step(world)}
    found: dict[str, list[float]] = {way: [] for way in ways}
    with torch.inference_mode():
        for round_ in range(1 + num_rounds):
            for way, step in ways.items():
                milliseconds = []
                for _ in range(STEPS):
                    world.draw_rates()
                    started = time.perf_counter()
                    step()
                    milliseconds.append(1e3 * (time.perf_counter() - started))
                if round_:
                    found[way].append(float(np.median(milliseconds)))
    return found


def main() -> None:
    """Runs the bench and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="64,256,1024", help="numbers of requests, separated by commas")
    parser.add_argument(
        "--drafts", default="8,32", help="drafts of each request that vLLM schedules, separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    set_process_environment()
    table = new_table("host milliseconds a step: median of rounds (lowest to highest round)")
    for name in ("requests", "drafts each", "device", "host", "host over device", "policy alone, in both"):
        table.add_column(name, justify="right")
    for num_positions in map(int, options.drafts.split(",")):
        for num_requests in map(int, options.batches.split(",")):
            found = measure(num_requests, num_positions, options.rounds)
            ratios = np.array(found["host"]) / np.array(found["device"])
            cells = [f"{np.median(ms):.3f} ({min(ms):.3f}-{max(ms):.3f})" for ms in found.values()]
            over = f"{np.median(ratios):.2f} ({ratios.min():.2f}-{ratios.max():.2f})"
            table.add_row(str(num_requests), str(num_positions), cells[0], cells[1], over, cells[2])
    Console(highlight=False, width=140).print(table)


if __name__ == "__main__":
    main()
