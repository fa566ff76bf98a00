# SPDX-License-Identifier: Apache-2.0
"""The demo's task: add 2 to 16 numbers step by step, made from a seed, with a reward by rule.

A worked response is written left to right by a small random grammar. It repeats itself no more than an LLM's text does:
n-gram drafting gains less here than papers report (docs/reference/tasks.md). So the task does not favour drafters.
Nothing here imports torch; transformers is imported only by `build_tokenizer`.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

from nemo_specrollout.local.grammar import Writer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MIN_TERMS, MAX_TERMS, MAX_TERM = 2, 16, 30
MEDIAN_TERMS, TERMS_SPREAD = 5.0, 0.6
"""Median and log-standard-deviation of the log-normal number of terms."""

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
VOCAB_MULTIPLE = 32
BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"

# `{a}` is the sum so far, `{t}` the term, `{s}` the new sum, `{rest}` the terms that are left.
# Two numbers are never neighbours, because a tokenizer with one token per digit could not tell them apart. The odds are
# uneven on purpose: most tokens of an LLM are nearly certain, and a few are forks.
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
"""How often a writer says a thing as it said it before in the same response."""
SLIP_RATE = 0.25
"""How often a quick writer gets a sum wrong."""
PROMPT = "please add {terms} . work step by step ."
ANSWER = "answer : {s}"

_ANSWER = re.compile(r"answer\s*:\s*([0-9](?:\s*[0-9])*)")


@dataclass(frozen=True)
class Problem:
    """One sum to do. `Problem((12, 5)).prompt` is "please add 12 + 5 . work step by step .", and its `answer` 17."""

    terms: tuple[int, ...]

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def prompt(self) -> str:
        return PROMPT.format(terms=" + ".join(map(str, self.terms)))


def make_problem(seed: int, index: int, max_terms: int = MAX_TERMS) -> Problem:
    """Problem `index` of the endless list that `seed` names: log-normal in its number of terms, uniform in each term.

    Neighbours in the list are spread evenly over the difficulties (a golden-ratio sequence of quantiles), so that the
    rewards of two steps can be compared.
    """
    quantile = (random.Random(str(seed)).random() + index * GOLDEN_RATIO) % 1.0
    deviation = NormalDist().inv_cdf(min(max(quantile, 1e-9), 1 - 1e-9))
    num_terms = min(max(round(MEDIAN_TERMS * math.exp(TERMS_SPREAD * deviation)), MIN_TERMS), max_terms)
    rng = random.Random(f"{seed}-{index}")
    return Problem(tuple(rng.randint(1, MAX_TERM) for _ in range(num_terms)))


def make_problems(seed: int, num: int, start: int = 0, max_terms: int = MAX_TERMS) -> list[Problem]:
    """Problems `start` to `start + num - 1` of `seed`'s list; the same in every process, and whatever `num` is.

    Raises ValueError if `max_terms` is outside 2..16.
    """
    if not MIN_TERMS <= max_terms <= MAX_TERMS:
        raise ValueError(f"max_terms is {max_terms}; give a number from {MIN_TERMS} to {MAX_TERMS}")
    return [make_problem(seed, start + i, max_terms) for i in range(num)]


def demonstration(problem: Problem, rng: random.Random, is_quick: bool = False) -> str:
    """A worked response: partial sums left to right in random wording.

    A careful writer always ends in the right answer. A quick one opens in another way and slips now and then, goes on
    from the wrong sum, and never checks.
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
    """The sum after each term; where the writer slips, a little beside the right one."""
    sums = [terms[0]]
    for term in terms[1:]:
        slip = rng.choice((-10, -2, -1, 1, 2, 10)) if rng.random() < slip_rate else 0
        sums.append(max(sums[-1] + term + slip, 0))
    return sums


def reward(problem: Problem, response: str) -> float:
    """1.0 if the last answer that `response` states is the right one, else 0.0; any text is allowed around it.

    Digits may be apart ("answer : 4 4"), as a decoder that knows nothing of numbers leaves them.
    """
    stated = _ANSWER.findall(response)
    if not stated:
        return 0.0
    digits = "".join(stated[-1].split()).lstrip("0")
    return float(digits == str(problem.answer))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, one a digit; the vocabulary is exactly the grammar's words, padded to a multiple of 32."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(vocabulary())}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    core.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
    # A blank on both sides of every word and none around digits, then blanks are merged: so digits join into numbers.
    blanks = [decoders.Replace(Regex(edge), " ") for edge in (r"^(?=[^0-9])", r"(?<=[^0-9 ])$")]
    core.decoder = decoders.Sequence(
        [*blanks, decoders.Fuse(), decoders.Replace(Regex(" {2,}"), " "), decoders.Strip(" ", 1, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK,
        padding_side="left", clean_up_tokenization_spaces=False, model_max_length=1024,
    )  # fmt: skip


def encode_prompt(problem: Problem, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The prompt's token ids, begin-of-sequence first; a response's first token follows the last."""
    return list(tokenizer(problem.prompt)["input_ids"])


def reward_of_ids(problem: Problem, response_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> float:
    """`reward` of a response given as token ids; end-of-sequence and padding may be among them."""
    return reward(problem, str(tokenizer.decode(list(response_ids), skip_special_tokens=True)))


@cache
def vocabulary() -> tuple[str, ...]:
    """Every token in order of its id: special tokens, digits, words by alphabet, unused ones up to a multiple of 32."""
    texts = [PROMPT, ANSWER, "+", *(text for expansions in GRAMMAR.values() for text in expansions)]
    words = sorted({word for text in texts for word in re.sub(r"<\w+>|\{\w+\}", " ", text).split()})
    known = [PAD, BOS, EOS, UNK, *"0123456789", *words]
    return (*known, *(f"<unused_{i}>" for i in range(-len(known) % VOCAB_MULTIPLE)))
