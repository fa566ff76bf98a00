# SPDX-License-Identifier: Apache-2.0
"""The demo's task: add 2 to 24 numbers step by step, made from a seed, with a reward by rule.

A worked response is written left to right by a small random grammar. Its wording carries about as much chance per token
as an LLM's own sampling does in RL, so that siblings and prompt tell a drafter no more than they would in a real run.
Nothing here imports torch; transformers is imported only by `build_tokenizer`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MIN_TERMS, MAX_TERMS, MAX_TERM = 2, 24, 99
MEDIAN_TERMS, TERMS_SPREAD = 5.0, 0.6
"""Median and log-standard-deviation of the log-normal number of terms."""

VOCAB_MULTIPLE = 32
BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"

# Symbol -> its expansions and their odds. `<x>` is a symbol; `{a}` the sum so far, `{t}` the term, `{s}` the new sum.
# Two numbers are never neighbours, because a tokenizer with one token per digit could not tell them apart. The odds are
# uneven on purpose: most tokens of an LLM are nearly certain, and a few are forks.
GRAMMAR: dict[str, dict[str, float]] = {
    "opening": {
        "": 4, "let us go from left to right . ": 2, "we start with {a} . ": 2, "ok , the first number is {a} . ": 1,
        "begin at {a} . ": 1,
    },
    "step": {
        "<lead>add {t} : {a} + {t} <equals> {s} .<remark>": 8,
        "<lead>{a} <plus> {t} <equals> {s} .<remark>": 6,
        "<lead>adding {t} to {a} <equals> {s} .<remark>": 3,
        "<lead>we get {s} after adding {t} .<remark>": 1,
        "<lead>with {t} more {a} <grows> {s} .<remark>": 2,
        "<lead>the next number is {t} , <which> {s} .<remark>": 2,
        "<lead>the sum of {a} and {t} <equals> {s} .<remark>": 2,
        "<lead>take {a} , put {t} on top , and it <grows> {s} .<remark>": 1,
    },
    "lead": {"": 12, "now ": 4, "then ": 3, "so ": 2, "after that , ": 1, "ok , ": 1},
    "plus": {"+": 6, "plus": 2, "and": 1},
    "equals": {"=": 9, "is": 3, "makes": 2, "gives": 2, "equals": 1},
    "grows": {"becomes": 2, "grows to": 1, "turns into": 1},
    "which": {"so {a} <grows>": 2, "and {a} + {t} <equals>": 2, "which brings us to": 1},
    "remark": {
        "": 16, " good .": 2, " {s} so far .": 2, " let us check that . <check>": 1, " that looks right .": 1,
        " we keep {s} .": 1, " fine , go on .": 1,
    },
    "check": {
        "{a} + {t} <equals> {s} , yes .": 2, "{s} - {t} = {a} , right .": 1, "yes , it is {s} .": 2, "it is right .": 1,
    },
    "closing": {"": 5, " that was the last one .": 2, " all done .": 2, " nothing is left , so the total is {s} .": 1},
}  # fmt: skip
PROMPT = "please add {terms} . work step by step ."
ANSWER = "answer : {s}"

_SYMBOL = re.compile(r"<(\w+)>")
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
    """Problem `index` of the endless list that `seed` names: long-tailed in its number of terms and in each term."""
    rng = random.Random(f"{seed}-{index}")
    num_terms = round(MEDIAN_TERMS * rng.lognormvariate(0.0, TERMS_SPREAD))
    num_terms = min(max(num_terms, MIN_TERMS), max_terms)
    return Problem(tuple(int((MAX_TERM + 1) ** rng.random()) for _ in range(num_terms)))


def make_problems(seed: int, num: int, start: int = 0, max_terms: int = MAX_TERMS) -> list[Problem]:
    """Problems `start` to `start + num - 1` of `seed`'s list; the same in every process, and whatever `num` is.

    Raises ValueError if `max_terms` is outside 2..24.
    """
    if not MIN_TERMS <= max_terms <= MAX_TERMS:
        raise ValueError(f"max_terms is {max_terms}; give a number from {MIN_TERMS} to {MAX_TERMS}")
    return [make_problem(seed, start + i, max_terms) for i in range(num)]


def demonstration(problem: Problem, rng: random.Random) -> str:
    """A worked response: partial sums left to right in random wording, always ending in the right answer."""
    sums = list(accumulate(problem.terms))
    parts = [_expand("opening", rng).format(a=sums[0])]
    steps = zip(pairwise(sums), problem.terms[1:], strict=True)
    parts.append(" ".join(_expand("step", rng).format(a=a, s=s, t=t) for (a, s), t in steps))
    parts.append(_expand("closing", rng).format(s=sums[-1]) + " ")
    return "".join(parts) + ANSWER.format(s=sums[-1])


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
        padding_side="left", clean_up_tokenization_spaces=False, model_max_length=512,
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


def _expand(symbol: str, rng: random.Random) -> str:
    """A random sentence of `GRAMMAR[symbol]`, numbers still as `{a}`, `{t}`, `{s}`."""
    texts, odds = zip(*GRAMMAR[symbol].items(), strict=True)
    chosen = rng.choices(texts, odds)[0]
    return _SYMBOL.sub(lambda match: _expand(match.group(1), rng), chosen)
