# SPDX-License-Identifier: Apache-2.0
"""Chooses the rows of a coming step that are decoded early (`run_ahead`), and computes their seeds."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_specrollout.nemo_rl.row_seeds import (
    Row,
    RowSeeds,
    Sample,
    given_seed,
    gym_request_fields,
    gym_row_with_seed,
    may_draft,
    sample_seed,
)
from nemo_specrollout.nemo_rl.row_tasks import TaskOptOut
from nemo_specrollout.run_ahead.early_texts import EarlyRow


@dataclass(frozen=True)
class NextPrompt:
    """A prompt of a coming step, as the data loader shows it."""

    token_ids: list[int]
    task: str | None = None
    """Name of its task, or None if the data loader does not name tasks."""
    index: int | None = None
    """Its row of the dataset, or None if the data loader does not number them."""
    has_media: bool = False
    """True if images, videos or audio belong to it, which its tokens alone do not bring to the engine."""
    gym_row: Mapping[str, Any] | None = None
    """NeMo-Gym's row, if an agent writes the prompt. In this case `token_ids` is not the prompt."""


def early_rows(
    prompts: Iterable[NextPrompt], samples_per_prompt: int, seeds: RowSeeds, opt_out: TaskOptOut
) -> list[EarlyRow]:
    """Returns the rows of a coming step that are worth decoding early, in the order of that step.

    A row is left out if its text would never be a draft, which holds for tasks without drafts, or would not be the policy's
    answer, which holds for prompts with media. A row that is left out takes its seed all the same, because its step counts
    it too when it numbers rows of equal content.
    """
    samples = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    return _worth_decoding(samples, seeds.seeds([prompt.token_ids for prompt in samples]), opt_out)


def early_rows_of_samples(
    prompts: Iterable[NextPrompt], samples_per_prompt: int, run_seed: int, epoch: int, opt_out: TaskOptOut
) -> list[EarlyRow]:
    """Returns the same as `early_rows`, for the SingleController, under which seeds follow from dataset row and epoch."""
    samples = [(prompt, i) for prompt in prompts if prompt.index is not None for i in range(samples_per_prompt)]
    seeds = [
        sample_seed(run_seed, Sample(prompt.index, i, epoch), prompt.token_ids)
        for prompt, i in samples
        if prompt.index is not None
    ]
    return _worth_decoding([prompt for prompt, _ in samples], seeds, opt_out)


def early_gym_rows(
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[int] | None],
    seeds: Sequence[Sequence[int]],
    run_seed: int,
    draftless: Collection[str],
) -> list[EarlyRow]:
    """Returns early rows for NeMo-Gym, which are the first requests of all samples whose prompts are known.

    Args:
        rows: One for each prompt of the step.
        prompts: Token ids with which an agent begins each row, or None where they are not known.
        seeds: The seeds of each row's samples, as `gym_row_with_seed` gets them when the step comes.
        run_seed: Seed of the run.
        draftless: Names of the agents whose rows are decoded without drafts.
    """
    found = []
    for row, prompt, of_samples in zip(rows, prompts, seeds, strict=True):
        for seed in of_samples if prompt is not None else ():
            fields = gym_request_fields(gym_row_with_seed(dict(row), seed, draftless))
            given = fields["seed"]
            if prompt is not None and isinstance(given, int) and may_draft(fields):
                found.append(EarlyRow(prompt, Row(given_seed(run_seed, given, prompt), len(prompt))))
    return found


def _worth_decoding(samples: Sequence[NextPrompt], seed_of_each: Sequence[int], opt_out: TaskOptOut) -> list[EarlyRow]:
    may_draft = opt_out.of_tasks([prompt.task for prompt in samples])
    return [
        EarlyRow(prompt.token_ids, Row(seed, len(prompt.token_ids)))
        for prompt, seed, drafts in zip(samples, seed_of_each, may_draft, strict=True)
        if drafts and not prompt.has_media
    ]
