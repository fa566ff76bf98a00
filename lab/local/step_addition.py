# SPDX-License-Identifier: Apache-2.0
"""The demo's task, which is to add 2 to 16 numbers step by step. Problems come from a seed, and a rule gives the reward.

A small random grammar writes worked responses from left to right. The task does not favour drafters, because its responses
repeat themselves no more than an LLM's text does. N-gram drafting even gains less here than papers report
(docs/get-started/local.md). This module does not import torch, and imports transformers only in `build_tokenizer`.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MIN_TERMS, MAX_TERMS = 2, 16
"""Fewest and most terms of a sum."""
MAX_TERM = 30
"""Largest term of a sum."""
MEDIAN_TERMS = 5.0
"""Median of the number of terms, which has a log-normal distribution."""
TERMS_SPREAD = 0.6
"""Standard deviation of the logarithm of the number of terms."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
"""Amount by which the quantile of a problem's difficulty grows from one problem to the next, modulo 1."""
VOCAB_MULTIPLE = 32
"""The vocabulary's size is a multiple of this. Unused tokens fill it up."""
BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"

# `{a}` is the sum so far, `{t}` the term, `{s}` the new sum, `{rest}` the terms that are left.
# Two numbers are never neighbours, because a tokenizer with one token for each digit could not tell them apart. The odds are
# uneven on purpose, because most tokens of an LLM are nearly certain and a few are forks.
GRAMMAR: dict[str, dict[str, float]] = {
    "opening": {
        "": 4, "we want {a} + {rest} . ": 4, "let us go from left to right . ": 2, "we start with {a} . ": 2,
        "begin at {a} . ": 1,
    },
    "quick opening": {"": 2, "ok , ": 2, "so ": 1, "ok , begin at {a} . ": 1},
    "step": {
        "<lead>add {t} : {a} + {t} <equals> {s} .<left><remark>": 8,
        "<lead>{a} <plus> {t} <equals> {s} .<left><remark>": 6,
        "<lead>{a} + {t} + {rest} = {s} + {rest} .<remark>": 8,
        "<lead>adding {t} to {a} <equals> {s} .<left><remark>": 3,
        "<lead>with {t} more {a} <grows> {s} .<left><remark>": 2,
        "<lead>the sum of {a} and {t} <equals> {s} .<left><remark>": 2,
    },
    "lead": {"": 12, "now ": 4, "then ": 3, "so ": 2, "after that , ": 1, "ok , ": 1},
    "plus": {"+": 6, "plus": 2, "and": 1},
    "equals": {"=": 9, "is": 3, "makes": 2, "gives": 2, "equals": 1},
    "grows": {"becomes": 2, "grows to": 1, "turns into": 1},
    "left": {"": 2, " that leaves {s} + {rest} .": 4, " so we have {s} + {rest} .": 2, " left are {rest} .": 1},
    "remark": {
        "": 16, " good .": 2, " {s} so far .": 2, " let us check that . <check>": 1, " that looks right .": 1,
        " we keep {s} .": 1, " fine , go on .": 1,
    },
    "check": {
        "{a} + {t} <equals> {s} , yes .": 2, "{s} - {t} = {a} , right .": 1, "yes , it is {s} .": 2, "it is right .": 1,
    },
    "closing": {"": 5, " that was the last one .": 2, " all done .": 2, " nothing is left , so the total is {s} .": 1},
}  # fmt: skip
HABIT = 0.75
"""Probability that a writer expands a symbol in the same way as before in the same response."""
SLIP_RATE = 0.25
"""Probability that a quick writer gets a sum wrong."""
PROMPT = "please add {terms} . work step by step ."
ANSWER = "answer : {s}"

_ANSWER = re.compile(r"answer\s*:\s*([0-9](?:\s*[0-9])*)")
_SYMBOL = re.compile(r"<(\w+)>")

Grammar = Mapping[str, Mapping[str, float]]
"""Possible expansions of each symbol with their odds. A `<symbol>` in an expansion is itself expanded, and a `{name}` is
replaced by its value at the end."""


class Writer:
    """Writes the sentences of one response with a random grammar.

    With probability `habit`, a writer expands a symbol as it did the last time. So two responses differ more from each other
    than two sentences of the same response, as with people and with language models.
    """

    def __init__(self, grammar: Grammar, rng: random.Random, habit: float) -> None:
        self._grammar = grammar
        self._rng = rng
        self._habit = habit
        self._last: dict[str, str] = {}

    def write(self, symbol: str, **values: object) -> str:
        """Returns a sentence that expands `symbol`, with `values` filled in.

        If the value `rest` is empty or not given, expansions with a `{rest}` are not used.
        """
        return self._expand(symbol, bool(values.get("rest"))).format(**values)

    def _expand(self, symbol: str, has_rest: bool) -> str:
        odds = {text: odds for text, odds in self._grammar[symbol].items() if has_rest or "{rest}" not in text}
        last = self._last.get(symbol)
        if last in odds and self._rng.random() < self._habit:
            chosen = last
        else:
            chosen = self._rng.choices(list(odds), list(odds.values()))[0]
            self._last[symbol] = chosen
        return _SYMBOL.sub(lambda match: self._expand(match.group(1), has_rest), chosen)


@dataclass(frozen=True)
class Problem:
    """A sum. `Problem((12, 5)).prompt` is "please add 12 + 5 . work step by step ." and its `answer` is 17."""

    terms: tuple[int, ...]

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def prompt(self) -> str:
        return PROMPT.format(terms=" + ".join(map(str, self.terms)))


def _make_problem(seed: int, index: int, max_terms: int) -> Problem:
    """Returns problem `index` of the endless list that belongs to a seed.

    The number of terms is log-normal, and each term is uniform. The difficulties of successive problems are spread evenly, by
    a golden-ratio sequence of quantiles, so that the rewards of two steps can be compared.
    """
    quantile = (random.Random(str(seed)).random() + index * GOLDEN_RATIO) % 1.0
    deviation = NormalDist().inv_cdf(min(max(quantile, 1e-9), 1 - 1e-9))
    num_terms = min(max(round(MEDIAN_TERMS * math.exp(TERMS_SPREAD * deviation)), MIN_TERMS), max_terms)
    rng = random.Random(f"{seed}-{index}")
    return Problem(tuple(rng.randint(1, MAX_TERM) for _ in range(num_terms)))


def make_problems(seed: int, num: int, start: int = 0, max_terms: int = MAX_TERMS) -> list[Problem]:
    """Returns problems `start` to `start + num - 1` of the list that belongs to a seed.

    The list is the same in every process.
    """
    return [_make_problem(seed, start + i, max_terms) for i in range(num)]


def demonstration(problem: Problem, rng: random.Random, is_quick: bool = False) -> str:
    """Returns a worked response, which gives partial sums from left to right in random wording.

    A careful writer always ends with the right answer. A quick writer begins with other words, sometimes adds wrongly, and
    continues from the wrong sum.
    """
    sums = _sums(problem.terms, rng, SLIP_RATE if is_quick else 0.0)
    writer = Writer(GRAMMAR, rng, HABIT)
    rest = [" + ".join(map(str, problem.terms[i + 1 :])) for i in range(len(problem.terms))]
    parts = [writer.write("quick opening" if is_quick else "opening", a=sums[0], rest=rest[0])]
    for i, (a, s) in enumerate(pairwise(sums), 1):
        step = writer.write("step", a=a, t=problem.terms[i], s=s, rest=rest[i])
        parts.append(step + " " * (i + 1 < len(sums)))
    return "".join(parts) + writer.write("closing", s=sums[-1]) + " " + ANSWER.format(s=sums[-1])


def _sums(terms: Sequence[int], rng: random.Random, slip_rate: float) -> list[int]:
    """Returns the partial sum after each term.

    With probability `slip_rate` for each term, a sum is slightly too large or too small.
    """
    sums = [terms[0]]
    for term in terms[1:]:
        slip = rng.choice((-10, -2, -1, 1, 2, 10)) if rng.random() < slip_rate else 0
        sums.append(max(sums[-1] + term + slip, 0))
    return sums


def reward(problem: Problem, response: str) -> float:
    """Returns 1.0 if the last answer in `response` is right, and otherwise 0.0.

    An answer has the form "answer : 44", and any text may surround it. Blanks between digits are allowed ("answer : 4 4"),
    because a decoder may leave them there.
    """
    stated = _ANSWER.findall(response)
    if not stated:
        return 0.0
    digits = "".join(stated[-1].split()).lstrip("0")
    return float(digits == str(problem.answer))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each digit and for each word of the grammar."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(vocabulary())}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    core.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
    # Puts blanks around every word but none around digits, and then merges blanks, so that digits join into numbers.
    blanks = [decoders.Replace(Regex(edge), " ") for edge in (r"^(?=[^0-9])", r"(?<=[^0-9 ])$")]
    core.decoder = decoders.Sequence(
        [*blanks, decoders.Fuse(), decoders.Replace(Regex(" {2,}"), " "), decoders.Strip(" ", 1, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def encode_prompt(problem: Problem, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Returns the token ids of a problem's prompt, which start with begin-of-sequence."""
    return list(tokenizer(problem.prompt)["input_ids"])


def reward_of_ids(problem: Problem, response_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> float:
    """Returns the `reward` of a response given as token ids, which may include end-of-sequence and padding."""
    return reward(problem, str(tokenizer.decode(list(response_ids), skip_special_tokens=True)))


@cache
def vocabulary() -> tuple[str, ...]:
    """Returns every token in the order of ids.

    These are special tokens, digits, words in alphabetical order, and unused tokens.
    """
    texts = [PROMPT, ANSWER, "+", *(text for expansions in GRAMMAR.values() for text in expansions)]
    words = sorted({word for text in texts for word in re.sub(r"<\w+>|\{\w+\}", " ", text).split()})
    known = [PAD, BOS, EOS, UNK, *"0123456789", *words]
    return (*known, *(f"<unused_{i}>" for i in range(-len(known) % VOCAB_MULTIPLE)))


class StepAddition:
    """The demo's task in the form that a run needs (`tasks.Task`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_terms: int) -> None:
        self._tokenizer = tokenizer
        self._max_terms = max_terms

    def problems(self, seed: int, num: int, start: int = 0) -> list[Problem]:
        return make_problems(seed, num, start, self._max_terms)

    def encode(self, problem: Problem) -> list[int]:
        return encode_prompt(problem, self._tokenizer)

    def reward(self, problem: Problem, response_ids: Sequence[int]) -> float:
        return reward_of_ids(problem, response_ids, self._tokenizer)
