# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's generation, its rollout actors and its logger, extended: every row gets a seed, and every step gets metrics.

Ray copies the generation to the actors that roll out. A copy gets its policy version from its actor.
"""

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import numpy as np
import ray
import torch
from nemo_rl.algorithms.async_utils.trajectory_collector import AsyncTrajectoryCollector
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience import rollouts
from nemo_rl.experience.sync_rollout_actor import SyncRolloutActor
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.utils.logger import Logger

from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.nemo_rl.early_rows import early_rows
from nemo_specrollout.nemo_rl.logger import WatchingLogger
from nemo_specrollout.nemo_rl.next_prompts import next_prompts
from nemo_specrollout.nemo_rl.ray_calls import EngineClient
from nemo_specrollout.nemo_rl.row_seeds import (
    DRAFTS_KEY,
    RECORD_KEY,
    ROOTS_KEY,
    SEEDS_KEY,
    Conversations,
    RowSeeds,
    SeedKind,
    current_sample,
    gym_row_with_seed,
)
from nemo_specrollout.nemo_rl.row_tasks import TaskOptOut, with_task, with_tasks
from nemo_specrollout.nemo_rl.run_facts import RunFacts, block_of
from nemo_specrollout.nemo_rl.step_log import STEP_LOG
from nemo_specrollout.nemo_rl.supervisor import Supervisor
from nemo_specrollout.run_ahead.driver import RunAhead

_NativeCollector: Any = AsyncTrajectoryCollector.__ray_metadata__.modified_class
_NativeActor: Any = SyncRolloutActor.__ray_metadata__.modified_class


class SpecrolloutGeneration(VllmGeneration):
    """Replaces NeMo-RL's `VllmGeneration`. Owns the seeds of its rows and, in one process of the run, the supervisor."""

    is_supervised_elsewhere = False
    """Whether another process than the one that builds the generation supervises the engines."""
    latest: "ref[SpecrolloutGeneration] | None" = None
    """Generation of this process, or its copy."""
    _supervisor: Supervisor | None = None
    _ahead: RunAhead | None = None
    """None without `run_ahead`, and in a copy."""
    _num_generated = 0
    """Calls of `generate`."""

    def __init__(self, cluster: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        SpecrolloutGeneration.latest = ref(self)
        self.facts = RunFacts.of(config)
        self.block = block_of(config)
        self.first_version = self.facts.first_version
        self.row_seeds = RowSeeds(self.facts.seed, self.first_version)
        self._conversations = Conversations()
        self.opt_out = TaskOptOut(self.block.tasks_without_drafts)
        self._kind = SeedKind.ROLLOUT
        self._validated = list[int]()
        self._num_refits = 0
        if not self.is_supervised_elsewhere:
            self._supervisor = Supervisor(self.block, config, STEP_LOG)
            STEP_LOG.source = WeakMethod(self.step_metrics)
        super().__init__(cluster, config, *args, **kwargs)
        if self._supervisor is not None:
            self._supervisor.attach(self.worker_group)
            if self.block.runs_ahead:
                self._ahead = RunAhead(EngineClient(self.worker_group))
            if not getattr(self, "_defer_model_load", False):
                self._supervisor.open_exchange()

    def load_and_start(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the models of deferred engines (NeMo-Gym's). Only then can they exchange requests."""
        result = super().load_and_start(*args, **kwargs)
        if self._supervisor is not None:
            self._supervisor.open_exchange()
        return result

    def supervise(self) -> None:
        """Supervises the engines from this process, which has a copy of the generation. Their models must be loaded."""
        self._supervisor = Supervisor(self.block, self.cfg, STEP_LOG)
        self._supervisor.attach(self.worker_group)
        self._supervisor.open_exchange()

    def end_supervision(self) -> None:
        supervisor = self._supervisor
        self._supervisor = None
        if supervisor is not None:
            supervisor.close()
            supervisor.close_exchange()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_supervisor", "_ahead")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        SpecrolloutGeneration.latest = ref(self)

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the engines. Heads' trainer and drafters end before them, and the exchange after them."""
        self._end_ahead()
        if self._supervisor is not None:
            self._supervisor.close()
        is_down = super().shutdown(*args, **kwargs)
        if self._supervisor is not None:
            self._supervisor.close_exchange()
        return is_down

    def generate(self, data: BatchedDataDict[Any], *args: Any, **kwargs: Any) -> Any:
        """Generates as NeMo-RL does, with a seed for each row. Engines that are done first begin the next step's rows."""
        self._end_ahead(keeps_cache=True)
        seeded = self._with_seeds(data)
        self._num_generated += 1
        self._begin_ahead(in_tail=True)
        with nullcontext() if self._supervisor is None else self._supervisor.rollout():
            return super().generate(seeded, *args, **kwargs)

    async def generate_async(
        self, data: BatchedDataDict[Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[Any]], None]:
        """Generates as NeMo-RL does, with a seed for the only row."""
        self._end_ahead(keeps_cache=True)
        async for result in super().generate_async(self._with_seeds(data), *args, **kwargs):
            yield result

    def _with_seeds(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Returns `data` with a column for each field of `Row`."""
        lengths = data["input_lengths"].tolist()
        rows = [row[:length].tolist() for row, length in zip(data["input_ids"], lengths, strict=True)]
        seeds = self.row_seeds.seeds(rows, self._kind)
        sample = current_sample.get()
        if self._kind is SeedKind.VALIDATION:
            self._validated += seeds
        elif self._supervisor is not None and sample is None:
            self._supervisor.note_requested(seeds)
        if sample is not None and sample.prompt_length is not None:
            roots = [sample.prompt_length] * len(rows)
        else:
            roots = self._conversations.root_lengths(rows)
        seeded: BatchedDataDict[Any] = BatchedDataDict(data)
        seeded[SEEDS_KEY] = torch.tensor(seeds, dtype=torch.int64)
        seeded[ROOTS_KEY] = torch.tensor(roots, dtype=torch.int64)
        seeded[DRAFTS_KEY] = torch.tensor(self.opt_out.of_rows(len(rows)))
        seeded[RECORD_KEY] = torch.full((len(rows),), self._kind is SeedKind.ROLLOUT)
        return seeded

    def gym_seeds(self, rows: list[dict[str, Any]]) -> list[int]:
        """Returns seeds for rows of NeMo-Gym, whose agents request responses over HTTP."""
        questions = [row["responses_create_params"].get("input") for row in rows]  # which siblings share
        contents = [json.dumps(question, sort_keys=True, default=str).encode() for question in questions]
        return self.row_seeds.seeds(map(list, contents), self._kind)

    def finish_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Lets the engines drop cached prefixes and sleep. All races end before that."""
        with self._engines_at_rest():
            return super().finish_generation(*args, **kwargs)

    @contextmanager
    def new_weights(self) -> Iterator[None]:
        """Encloses a refit. With `run_ahead`, requests that are under way when weights change in flight begin again."""
        begins_again = self._ahead is not None and self.facts.in_flight
        rest = nullcontext() if begins_again else self._engines_at_rest()
        with rest, EngineClient(self.worker_group).weights_change():
            yield

    def _engines_at_rest(self) -> AbstractContextManager[None]:
        """Encloses a time in which no request moves. The engines forget what they have begun ahead."""
        self._end_ahead()
        return nullcontext() if self._supervisor is None else self._supervisor.new_weights()

    def weights_updated(self) -> None:
        """Begins the next policy version after a refit. The first refit brings the weights that the run starts from."""
        self._num_refits += 1
        self.row_seeds.begin_version(self._version)
        if self._supervisor is not None:
            self._supervisor.policy_updated(self._version)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Encloses a validation: its rows have seeds of their own kind, and the engines drop their sample stats."""
        self._kind = SeedKind.VALIDATION
        self._validated = []
        try:
            yield
        finally:
            self._kind = SeedKind.ROLLOUT
        EngineClient(self.worker_group).call(WorkerCalls.specrollout_take_sample_stats, self._validated)

    def snapshot_step_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Begins the window of a step's metrics. NeMo-RL calls it before a step's generation."""
        result = super().snapshot_step_metrics(*args, **kwargs)
        if self._supervisor is not None:
            self._supervisor.begin_step()
        return result

    def get_step_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns NeMo-RL's metrics of the step and ours, whose names begin with `specrollout/`.

        Ours are arrays of one number: NeMo-RL's loop adds arrays up, and prints a line for every plain number.
        """
        metrics: dict[str, Any] = super().get_step_metrics(*args, **kwargs)
        metrics |= {name: np.array(value) for name, value in self.step_metrics().items()}
        self._begin_ahead(in_tail=False)
        return metrics

    def step_metrics(self) -> dict[str, float]:
        if self._supervisor is None:
            return {}
        metrics = self._supervisor.end_step(self._version)
        if self._ahead is not None:
            figures, alarms = self._ahead.figures(self._version)
            metrics |= figures
            STEP_LOG.alarms += alarms
        return metrics

    def _begin_ahead(self, *, in_tail: bool) -> None:
        """Lets engines decode the next step's rows until the next refit, if any engine is free for that.

        With `in_tail` a rollout begins, of which some engines will end their part before others. Without it a rollout has
        ended, so all engines are free, unless the trainer needs their GPUs.
        """
        if self._ahead is None or self.facts.in_flight or self._version + 1 >= self.facts.last_version:
            return
        has_tail = self.dp_size > 1 and self._kind is SeedKind.ROLLOUT
        has_own_gpus = not self.cfg["colocated"]["enabled"]
        is_any_free = has_tail if in_tail else has_own_gpus
        if not is_any_free:
            return
        seeds = RowSeeds(self.facts.seed, self._version + 1)
        prompts, rows = early_rows(next_prompts(), self.facts.samples_per_prompt, seeds, self.opt_out)
        self._ahead.begin(self._version + 1, prompts, rows, self._num_generated)

    def _end_ahead(self, *, keeps_cache: bool = False) -> None:
        if self._ahead is not None:
            self._ahead.end(keeps_cache=keeps_cache)

    @property
    def _version(self) -> int:
        """Training steps behind the engines' weights."""
        return self.first_version + self._num_refits - 1


def prepare_with_seeds(prepare: Callable[..., Any], rows: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    """Prepares NeMo-Gym's rows by NeMo-RL's `prepare`. Each row gets a seed of this process's generation."""
    result = prepare(rows, *args, **kwargs)
    latest = SpecrolloutGeneration.latest
    generation = None if latest is None else latest()
    assert generation is not None
    for row, seed in zip(rows, generation.gym_seeds(rows), strict=True):
        row.update(gym_row_with_seed(row, seed, generation.block.tasks_without_drafts))
    return result


def extended_rollouts() -> dict[str, Any]:
    """Returns the functions of NeMo-RL's module `rollouts` that this process needs extended, by name."""
    return {
        "_prepare_nemo_gym_rows": partial(prepare_with_seeds, rollouts._prepare_nemo_gym_rows),
        "generate_responses": partial(with_tasks, rollouts.generate_responses),
        "run_sample_multi_turn_rollout": partial(with_task, rollouts.run_sample_multi_turn_rollout),
    }


def extend_rollouts() -> None:
    """Replaces the functions of NeMo-RL's module `rollouts` in the process of one of its actors, which lasts as long."""
    for name, extended in extended_rollouts().items():
        setattr(rollouts, name, extended)


@ray.remote
class SpecrolloutTrajectoryCollector(_NativeCollector):
    """Collector of asynchronous GRPO. It tells its generation the policy version."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extend_rollouts()
        self.policy_generation.row_seeds.begin_version(self.current_weight_version)

    def set_weight_version(self, version: int, *args: Any, **kwargs: Any) -> Any:
        """Begins a policy version. NeMo-RL requests rows of that version only after this call."""
        self.policy_generation.row_seeds.begin_version(version)
        return super().set_weight_version(version, *args, **kwargs)


@ray.remote
class SpecrolloutRolloutActor(_NativeActor):
    """Rollout actor of the TransferQueue trainer. It counts the training steps, as the driver does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extend_rollouts()
        self._num_steps = 0

    def rollout_to_tq(self, *args: Any, **kwargs: Any) -> Any:
        """Rolls out a batch. Only validations bring environments of their own, which distinguishes them."""
        generation = self.policy_generation
        is_validation = kwargs.get("task_to_env_override") is not None
        if not is_validation and kwargs.get("first_iter", True):
            self._num_steps += 1
        steps_done = self._num_steps if is_validation else self._num_steps - 1
        generation.row_seeds.begin_version(generation.first_version + steps_done)
        with generation.validation() if is_validation else nullcontext():
            return super().rollout_to_tq(*args, **kwargs)


class SpecrolloutLogger(WatchingLogger, Logger):
    """Replaces NeMo-RL's `Logger`."""
