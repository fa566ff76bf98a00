# SPDX-License-Identifier: Apache-2.0
"""How often one draft is accepted, by the rule of acceptance and by the way of drafting: closed forms, no model.

Prints the table of docs/upstream/vllm-exact-verification.md. Each figure is the mean over random pairs of a policy's
distribution p and a drafter's q that have one total variation distance (TV).

Shapes: V vocabulary.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np
from scipy.special import softmax

VOCABULARY, NUM_PAIRS = 400, 40
LOGIT_SCALE = 8.0
"""Standard deviation of the policy's logits. Its likeliest token then has a probability of 0.73 in the mean of the pairs."""
DISTANCES = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Rates:
    """Probabilities that one draft is accepted."""

    independent: float
    """By equality, if drafter and policy draw independent noise."""
    shared: float
    """By equality, if both add the same Gumbel noise."""
    greedy: float
    """The drafter proposes its likeliest token. By equality and by the test `u < p(draft)` alike."""
    rejection: float
    """A draft that is sampled from q, by the test `u < p(draft) / q(draft)`."""


def rates(p_V: np.ndarray, q_V: np.ndarray) -> Rates:
    """Returns the rates of one pair of distributions."""
    ratio_VV = np.maximum(p_V[None] / p_V[:, None], q_V[None] / q_V[:, None])
    return Rates(
        independent=float(p_V @ q_V),
        shared=float((1.0 / ratio_VV.sum(axis=1)).sum()),
        greedy=float(p_V[q_V.argmax()]),
        rejection=1.0 - distance(p_V, q_V),
    )


def distance(p_V: np.ndarray, q_V: np.ndarray) -> float:
    """Returns the total variation distance."""
    return float(abs(p_V - q_V).sum() / 2)


def erring(logits_V: np.ndarray, error_V: np.ndarray, amount: float) -> np.ndarray:
    """Returns the distribution of a drafter whose logits are the policy's with random errors."""
    return softmax((logits_V + amount * error_V) / np.sqrt(1.0 + (amount / LOGIT_SCALE) ** 2))


def less_sure(logits_V: np.ndarray, error_V: np.ndarray, amount: float) -> np.ndarray:
    """Returns the distribution of a drafter that ranks tokens as the policy does and is less sure."""
    return softmax(logits_V / (1.0 + amount))


DRAFTERS: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "errs in every logit": erring,
    "ranks as the policy, but is less sure": less_sure,
}


def pairs(kind: str, wanted: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns random pairs (p, q) of the distance `wanted`. A policy that no such drafter is that far from is left out."""
    rng = np.random.default_rng(0)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    while len(found) < NUM_PAIRS:
        logits_V = rng.normal(size=VOCABULARY) * LOGIT_SCALE
        error_V = rng.normal(size=VOCABULARY)
        p_V = softmax(logits_V)
        low, high = 0.0, 40.0
        if distance(p_V, DRAFTERS[kind](logits_V, error_V, high)) < wanted:
            continue
        for _ in range(40):
            middle = (low + high) / 2
            is_below = distance(p_V, DRAFTERS[kind](logits_V, error_V, middle)) < wanted
            low, high = (middle, high) if is_below else (low, middle)
        found.append((p_V, DRAFTERS[kind](logits_V, error_V, high)))
    return found


def table() -> list[str]:
    """Returns the lines of the table, in Markdown."""
    lines = [
        "| drafter | TV | equality, independent noise | equality, shared noise | its lower bound | greedy draft, either rule "
        "| rejection test, sampled draft |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in DRAFTERS:
        for wanted in DISTANCES:
            all_rates = [rates(p_V, q_V) for p_V, q_V in pairs(kind, wanted)]
            means = np.mean([astuple(r) for r in all_rates], axis=0).tolist()
            means.insert(2, (1 - wanted) / (1 + wanted))
            lines.append(f"| {kind} | {wanted:.2f} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
