# SPDX-License-Identifier: Apache-2.0
"""Writes worked solutions of three `reasoning-gym` tasks by rule. The real model (SmolLM2) learns from them before RL.

A solution goes step by step in varied wording and is always right. A direct answer has no steps. It is right too, but a small
model cannot compute it in one go. A policy that has learned both kinds solves some problems in one way and some in the other,
and reinforcement learning finds out which way is rewarded.
"""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from lab.local.step_addition import Grammar, Writer

HABIT = 0.75
"""Probability that a solution words a step in the same way as the step before."""
REMARKS = {
    "": 30, " Good.": 1, " That looks right.": 1, " So far, so good.": 1, " So far we have {s}.": 3,
    " The running total is {s}.": 3,
}  # fmt: skip
CHAIN_SUM: Grammar = {
    "opening": {
        "": 2, "Let's work from left to right.\n": 5, "I will take the terms one at a time.\n": 3,
        "Let's evaluate {expression} step by step.\n": 4, "We go through the terms in order.\n": 3,
        "To solve this, I keep a running total.\n": 3,
    },
    "first": {"Start with {a}.\n": 6, "The first number is {a}.\n": 3, "We begin at {a}.\n": 2},
    "add": {
        "Add {t}: {a} + {t} = {s}.<remark>\n": 6, "Next, add {t}: {a} + {t} = {s}.<remark>\n": 3,
        "{a} + {t} = {s}<left>\n": 6, "Adding {t} to {a} gives {s}.<remark>\n": 3,
        "Now {a} + {t} = {s}, which leaves {s} {rest}.<remark>\n": 6,
        "Then we add {t} and get {a} + {t} = {s}.<check>\n": 3,
    },
    "subtract": {
        "Subtract {t}: {a} - {t} = {s}.<remark>\n": 6, "Next, subtract {t}: {a} - {t} = {s}.<remark>\n": 3,
        "{a} - {t} = {s}<left>\n": 6, "Subtracting {t} from {a} gives {s}.<remark>\n": 3,
        "Now {a} - {t} = {s}, which leaves {s} {rest}.<remark>\n": 6,
        "Then we subtract {t} and get {a} - {t} = {s}.<check>\n": 3,
    },
    "left": {"": 4, ", so we have {s} {rest}": 4, ", leaving {s} {rest}": 2},
    "check": {"": 4, " Let me check: {s} {inverse} {t} = {a}, yes.": 2, " Check: {s} {inverse} {t} = {a}.": 1},
    "remark": REMARKS,
    "closing": {
        "": 5, "That was the last term.\n": 2, "So the result is {s}.\n": 4, "No terms are left, so the answer is {s}.\n": 3,
    },
    "direct": {"": 4, "The result is {s}.\n": 2, "The answer is {s}.\n": 2},
}  # fmt: skip
LEG_COUNTING: Grammar = {
    "opening": {
        "": 2, "Let's count the legs of each animal.\n": 5, "I will go through the animals one by one.\n": 3,
        "To find the total, I multiply and add.\n": 3, "We need the number of legs of each kind of animal.\n": 3,
    },
    "step": {
        "A {animal} has {legs} legs, so {n} of them have {n} * {legs} = {t} legs.<sum>\n": 6,
        "{n} {animal}: {n} * {legs} = {t} legs.<sum>\n": 6,
        "Each {animal} has {legs} legs. That makes {n} * {legs} = {t}.<sum>\n": 4,
        "- {animal}: {legs} legs each, {n} * {legs} = {t}.<sum>\n": 4,
    },
    "sum": {
        " Total: {a} + {t} = {s}.<remark>": 6, " So we have {a} + {t} = {s}.<remark>": 4,
        " Adding this, {a} + {t} = {s}.": 3, " The total grows from {a} to {s}.": 2,
    },
    "remark": REMARKS,
    "closing": {"": 4, "In total there are {s} legs.\n": 4, "So the total number of legs is {s}.\n": 3},
    "direct": {"": 4, "There are {s} legs in total.\n": 2, "The total is {s}.\n": 2},
}  # fmt: skip
NUMBER_SORTING: Grammar = {
    "opening": {
        "": 2, "Let's sort the numbers step by step.\n": 4, "I take the {extreme} number that is left, again and again.\n": 4,
        "We start from the list {list}.\n": 3,
    },
    "step": {
        "The {extreme} of {list} is {x}.\n": 6, "Among {list}, the {extreme} is {x}.\n": 4,
        "Left: {list}. The {extreme} is {x}, so the sorted list is now {done}.\n": 6,
        "From {list} we take {x}. Sorted so far: {done}.\n": 5,
    },
    "closing": {"": 4, "Now all numbers are sorted.\n": 3, "The sorted list is {done}.\n": 3},
}  # fmt: skip
DIRECT_RATE = {"chain_sum": 0.25, "leg_counting": 0.25, "number_sorting": 0.0}
"""Probability that a solution is a direct answer, by task."""


def worked_solution(entry: Mapping[str, Any], rng: random.Random) -> str:
    """Returns a right response to an entry of a `reasoning-gym` dataset. It ends with `<answer>...</answer>`.

    Raises KeyError for a task other than `chain_sum`, `leg_counting` and `number_sorting`.
    """
    task = entry["metadata"]["source_dataset"]
    grammar, solve = _TASKS[task]
    writer = Writer(grammar, rng, HABIT)
    is_direct = rng.random() < DIRECT_RATE[task]
    text = writer.write("direct", s=entry["answer"]) if is_direct else solve(writer, entry)
    return f"{text}<answer>{entry['answer']}</answer>"


def _chain_sum(writer: Writer, entry: Mapping[str, Any]) -> str:
    expression = entry["metadata"]["expression"]
    first, *terms = re.findall(r"([+-]?)\s*(\d+)", expression)
    total = int(first[1])
    parts = [writer.write("opening", expression=expression), writer.write("first", a=total)]
    for i, (sign, digits) in enumerate(terms):
        term = int(digits)
        after = total - term if sign == "-" else total + term
        rest = " ".join(f"{s} {d}" for s, d in terms[i + 1 :])
        inverse = "+" if sign == "-" else "-"
        symbol = "subtract" if sign == "-" else "add"
        parts.append(writer.write(symbol, a=total, t=term, s=after, rest=rest, inverse=inverse))
        total = after
    return "".join(parts) + writer.write("closing", s=total)


def _leg_counting(writer: Writer, entry: Mapping[str, Any]) -> str:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total = 0
    parts = [writer.write("opening")]
    for animal, number in entry["metadata"]["animals"].items():
        legs = ANIMALS[animal]
        after = total + number * legs
        parts.append(writer.write("step", animal=animal, legs=legs, n=number, t=number * legs, a=total, s=after))
        total = after
    return "".join(parts) + writer.write("closing", s=total)


def _number_sorting(writer: Writer, entry: Mapping[str, Any]) -> str:
    facts = entry["metadata"]
    left = list(facts["original_numbers"])
    done = []
    extreme = "smallest" if facts["direction"] == "ascending" else "largest"
    parts = [writer.write("opening", extreme=extreme, list=", ".join(left))]
    for number in facts["sorted_numbers"]:
        done.append(number)
        parts.append(writer.write("step", extreme=extreme, list=", ".join(left), x=number, done=", ".join(done)))
        left.remove(number)
    return "".join(parts) + writer.write("closing", done=", ".join(done))


_TASKS: dict[str, tuple[Grammar, Callable[[Writer, Mapping[str, Any]], str]]] = {
    "chain_sum": (CHAIN_SUM, _chain_sum),
    "leg_counting": (LEG_COUNTING, _leg_counting),
    "number_sorting": (NUMBER_SORTING, _number_sorting),
}
