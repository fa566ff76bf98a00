# SPDX-License-Identifier: Apache-2.0
"""Shows what drafts are worth at short and at long contexts, and whether the speculation policy then drafts as much as pays.

    python -m lab.simulation.context_price [--gpu H200|H100|B200] [--model Qwen3-8B] [--contexts 1024,32768]

The engine's own speculation policy and step model decide. The seconds of engine steps follow from the model's shape and the
GPU's data sheet (`RooflineCosts`). Attention takes the time to read the KV cache at the GPU's bandwidth, or the time of its
matrix products if that is longer. Some attention kernels read the cache of a request once for all of its rows, and others once
for each row, so there is a table for each. A draft is right with probability p, and numbers of tokens are expected values.

Contexts take turns, as in an engine whose rollouts begin with short texts and end with long ones. The first turn of each
context is not measured. The table has the speculation policy's tokens per second, divided by those of the best fixed number of
drafts at the same context. "blind" is a speculation policy whose step model is told nothing of contexts, so that it ignores
their price. "growing" are texts that grow from the shortest context to the longest, again and again, so that no single number
of drafts is the best all the time.

Shapes: K draft positions.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.simulation.costs import Calibration, RooflineCosts
from lab.simulation.data_sheets import device_named, model_named
from lab.simulation.graph_edge import COSTS_EVERY, NOISE, POSITIONS, Drafts, Played, auto
from nemo_specrollout.speculation.policy import AutoPolicy
from nemo_specrollout.speculation.step_model import StepModel

STEPS_OF_A_TURN = 150
TURNS = 4
"""Number of measured turns of each context."""
GROWTHS = 4
"""Number of times that texts grow. The first is not measured."""
BATCHES = (4, 16)
RATES = (0.6, 0.8, 0.95)


@dataclass
class Learner:
    """A speculation policy and a step model that learn from engine steps on a simulated machine."""

    machine: RooflineCosts
    drafts: Drafts
    knows_contexts: bool
    policy: AutoPolicy
    model: StepModel
    rng: np.random.Generator
    num_steps: int = 0

    @classmethod
    def of(cls, machine: RooflineCosts, drafts: Drafts, knows_contexts: bool) -> "Learner":
        """Returns a learner that has not seen any engine step on the machine."""
        model = StepModel(drafts.num_requests + drafts.most)
        return cls(machine, drafts, knows_contexts, auto(), model, np.random.default_rng(0))

    def step(self, context: float, played: Played) -> None:
        """Simulates an engine step whose requests have `context` tokens each, and adds its tokens and seconds to `played`."""
        policy = self.policy
        num_requests = self.drafts.num_requests
        told = context if self.knows_contexts else 0.0
        if policy.costs is not None:
            policy.costs = policy.costs.at(told)
        num_drafts = policy.num_drafts(num_requests, self.drafts.most)
        policy.plan(num_requests, 0)
        policy.observe(self.drafts.spread)
        rows = num_requests + num_drafts
        seconds = float(self.machine.step_s(num_requests, float(rows), context))
        measured_s = seconds * float(np.exp(NOISE * self.rng.standard_normal()))
        self.model.observe(num_requests, rows, measured_s, context=told)
        if policy.costs is None or self.num_steps % COSTS_EVERY == 0:
            policy.costs = self.model.costs()
        self.num_steps += 1
        played.tokens += self.drafts.tokens(num_drafts)
        played.seconds += seconds


def best_fixed(machine: RooflineCosts, drafts: Drafts, contexts: Sequence[float]) -> tuple[int, float]:
    """Returns the number of drafts per request with the most tokens per second over engine steps of these contexts.

    The second value is that number of tokens per second.
    """
    num_requests = drafts.num_requests
    rows_K = num_requests * (1.0 + np.arange(POSITIONS + 1))
    seconds_K = np.zeros(len(rows_K))
    for context in contexts:
        seconds_K += machine.step_s(num_requests, rows_K, context)
    rates = [len(contexts) * drafts.tokens(k * num_requests) / seconds_K[k] for k in range(POSITIONS + 1)]
    best = int(np.argmax(rates))
    return best, float(rates[best])


def in_turns(learner: Learner, contexts: Sequence[int]) -> list[float]:
    """Returns the tokens per second at each context, when the contexts take turns."""
    played = [Played() for _ in contexts]
    for turn in range(1 + TURNS):
        for i, context in enumerate(contexts):
            for _ in range(STEPS_OF_A_TURN):
                learner.step(context, played[i] if turn else Played())
    return [one.rate for one in played]


def growing(learner: Learner, contexts: np.ndarray) -> float:
    """Returns the tokens per second of texts that grow through `contexts` again and again."""
    played = Played()
    for number in range(GROWTHS):
        for context in contexts.tolist():
            learner.step(context, played if number else Played())
    return played.rate


def rows_of(machine: RooflineCosts, drafts: Drafts, contexts: Sequence[int]) -> list[tuple[str, int, float, float]]:
    """Returns a row of the table for each context, and one for growing texts.

    A row has a name, the best fixed number of drafts, and the speeds of two speculation policies divided by the speed with
    that number. The first speculation policy knows contexts, and the second does not.
    """
    growth = np.linspace(contexts[0], contexts[-1], STEPS_OF_A_TURN * len(contexts))
    bests = [
        *(best_fixed(machine, drafts, [context]) for context in contexts),
        best_fixed(machine, drafts, growth.tolist()),
    ]
    rates = []
    for knows in (True, False):
        of_turns = in_turns(Learner.of(machine, drafts, knows), contexts)
        rates.append([*of_turns, growing(Learner.of(machine, drafts, knows), growth)])
    names = [*(f"{context}" for context in contexts), "growing"]
    return [
        (name, k, priced / best, blind / best)
        for name, (k, best), priced, blind in zip(names, bests, *rates, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table for each way to read the KV cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--contexts", default="1024,32768", help="tokens, ascending, separated by commas")
    options = parser.parse_args(arguments)
    contexts = [int(context) for context in options.contexts.split(",")]
    shape = model_named(options.model, "--model")
    device = device_named(options.gpu, "--gpu")
    for reads_for_each_row in (False, True):
        machine = RooflineCosts(shape, device, "bf16", "bf16", Calibration(), reads_for_each_row=reads_for_each_row)
        print(
            f"{options.model} on {options.gpu}, its KV cache read once for each {'row' if reads_for_each_row else 'request'}"
        )
        print("     B     p  context   best k  policy/best  blind/best")
        for num_requests in BATCHES:
            for rate in RATES:
                for name, k, priced, blind in rows_of(machine, Drafts(num_requests, rate), contexts):
                    print(f"{num_requests:6d}{rate:6g}{name:>9}{k:9d}{priced:13.3f}{blind:12.3f}")


if __name__ == "__main__":
    main()
