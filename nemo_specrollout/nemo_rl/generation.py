# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's generation, rollout actors and logger, extended by a seed for every row (sample) and metrics for every step.

Ray copies the generation object into the actors that roll out. Such an actor tells its copy the policy version.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from nemo_specrollout.nemo_rl.early_rows import NextPrompt, early_gym_rows, early_rows
from nemo_specrollout.nemo_rl.gym_prompts import GymPrompts, GymRow, with_gym
from nemo_specrollout.nemo_rl.logger import WatchingLogger
from nemo_specrollout.nemo_rl.next_prompts import PeekingLoader
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
    gym_contents,
    gym_row_with_seed,
)
from nemo_specrollout.nemo_rl.row_tasks import TaskOptOut, with_task, with_tasks
from nemo_specrollout.nemo_rl.run_facts import RunFacts, block_of
from nemo_specrollout.nemo_rl.step_log import STEP_LOG
from nemo_specrollout.nemo_rl.supervisor import Supervisor
from nemo_specrollout.reports.ahead_records import saved_figures
from nemo_specrollout.reports.records import PREFIX
from nemo_specrollout.run_ahead.driver import RunAhead
from nemo_specrollout.run_ahead.early_texts import EarlyRow

_NativeCollector: Any = AsyncTrajectoryCollector.__ray_metadata__.modified_class
_NativeActor: Any = SyncRolloutActor.__ray_metadata__.modified_class
_OF_ONE_PROCESS = ("_supervisor", "_ahead", "_gym_prompts")
"""Attributes that copies of the generation do not have, because only one process may have them."""
_TIMES = ("plain_estimate_s", "rollout_s")
"""Metrics from which it is estimated how much time texts made ahead have saved."""


class SpecrolloutGeneration(VllmGeneration):
    """Replaces NeMo-RL's `VllmGeneration`. Owns the seeds of its rows and, in one process of the run, the `Supervisor`."""

    is_supervised_elsewhere = False
    """Whether another process than the one that builds the generation supervises the engines."""
    latest: "ref[SpecrolloutGeneration] | None" = None
    """Weak reference to the newest `SpecrolloutGeneration` that this process has built or received a copy of."""
    _supervisor: Supervisor | None = None
    _ahead: RunAhead | None = None
    """Lets engines decode requests of coming steps. None without `run_ahead`, and in a copy of the generation."""
    _gym_prompts: GymPrompts | None = None
    """Finds the prompts of NeMo-Gym's rows. None without `run_ahead`, and in a copy. It is used only with NeMo-Gym."""
    _num_generated = 0
    """Number of calls of `generate`."""
    _is_refitting = False
    _has_checked_epoch = False

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
            self._ahead = self._new_ahead()
            if not getattr(self, "_defer_model_load", False):
                self._supervisor.open_exchange()

    def load_and_start(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the models of engines that were started without them, as for NeMo-Gym. Then opens the exchange of requests."""
        result = super().load_and_start(*args, **kwargs)
        if self._supervisor is not None:
            self._supervisor.open_exchange()
        return result

    def supervise(self) -> None:
        """Starts to supervise the engines from this process. `self` is a copy here, and the engines must have their models."""
        self._supervisor = Supervisor(self.block, self.cfg, STEP_LOG)
        self._supervisor.attach(self.worker_group)
        self._supervisor.open_exchange()
        self._ahead = self._new_ahead()

    def _new_ahead(self) -> RunAhead | None:
        config = self.block.run_ahead
        if config is None or not self.block.runs_ahead:
            return None
        engines = EngineClient(self.worker_group)
        self._gym_prompts = GymPrompts(engines)
        ahead = RunAhead(engines, config, begins_again=self.facts.in_flight)
        ahead.keep(self.block.learned, str(self.cfg["model_name"]), resumes=self.first_version > 0)
        return ahead

    def end_supervision(self) -> None:
        supervisor = self._supervisor
        self._supervisor = self._ahead = self._gym_prompts = None
        if supervisor is not None:
            supervisor.close()
            supervisor.close_exchange()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_ONE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        SpecrolloutGeneration.latest = ref(self)

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the engines. The head trainer and remote drafters end before them, and the exchange after them."""
        self._end_ahead()
        if self._supervisor is not None:
            self._supervisor.close()
        is_down = super().shutdown(*args, **kwargs)
        if self._supervisor is not None:
            self._supervisor.close_exchange()
        return is_down

    def generate(self, data: BatchedDataDict[Any], *args: Any, **kwargs: Any) -> Any:
        """Generates as NeMo-RL does, with a seed for each row.

        Engines that finish early then decode requests of coming steps.
        """
        seeded = self._with_seeds(data)
        self._num_generated += 1
        self._work_ahead()
        with nullcontext() if self._supervisor is None else self._supervisor.rollout():
            return super().generate(seeded, *args, **kwargs)

    async def generate_async(
        self, data: BatchedDataDict[Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[Any]], None]:
        """Generates as NeMo-RL does, with a seed for the only row."""
        async for result in super().generate_async(self._with_seeds(data), *args, **kwargs):
            yield result

    def _with_seeds(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Returns a copy of `data` with more columns, such as the seed of each row (sample). They are the fields of `Row`."""
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
        return self.row_seeds.seeds(gym_contents(rows), self._kind)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Wakes sleeping engines. NeMo-RL calls it before a rollout, and also in the middle of a refit."""
        result = super().prepare_for_generation(*args, **kwargs)
        if not self._is_refitting:
            self._plan_ahead()
        return result

    def finish_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Ends all races, and then lets the engines drop their cached prefixes and sleep.

        Engines that do not share their GPUs with the trainer do not sleep. They continue with requests of coming steps.
        """
        sleeps = self._ahead is None or self.cfg["colocated"]["enabled"]
        rest = nullcontext() if self._supervisor is None else self._supervisor.new_weights()
        if sleeps:
            self._end_ahead()
        with rest:
            result = super().finish_generation(*args, **kwargs)
        if not sleeps:
            self._work_ahead()
        return result

    @contextmanager
    def new_weights(self) -> Iterator[None]:
        """Context of a refit. With `run_ahead`, requests start over if the weights change while they run."""
        begins_again = self._ahead is not None and self.facts.in_flight
        self._end_ahead()
        rest = nullcontext() if begins_again or self._supervisor is None else self._supervisor.new_weights()
        self._is_refitting = True
        try:
            with rest, EngineClient(self.worker_group).weights_change():
                yield
        finally:
            self._is_refitting = False

    def weights_updated(self) -> None:
        """Starts the next policy version after a refit. The first refit brings the weights with which the run starts."""
        self._num_refits += 1
        self.row_seeds.begin_version(self._version)
        if self._supervisor is not None:
            self._supervisor.policy_updated(self._version)
        self._plan_ahead()

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Context of a validation.

        Its rows get seeds of another kind than those of rollouts, and its sample stats are dropped.
        """
        self._end_ahead(keeps_cache=True, is_interrupted=True)
        self._kind = SeedKind.VALIDATION
        self._validated = []
        try:
            yield
        finally:
            self._kind = SeedKind.ROLLOUT
        EngineClient(self.worker_group).call(WorkerCalls.specrollout_take_sample_stats, self._validated)

    def snapshot_step_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Starts to collect the metrics of a step. NeMo-RL calls it before the generation of a step."""
        result = super().snapshot_step_metrics(*args, **kwargs)
        if self._supervisor is not None:
            self._supervisor.begin_step()
        return result

    def get_step_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns NeMo-RL's metrics of the step, and those of this package, whose names begin with `specrollout/`.

        The latter are arrays of one number. NeMo-RL's loop prints a line for every plain number, but it only adds up arrays.
        """
        metrics: dict[str, Any] = super().get_step_metrics(*args, **kwargs)
        metrics |= {name: np.array(value) for name, value in self.step_metrics().items()}
        if self._ahead is not None and not self.facts.in_flight:
            if self.facts.filters_by_reward:
                self._plan_after_filter()
            self._work_ahead()
        return metrics

    def step_metrics(self) -> dict[str, float]:
        if self._supervisor is None:
            return {}
        metrics = self._supervisor.end_step(self._version)
        if self._ahead is not None:
            figures, alarms = self._ahead.figures(_token_s(metrics, self.dp_size))
            plain = {name: metrics[PREFIX + name] for name in _TIMES if PREFIX + name in metrics}
            saved = saved_figures(plain, STEP_LOG.entries.get("acceptance", {}))
            metrics |= figures | {PREFIX + name: value for name, value in saved.items()}
            STEP_LOG.alarms += alarms
        if self._ahead is not None and self._gym_prompts is not None:
            self._gym_prompts.observe_brought(self._ahead.num_brought, self._ahead.num_texts)
            STEP_LOG.alarms += self._gym_prompts.take_alarms()
        return metrics

    def _plan_ahead(self) -> None:
        """Tells the engines which requests of coming steps they may decode in empty slots until the next refit."""
        if self._ahead is None or self._num_refits == 0 or self._kind is SeedKind.VALIDATION:
            return
        has_no_rows = self.facts.filters_by_reward or self.facts.in_flight
        known = [] if has_no_rows else self._coming_rows(self._ahead.steps)
        self._ahead.plan(self._planned_step, known)

    def _plan_after_filter(self) -> None:
        """Plans requests of the next step at the end of a step, in a run where rewards decide how many batches a step takes.

        In such a run, the next batch is known to belong to the next step only when the present step has ended. For the batches
        after it, the step is not known even then. So only the next batch is planned.
        """
        loader = PeekingLoader.latest()
        next_version = self._version + 1
        if self._ahead is None or loader is None or next_version >= self.facts.last_version:
            return
        self._ahead.plan(self._version, [self._rows_of(next_version, prompts) for prompts in loader.next_prompts(1)])

    def _work_ahead(self) -> None:
        """Lets engines that have nothing else to do continue with requests of coming steps."""
        if self._ahead is not None and self._kind is SeedKind.ROLLOUT:
            self._ahead.work(self._num_generated)

    def _coming_rows(self, num_steps: int) -> list[list[EarlyRow]]:
        """Returns the known rows (samples) of up to `num_steps` coming steps, and none beyond the end of the run.

        Each batch of the data loader belongs to one step. So the number of batches that the loader has given tells for which
        step its next batch is. The policy version would not tell this, because the weights for a step may arrive before the
        batch of this step.
        """
        loader = PeekingLoader.latest()
        if loader is None:
            return []
        self._check_epoch(len(loader))
        version = self._version
        first = self.first_version + loader.num_taken
        wanted = min(version + num_steps, self.facts.last_version - 1) + 1 - first
        batches = loader.next_prompts(max(wanted, 0))[max(version + 1 - first, 0) :]
        return [self._rows_of(later, prompts) for later, prompts in enumerate(batches, version + 1)]

    def _check_epoch(self, num_batches: int) -> None:
        """Raises an alarm, at most once, if an epoch has too few batches for the number of steps to run ahead."""
        steps = None if self.block.run_ahead is None else self.block.run_ahead.steps
        if isinstance(steps, int) and steps >= num_batches and not self._has_checked_epoch:
            STEP_LOG.alarms.append(
                f"run_ahead.steps is {steps}, but an epoch of the data has {num_batches} batches, and the next epoch is not "
                f"known early: texts are made at most {num_batches - 1} steps ahead"
            )
        self._has_checked_epoch = True

    def _rows_of(self, version: int, prompts: list[NextPrompt]) -> list[EarlyRow]:
        """Returns the rows (samples) that the step of policy version `version` will have for `prompts`."""
        samples = self.facts.samples_per_prompt
        seeds = RowSeeds(self.facts.seed, version)
        gym_rows = [prompt.gym_row for prompt in prompts if prompt.gym_row is not None]
        if not gym_rows:
            return early_rows(prompts, samples, seeds, self.opt_out)
        given = seeds.seeds(gym_contents(row for row in gym_rows for _ in range(samples)))
        return self._early_gym_rows(gym_rows, [given[i : i + samples] for i in range(0, len(given), samples)])

    def _early_gym_rows(self, rows: Sequence[GymRow], seeds: Sequence[Sequence[int]]) -> list[EarlyRow]:
        """Returns the rows of NeMo-Gym whose first prompts are known. `seeds` has the seeds of each row's samples."""
        if self._gym_prompts is None:
            return []
        prompts = self._gym_prompts.prompts(rows)
        return early_gym_rows(rows, prompts, seeds, self.facts.seed, self.block.tasks_without_drafts)

    def _end_ahead(self, *, keeps_cache: bool = False, is_interrupted: bool = False) -> None:
        if self._ahead is not None:
            self._ahead.end(keeps_cache=keeps_cache, is_interrupted=is_interrupted)

    @property
    def _planned_step(self) -> int:
        """Number of the step that is being rolled out, from which coming steps are counted."""
        return self._version

    @property
    def _version(self) -> int:
        """Policy version of the engines' weights."""
        return self.first_version + self._num_refits - 1


def _token_s(metrics: dict[str, float], num_engines: int) -> float | None:
    """Returns the seconds that one engine would take for a token of this step by plain decoding, or None if not known."""
    seconds = metrics.get(f"{PREFIX}plain_estimate_s")
    num_tokens = metrics.get(f"{PREFIX}num_tokens")
    return seconds * num_engines / num_tokens if seconds is not None and num_tokens else None


def prepare_with_seeds(prepare: Callable[..., Any], rows: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    """Returns what NeMo-RL's `prepare` returns for NeMo-Gym's rows, and adds a seed to each of the rows."""
    result = prepare(rows, *args, **kwargs)
    latest = SpecrolloutGeneration.latest
    generation = None if latest is None else latest()
    assert generation is not None
    for row, seed in zip(rows, generation.gym_seeds(rows), strict=True):
        row.update(gym_row_with_seed(row, seed, generation.block.tasks_without_drafts))
    return result


def extended_rollouts() -> dict[str, Any]:
    """Returns this package's extensions of functions in NeMo-RL's module `rollouts`, by name."""
    return {
        "run_async_nemo_gym_rollout": partial(with_gym, rollouts.run_async_nemo_gym_rollout),
        "_prepare_nemo_gym_rows": partial(prepare_with_seeds, rollouts._prepare_nemo_gym_rows),
        "generate_responses": partial(with_tasks, rollouts.generate_responses),
        "run_sample_multi_turn_rollout": partial(with_task, rollouts.run_sample_multi_turn_rollout),
    }


def extend_rollouts() -> None:
    """Replaces functions of NeMo-RL's module `rollouts` in the process of one of its actors, until that process ends."""
    for name, extended in extended_rollouts().items():
        setattr(rollouts, name, extended)


@ray.remote
class SpecrolloutTrajectoryCollector(_NativeCollector):
    """Trajectory collector of asynchronous GRPO.

    It has a copy of the generation object, and tells this copy each new policy version, because seeds depend on the version.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extend_rollouts()
        self.policy_generation.row_seeds.begin_version(self.current_weight_version)

    def set_weight_version(self, version: int, *args: Any, **kwargs: Any) -> Any:
        """Starts a policy version. NeMo-RL requests rows of this version only after this call."""
        self.policy_generation.row_seeds.begin_version(version)
        return super().set_weight_version(version, *args, **kwargs)


@ray.remote
class SpecrolloutRolloutActor(_NativeActor):
    """Rollout actor of the TransferQueue trainer. It counts training steps itself, to know the policy version of its rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extend_rollouts()
        self._num_steps = 0

    def rollout_to_tq(self, *args: Any, **kwargs: Any) -> Any:
        """Rolls out a batch.

        If the call brings environments of its own, it is for a validation, because no other call does.
        """
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
