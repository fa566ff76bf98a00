# SPDX-License-Identifier: Apache-2.0
"""The block under NeMo-RL's SingleController, an actor that rolls out, trains and refits.

What it needs goes into that actor with the objects that NeMo-RL's set-up builds for it: the rollouts, which know their
samples; the data loader, which knows its epoch; and the weight synchronizer, which looks after the engines there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from nemo_rl.experience.rollout_manager import AsyncNemoGymRolloutImpl, AsyncRolloutImpl
from nemo_rl.utils.logger import Logger
from torchdata.stateful_dataloader import StatefulDataLoader

from nemo_specrollout.nemo_rl.generation import SpecrolloutGeneration
from nemo_specrollout.nemo_rl.gym_rows import with_seed
from nemo_specrollout.nemo_rl.identities import Sample, current_sample, sample_seed
from nemo_specrollout.nemo_rl.logger import Watch

EPOCH_KEY = "specrollout_epoch"


class ControlledGeneration(SpecrolloutGeneration):
    """The generation that the driver builds and the SingleController's actor uses, which therefore supervises."""

    is_supervised_elsewhere = True


class SeededRollouts(AsyncRolloutImpl):
    """NeMo-RL's rollouts of one prompt: each knows which sample it is, in all its turns and when it is tried again."""

    async def _run_single_rollout(self, input_sample: Any, traj_idx: int) -> Any:
        length = sum(len(message["token_ids"]) for message in input_sample["message_log"])
        current_sample.set(_sample(input_sample, traj_idx, length))
        return await super()._run_single_rollout(input_sample, traj_idx)  # a task of its own


class SeededGymRollouts(AsyncNemoGymRolloutImpl):
    """NeMo-Gym's rollouts of one prompt: each of its rows brings a seed to the engines' HTTP server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run_seed = SpecrolloutGeneration.facts.seed

    def _build_inputs(self, input_sample: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = super()._build_inputs(input_sample)
        return [with_seed(row, sample_seed(self._run_seed, _sample(input_sample, i))) for i, row in enumerate(rows)]


def _sample(prompt: Any, index: int, prompt_length: int | None = None) -> Sample:
    """Sample number `index` of a prompt of NeMo-RL's data loader."""
    return Sample(int(prompt["idx"]), index, int(prompt.get(EPOCH_KEY, 0)), prompt_length)


class EpochDataLoader(StatefulDataLoader):
    """NeMo-RL's data loader; every prompt is told its epoch, in which it is seen once."""

    first_epoch = 0  # of the checkpoint that the run resumes from, set by `install`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next_epoch = type(self).first_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        for prompts in super().__iter__():
            prompts[EPOCH_KEY] = [epoch] * prompts.size
            yield prompts


_arrived: list[Watch] = []  # in the controller's actor, one


def make_logger(config: Mapping[str, Any]) -> Any:
    """Stands where NeMo-RL's controller makes its `Logger`."""
    return _arrived[-1].logger_class(Logger)(config) if _arrived else Logger(config)


class SupervisingSynchronizer:
    """NeMo-RL's weight synchronizer. In the process that uses it, it supervises the engines: a refit ends a step.

    Owns the boundary of steps: figures are of what was generated between two refits.
    """

    def __init__(self, native: Any, generation: ControlledGeneration, watch: Watch) -> None:
        self._native, self._generation, self._watch = native, generation, watch
        self._supervises = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # an object that is only being unpickled has no `_native` yet
            raise AttributeError(name)
        return getattr(self._native, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the controller's actor: the logger that NeMo-RL makes there, after this, writes down what is noted here."""
        self.__dict__.update(state)
        _arrived.append(self._watch)

    def sync_weights(self, *args: Any, **kwargs: Any) -> Any:
        """NeMo-RL's refit, the end of a step and the beginning of the next."""
        generation = self._generation
        if not self._supervises:
            generation.supervise(self._watch.notes)
            self._supervises = True
        with self._engines_may_be_lost():
            self._watch.notes.figures = generation.step_figures()
        with generation.new_weights():
            result = self._native.sync_weights(*args, **kwargs)
        with self._engines_may_be_lost():
            generation.weights_updated()
            generation.snapshot_step_metrics()
        return result

    def shutdown(self) -> None:
        """NeMo-RL's; heads' trainer and drafters end."""
        try:
            self._native.shutdown()
        finally:
            self._generation.end_supervision()

    @contextmanager
    def _engines_may_be_lost(self) -> Iterator[None]:
        """An engine that died is NeMo-RL's to handle: figures of this step are missing, and that is said."""
        try:
            yield
        except ray.exceptions.RayError as error:
            first_line = str(error).strip().partition("\n")[0]
            self._watch.notes.alarms.append(f"an engine does not answer, so this step has no figures: {first_line}")
