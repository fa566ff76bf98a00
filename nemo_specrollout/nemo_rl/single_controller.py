# SPDX-License-Identifier: Apache-2.0
"""Puts the block into effect under NeMo-RL's SingleController, an actor that rolls out, trains and refits.

NeMo-RL's set-up on the driver builds objects for that actor, and this package replaces three of them. The rollouts then know
their samples, the data loader knows its epoch, and the weight synchronizer supervises the engines.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from nemo_rl.experience.rollout_manager import AsyncNemoGymRolloutImpl, AsyncRolloutImpl

from nemo_specrollout.nemo_rl.early_rows import NextPrompt, early_rows_of_samples
from nemo_specrollout.nemo_rl.generation import SpecrolloutGeneration
from nemo_specrollout.nemo_rl.gym_prompts import GymPrompts
from nemo_specrollout.nemo_rl.next_prompts import PeekingLoader
from nemo_specrollout.nemo_rl.row_seeds import Sample, current_sample, gym_row_with_seed, sample_seed
from nemo_specrollout.nemo_rl.row_tasks import current_tasks
from nemo_specrollout.nemo_rl.run_facts import RunFacts, block_of
from nemo_specrollout.nemo_rl.step_log import STEP_LOG
from nemo_specrollout.run_ahead.early_texts import EarlyRow

EPOCH_KEY = "specrollout_epoch"
"""Key under which a prompt carries the epoch of the data loader."""


class ControlledGeneration(SpecrolloutGeneration):
    """Generation that the driver builds and the SingleController's actor uses. That actor also supervises the engines."""

    is_supervised_elsewhere = True

    @property
    def _planned_step(self) -> int:
        """Number of the data loader's latest batch, counted from 0.

        The rows of this batch are requested after the next refit.
        """
        loader = PeekingLoader.latest()
        return -1 if loader is None else loader.num_taken - 1

    def _coming_rows(self, num_steps: int) -> list[list[EarlyRow]]:
        """Returns for each coming batch its rows (samples) that may be decoded early.

        There are at most `num_steps` batches, and none beyond the end of the run or of the epoch.
        """
        loader = PeekingLoader.latest()
        if not isinstance(loader, EpochDataLoader):
            return []
        self._check_epoch(len(loader))
        facts = self.facts
        left = max(facts.last_version - self._version - 1, 0)
        return [self._rows_of_epoch(prompts, loader.epoch) for prompts in loader.next_prompts(min(num_steps, left))]

    def _rows_of_epoch(self, prompts: list[NextPrompt], epoch: int) -> list[EarlyRow]:
        facts = self.facts
        gym = [(p.gym_row, p.index) for p in prompts if p.gym_row is not None and p.index is not None]
        if not gym:
            return early_rows_of_samples(prompts, facts.samples_per_prompt, facts.seed, epoch, self.opt_out)
        every = range(facts.samples_per_prompt)
        seeds = [[sample_seed(facts.seed, Sample(index, i, epoch)) for i in every] for _, index in gym]
        return self._early_gym_rows([row for row, _ in gym], seeds)

    def _end_ahead(self, *, keeps_cache: bool = False, is_interrupted: bool = False) -> None:
        """Ends the work on texts of coming steps.

        Cached prefixes stay, because vLLM does not drop them while requests run.
        """
        super()._end_ahead(keeps_cache=True, is_interrupted=is_interrupted)


class SeededRollouts(AsyncRolloutImpl):
    """NeMo-RL's rollouts of one prompt.

    Each rollout knows the identity of its sample in all turns of the conversation, even if the rollout is retried.
    """

    async def _run_single_rollout(self, input_sample: Any, traj_idx: int, *args: Any, **kwargs: Any) -> Any:
        length = sum(len(message["token_ids"]) for message in input_sample["message_log"])
        current_sample.set(_sample(input_sample, traj_idx, length))  # each rollout is an asyncio task of its own
        current_tasks.set([input_sample["task_name"]])
        return await super()._run_single_rollout(input_sample, traj_idx, *args, **kwargs)


class SeededGymRollouts(AsyncNemoGymRolloutImpl):
    """NeMo-Gym's rollouts of one prompt. Each row brings a seed to the HTTP server of the engines."""

    def _build_inputs(self, input_sample: Any, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        GymPrompts.gym = self._task_to_env["nemo_gym"]
        rows = super()._build_inputs(input_sample, *args, **kwargs)
        run_seed = RunFacts.of(self._generation_config).seed
        draftless = block_of(self._generation_config).tasks_without_drafts
        return [
            gym_row_with_seed(row, sample_seed(run_seed, _sample(input_sample, i)), draftless)
            for i, row in enumerate(rows)
        ]


def _sample(prompt: Any, index: int, prompt_length: int | None = None) -> Sample:
    """Returns the identity of sample number `index` of a prompt of NeMo-RL's data loader."""
    return Sample(int(prompt["idx"]), index, int(prompt.get(EPOCH_KEY, 0)), prompt_length)


class EpochDataLoader(PeekingLoader):
    """NeMo-RL's data loader, which writes its epoch into every prompt, and can show its next batches early."""

    def __init__(self, first_epoch: int, *args: Any, **kwargs: Any) -> None:
        """`first_epoch` is the epoch of the checkpoint from which the run resumes, or 0."""
        super().__init__(*args, **kwargs)
        self._next_epoch = first_epoch

    @property
    def epoch(self) -> int:
        """Number of the current epoch."""
        return self._next_epoch - 1

    def __iter__(self) -> Iterator[Any]:
        epoch = self._next_epoch
        self._next_epoch = self._next_epoch + 1
        for prompts in super().__iter__():
            prompts[EPOCH_KEY] = [epoch] * prompts.size
            yield prompts


class SupervisingSynchronizer:
    """NeMo-RL's weight synchronizer, which also supervises the engines. A step's metrics cover the time between refits."""

    def __init__(self, native: Any, generation: ControlledGeneration) -> None:
        self._native = native
        self._generation = generation
        self._supervises = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while the object is being unpickled, it has no `_native` yet
            raise AttributeError(name)
        return getattr(self._native, name)

    def sync_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the step, refits as NeMo-RL does, and begins the next step."""
        generation = self._generation
        if not self._supervises:
            generation.supervise()
            self._supervises = True
        with _lost_engines_as_alarms():
            STEP_LOG.figures = generation.step_metrics()
        with generation.new_weights():
            result = self._native.sync_weights(*args, **kwargs)
        with _lost_engines_as_alarms():
            generation.weights_updated()
            generation.snapshot_step_metrics()
        return result

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._native.shutdown(*args, **kwargs)
        finally:
            self._generation.end_supervision()


def make_synchronizer(
    make: Any, *args: Any, generation: ControlledGeneration, **kwargs: Any
) -> SupervisingSynchronizer:
    """Makes a weight synchronizer with NeMo-RL's function `make`, and wraps it so that it also supervises the engines."""
    return SupervisingSynchronizer(make(*args, generation=generation, **kwargs), generation)


@contextmanager
def _lost_engines_as_alarms() -> Iterator[None]:
    """Turns the loss of an engine into an alarm, because NeMo-RL handles the loss itself."""
    try:
        yield
    except ray.exceptions.RayError as error:
        first_line = str(error).strip().partition("\n")[0]
        STEP_LOG.alarms.append(f"an engine does not answer, so this step has no metrics: {first_line}")
