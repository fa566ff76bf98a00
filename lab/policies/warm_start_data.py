# SPDX-License-Identifier: Apache-2.0
"""Worked responses for the warm start, in batches of about equal size. Training begins with short problems.

Shapes: B requests, T positions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lab.local.step_addition import MAX_TERMS, demonstration, encode_prompt, make_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_STEPS = 6000
BATCH_TOKENS = 768
"""Number of positions in a training batch, including padding."""
POOL_PROBLEMS = 256
"""Number of problems in a pool. A pool is sorted by length before it is divided into batches, which keeps padding small."""
POOL_STEPS = 64
"""Number of training steps that a pool is assumed to last, which is about its number of batches. It only sets how fast
problems get longer."""
IGNORED = -100
Example = tuple[list[int], int]
"""Token ids of a prompt followed by its response, and the length of the prompt."""
FIRST_MAX_TERMS = 3


@dataclass(frozen=True)
class WarmStart:
    """Settings that determine the policy's weights."""

    steps: int = DEFAULT_STEPS
    seed: int = 0
    learning_rate: float = 2e-3
    warm_up_steps: int = 100
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    digit_weight: float = 3.0
    """Weight of a digit in the loss, relative to a word, because digits are the hard part. It does not change which prediction
    is the best at a position."""
    curriculum: float = 0.4
    """Share of the steps over which the longest problem grows from 3 terms to 16."""
    quick_from: float = 0.8
    """Share of the steps after which every second response is by a quick writer, who begins with other words and makes
    mistakes (`step_addition.demonstration`). RL has to unlearn these mistakes."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give at least 1 (default {DEFAULT_STEPS})")


def make_batches(
    tokenizer: PreTrainedTokenizerFast, settings: WarmStart
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields an endless sequence of batches (ids_BT, labels_BT).

    A batch has about `BATCH_TOKENS` positions, and its examples have similar lengths.
    """
    rng = random.Random(f"batches-{settings.seed}")
    for pool in itertools.count():
        step = pool * POOL_STEPS
        has_quick = step >= settings.quick_from * settings.steps
        longest = longest_problem(step, settings)
        examples = _make_examples(tokenizer, settings.seed, pool * POOL_PROBLEMS, longest, has_quick)
        batches = cut_batches(examples, BATCH_TOKENS)
        rng.shuffle(batches)
        for batch in batches:
            yield pad_batch(batch, int(tokenizer.pad_token_id))


def longest_problem(step: int, settings: WarmStart) -> int:
    """Returns the largest number of terms of a training problem at a step.

    It grows with the step, because what is learned from short sums also helps with long ones.
    """
    progress = min(1.0, step / max(1.0, settings.curriculum * settings.steps))
    return FIRST_MAX_TERMS + int(progress * (MAX_TERMS - FIRST_MAX_TERMS))


def _make_examples(
    tokenizer: PreTrainedTokenizerFast, seed: int, start: int, max_terms: int, has_quick: bool
) -> list[Example]:
    """Returns worked responses to the problems of one pool."""
    examples = []
    for index, problem in enumerate(make_problems(seed, POOL_PROBLEMS, start, max_terms), start):
        prompt = encode_prompt(problem, tokenizer)
        is_quick = has_quick and index % 2 == 1
        text = demonstration(problem, random.Random(f"demonstration-{seed}-{index}"), is_quick)
        response = tokenizer(text, add_special_tokens=False)["input_ids"]
        examples.append(([*prompt, *response, int(tokenizer.eos_token_id)], len(prompt)))
    return examples


def cut_batches(examples: Sequence[Example], batch_tokens: int) -> list[list[Example]]:
    """Sorts the examples by length, and returns them in batches.

    A padded batch has at most `batch_tokens` positions. Only a longer example, in a batch of its own, has more.
    """
    batches: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda example: len(example[0])):
        if batches[-1] and (len(batches[-1]) + 1) * len(example[0]) > batch_tokens:
            batches.append([])
        batches[-1].append(example)
    return batches


def pad_batch(batch: Sequence[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids_BT, labels_BT) of a batch, padded on the right. Prompts and padding have no labels."""
    width = max(len(ids) for ids, _ in batch)
    ids_BT = torch.full((len(batch), width), pad_id)
    labels_BT = torch.full((len(batch), width), IGNORED)
    for row, (ids, prompt_length) in enumerate(batch):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, prompt_length : len(ids)] = ids_BT[row, prompt_length : len(ids)]
    return ids_BT, labels_BT
