# SPDX-License-Identifier: Apache-2.0
"""Shows what drafts are worth beyond the largest CUDA graph, and whether the speculation policy uses them when they pay.

    python -m lab.simulation.graph_edge [--gpu h200|h100]

The engine's own speculation policy and step model decide. The seconds of engine steps within vLLM's graphs and without a graph
were measured by `lab.gpu` with Qwen3-8B's shape, and are read from the JSON files in docs/benchmarks. No GPU has run larger
graphs yet, so their seconds are extrapolated from those within vLLM's graphs. Each draft is right with probability p, and the
numbers of tokens are expected values.

Shapes: K draft positions, Q bins of survival, N numbers of drafts.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nemo_specrollout.generation.engine.cuda_graphs import larger_graphs, vllms_graphs
from nemo_specrollout.speculation.policy import AutoPolicy
from nemo_specrollout.speculation.spread import Spread
from nemo_specrollout.speculation.step_model import StepModel

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
RUNS = {
    "h200": (("gpu-h200.json", "speed_compiled"), ("gpu-h200-one-price.json", "speed_compiled")),
    "h100": (("gpu-h100.json", "speed"),),
}
"""By GPU, the files in docs/benchmarks with measurements of Qwen3-8B's shape. With each file comes the item that made them."""
VLLMS_LARGEST = 512
KNEE = 200.0
"""Number of rows beyond which the measured GPUs take longer to compute a step than to read the weights."""
POSITIONS = 32
"""Most drafts of a request, which is the default of `run_ahead.most_drafts` (K)."""
NUM_BINS = 128
VOCAB_SIZE = 151_936
COSTS_EVERY = 16
"""Number of engine steps between two updates of the speculation policy's costs, as in the engine."""
NOISE = 0.05
"""Standard deviation of the random noise on the logarithm of an engine step's seconds."""
NUM_STEPS = 1500
BATCHES = (8, 16, 32, 64, 128)
RATES = (0.8, 0.95, 0.98, 1.0)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of engine steps, by a fit that is linear in rows, in rows beyond `KNEE`, and in requests."""

    fixed_s: float
    row_s: float
    knee_row_s: float
    request_s: float
    launched_s: float
    """Seconds that the host needs to launch an engine step without a graph. The step takes longer only if the GPU does."""
    graph_sizes: tuple[int, ...] = tuple(vllms_graphs(VLLMS_LARGEST))

    @classmethod
    def of(cls, gpu: str) -> "StepTimes":
        """Returns a least-squares fit to a GPU's steps within graphs, and the median of its steps without a graph."""
        steps = measured_steps(gpu)
        requests, rows, ms = steps[steps[:, 1] <= VLLMS_LARGEST].T
        terms = np.stack([np.ones(len(rows)), rows, np.maximum(rows - KNEE, 0.0), requests], axis=1)
        fitted = 1e-3 * np.linalg.lstsq(terms, ms, rcond=None)[0]
        fixed_s, row_s, knee_row_s, request_s = map(float, fitted)
        return cls(
            fixed_s, row_s, knee_row_s, request_s, 1e-3 * float(np.median(steps[steps[:, 1] > VLLMS_LARGEST, 2]))
        )

    def with_larger_graphs(self, num_requests: int) -> "StepTimes":
        """Returns these step times for an engine that also has graphs of more rows.

        An engine captures these larger graphs if `num_requests` requests may have K drafts each.
        """
        added = larger_graphs({}, num_requests * (1 + POSITIONS), VLLMS_LARGEST, VOCAB_SIZE)
        return replace(self, graph_sizes=(*self.graph_sizes, *added))

    def step_s(self, num_requests: int, num_rows: int) -> float:
        """Returns the seconds of an engine step."""
        size = next((size for size in self.graph_sizes if size >= num_rows), None)
        rows = num_rows if size is None else size
        gpu_s = self.fixed_s + rows * self.row_s + max(rows - KNEE, 0) * self.knee_row_s + num_requests * self.request_s
        return gpu_s if size else max(gpu_s, self.launched_s)


def measured_steps(gpu: str) -> np.ndarray:
    """Returns requests, rows and milliseconds of the measured steps with a fixed number of drafts, [steps, 3]."""
    found = []
    for file, item in RUNS[gpu]:
        report = json.loads((BENCHMARKS / file).read_text(encoding="utf-8"))
        for title in ("plain decoding", "budgets"):
            for name, figures in report["items"][item]["tables"][title].items():
                if not name.endswith("auto"):  # its steps have many sizes
                    num_requests = float(name.partition(" ")[0])
                    found.append((num_requests, figures.get("rows", num_requests), figures["ms a step"]))
    return np.array(found)


class Drafts:
    """The drafts of a batch in which every request has K draft tokens, each right with the same probability."""

    def __init__(self, num_requests: int, rate: float) -> None:
        self.num_requests = num_requests
        survival_K = rate ** np.arange(1, POSITIONS + 1)
        self._tokens_N = np.concatenate([[0.0], np.repeat(survival_K, num_requests).cumsum()])
        bins_K = np.minimum((survival_K * NUM_BINS).astype(int), NUM_BINS - 1)
        submitted_Q = np.bincount(bins_K, minlength=NUM_BINS) * num_requests
        known_FQ = np.zeros((POSITIONS + 1, NUM_BINS))
        known_FQ[0] = submitted_Q
        self.spread = Spread(known_FQ, np.eye(1, POSITIONS + 1)[0] * num_requests, submitted_Q, num_requests)

    @property
    def most(self) -> int:
        """Number of all drafts of the batch."""
        return self.num_requests * POSITIONS

    def tokens(self, num_drafts: int) -> float:
        """Returns the expected number of tokens of an engine step that verifies the `num_drafts` likeliest drafts."""
        return float(self.num_requests + self._tokens_N[num_drafts])


@dataclass
class Played:
    """Tokens and seconds, summed over simulated engine steps."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps_without_graph: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def play(drafts: Drafts, machine: StepTimes, policy: AutoPolicy, num_steps: int = NUM_STEPS) -> Played:
    """Simulates engine steps with `policy` and a new step model, which know nothing of the machine at first.

    Returns the sums over all steps.
    """
    model = StepModel(drafts.num_requests + drafts.most, machine.graph_sizes)
    rng = np.random.default_rng(0)
    played = Played()
    num_requests = drafts.num_requests
    for step in range(num_steps):
        num_drafts = policy.num_drafts(num_requests, drafts.most)
        policy.plan(num_requests, 0)
        policy.observe(drafts.spread)
        rows = num_requests + num_drafts
        seconds = machine.step_s(num_requests, rows) * float(np.exp(NOISE * rng.standard_normal()))
        model.observe(num_requests, rows, seconds)
        if policy.costs is None or step % COSTS_EVERY == 0:
            policy.costs = model.costs()
        played.tokens += drafts.tokens(num_drafts)
        played.seconds += seconds
        played.steps_without_graph += rows > machine.graph_sizes[-1]
    return played


def best_fixed(drafts: Drafts, machine: StepTimes) -> tuple[int, float]:
    """Returns the number of drafts per request with the most tokens per second, and that number of tokens per second."""
    rates = [
        drafts.tokens(k * drafts.num_requests) / machine.step_s(drafts.num_requests, (1 + k) * drafts.num_requests)
        for k in range(POSITIONS + 1)
    ]
    best = int(np.argmax(rates))
    return best, rates[best]


def auto() -> AutoPolicy:
    """Returns the engine's speculation policy with the default margin, for drafters without weights."""
    return AutoPolicy(0.03, POSITIONS, POSITIONS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of simulated speeds, with a row for each number of requests and each probability of a right draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=RUNS, default="h200")
    gpu = parser.parse_args(arguments).gpu
    machine = StepTimes.of(gpu)
    print(f"{gpu}: a step without a graph takes {1e3 * machine.launched_s:.0f} ms")
    print("          |---------- graphs up to 512 rows ----------|  |-------------- larger graphs --------------|")
    print("     B    p  best k  tokens/s  auto/best  no graph, %    best k  tokens/s  auto/best  no graph, %   gain")
    for num_requests in BATCHES:
        for rate in RATES:
            print(f"{num_requests:6d} {rate:4g}" + _row(machine, Drafts(num_requests, rate)))


def _row(machine: StepTimes, drafts: Drafts) -> str:
    text = ""
    speeds = []
    for one in (machine, machine.with_larger_graphs(drafts.num_requests)):
        k, best = best_fixed(drafts, one)
        played = play(drafts, one, auto())
        speeds.append(played.rate)
        share = 100.0 * played.steps_without_graph / NUM_STEPS
        text += f"{k:8d}{best:10.0f}{played.rate / best:11.3f}{share:13.1f}" + "  " * (one is machine)
    return f"{text}{speeds[1] / speeds[0]:7.2f}"


if __name__ == "__main__":
    main()
