# SPDX-License-Identifier: Apache-2.0
"""Chooses the rows (samples) of a coming step that are worth decoding early for `run_ahead`, and computes their seeds."""

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
    """Name of the prompt's task, or None if the data loader does not name tasks."""
    index: int | None = None
    """Index of the prompt in the dataset, or None if the data loader does not number prompts."""
    has_media: bool = False
    """Whether images, videos or audio belong to the prompt. The token ids alone do not bring these to the engine."""
    gym_row: Mapping[str, Any] | None = None
    """NeMo-Gym's row, if an agent of NeMo-Gym writes the prompt. Then `token_ids` is not the prompt."""


def early_rows(
    prompts: Iterable[NextPrompt], samples_per_prompt: int, seeds: RowSeeds, opt_out: TaskOptOut
) -> list[EarlyRow]:
    """Returns the rows (samples) of a coming step that are worth decoding early, in the order of that step.

    Rows of tasks without drafts are left out, because their texts would never be drafts. Rows of prompts with media are left
    out as well, because their texts would not be the policy's answers. Rows that are left out get a
    seed too. Without that, other rows of the same prompt would have other seeds here than later in their step.
    """
    samples = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    return _worth_decoding(samples, seeds.seeds([prompt.token_ids for prompt in samples]), opt_out)


def early_rows_of_samples(
    prompts: Iterable[NextPrompt], samples_per_prompt: int, run_seed: int, epoch: int, opt_out: TaskOptOut
) -> list[EarlyRow]:
    """Returns the rows that are worth decoding early, as `early_rows` does, in a run with NeMo-RL's SingleController.

    There a row's seed follows from the index of its prompt in the dataset and from the epoch.
    """
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
    """Returns the rows of NeMo-Gym that are worth decoding early. They are the first requests of samples with known prompts.

    Args:
        rows: NeMo-Gym's rows, one for each prompt of the step.
        prompts: Token ids with which an agent begins each row, or None if they are not known.
        seeds: Seeds of each row's samples, as `gym_row_with_seed` will get them when the step comes.
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
