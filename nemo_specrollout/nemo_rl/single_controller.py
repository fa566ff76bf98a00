# SPDX-License-Identifier: Apache-2.0
"""The block under NeMo-RL's SingleController, an actor that rolls out, trains and refits.

NeMo-RL's set-up on the driver builds objects for that actor. Ours replace four of them: the rollouts, which know their
samples; the data loader, which knows its epoch; the weight synchronizer, which supervises the engines; and the logger.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from nemo_rl.experience.rollout_manager import AsyncNemoGymRolloutImpl, AsyncRolloutImpl
from nemo_rl.utils.logger import Logger
from torchdata.stateful_dataloader import StatefulDataLoader

from nemo_specrollout.nemo_rl.generation import SpecrolloutGeneration
from nemo_specrollout.nemo_rl.logger import Watch
from nemo_specrollout.nemo_rl.row_seeds import Sample, current_sample, gym_row_with_seed, sample_seed

EPOCH_KEY = "specrollout_epoch"
"""Key of a prompt with its epoch."""


class ControlledGeneration(SpecrolloutGeneration):
    """Generation that the driver builds and the SingleController's actor uses and supervises."""

    is_supervised_elsewhere = True


class SeededRollouts(AsyncRolloutImpl):
    """NeMo-RL's rollouts of one prompt. Each knows its sample, in all its turns and when it is tried again."""

    async def _run_single_rollout(self, input_sample: Any, traj_idx: int) -> Any:
        length = sum(len(message["token_ids"]) for message in input_sample["message_log"])
        current_sample.set(_sample(input_sample, traj_idx, length))
        return await super()._run_single_rollout(input_sample, traj_idx)  # NeMo-RL runs it as a task of its own


class SeededGymRollouts(AsyncNemoGymRolloutImpl):
    """NeMo-Gym's rollouts of one prompt. Each of its rows brings a seed to the engines' HTTP server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run_seed = SpecrolloutGeneration.facts.seed

    def _build_inputs(self, input_sample: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = super()._build_inputs(input_sample)
        seeds = [sample_seed(self._run_seed, _sample(input_sample, index)) for index in range(len(rows))]
        return [gym_row_with_seed(row, seed) for row, seed in zip(rows, seeds, strict=True)]


def _sample(prompt: Any, index: int, prompt_length: int | None = None) -> Sample:
    """Returns the identity of sample number `index` of a prompt of NeMo-RL's data loader."""
    return Sample(int(prompt["idx"]), index, int(prompt.get(EPOCH_KEY, 0)), prompt_length)


class EpochDataLoader(StatefulDataLoader):
    """NeMo-RL's data loader, which tells every prompt its epoch."""

    first_epoch = 0
    """Epoch of the checkpoint that the run resumes from; set by `install`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next_epoch = type(self).first_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        for prompts in super().__iter__():
            prompts[EPOCH_KEY] = [epoch] * prompts.size
            yield prompts


_received: list[Watch] = []
"""Settings of the logger that arrived in this process with the weight synchronizer."""


def make_logger(config: Mapping[str, Any]) -> Any:
    """Makes the logger of NeMo-RL's controller."""
    return _received[-1].logger_class(Logger)(config) if _received else Logger(config)


class SupervisingSynchronizer:
    """NeMo-RL's weight synchronizer, which also supervises the engines in the process that uses it.

    Owns the boundary between steps: the metrics of a step cover the generation between two refits.
    """

    def __init__(self, native: Any, generation: ControlledGeneration, watch: Watch) -> None:
        self._native, self._generation, self._watch = native, generation, watch
        self._supervises = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while the object is being unpickled, it has no `_native` yet
            raise AttributeError(name)
        return getattr(self._native, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the object in the controller's actor, whose logger must share the step log of `_watch`."""
        self.__dict__.update(state)
        _received.append(self._watch)

    def sync_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the step, refits as NeMo-RL does, and begins the next step."""
        generation = self._generation
        if not self._supervises:
            generation.supervise(self._watch.log)
            self._supervises = True
        with self._lost_engines_as_alarms():
            self._watch.log.figures = generation.step_metrics()
        with generation.new_weights():
            result = self._native.sync_weights(*args, **kwargs)
        with self._lost_engines_as_alarms():
            generation.weights_updated()
            generation.snapshot_step_metrics()
        return result

    def shutdown(self) -> None:
        """Shuts down NeMo-RL's synchronizer and ends the supervision."""
        try:
            self._native.shutdown()
        finally:
            self._generation.end_supervision()

    @contextmanager
    def _lost_engines_as_alarms(self) -> Iterator[None]:
        """Logs an alarm if an engine has died. NeMo-RL handles the loss itself."""
        try:
            yield
        except ray.exceptions.RayError as error:
            first_line = str(error).strip().partition("\n")[0]
            self._watch.log.alarms.append(f"an engine does not answer, so this step has no metrics: {first_line}")
