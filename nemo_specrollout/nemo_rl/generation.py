# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's vLLM generation, extended: every row gets a seed, and every step gets metrics."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakMethod, ref

import numpy as np
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm import VllmGeneration

from nemo_specrollout.nemo_rl.ray_calls import worker_client
from nemo_specrollout.nemo_rl.row_seeds import (
    ROOTS_KEY,
    SEEDS_KEY,
    Conversations,
    RowSeeds,
    Stream,
    current_sample,
    preparing_with_seeds,
)
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.nemo_rl.supervisor import RunFacts, Supervisor


class SpecrolloutGeneration(VllmGeneration):
    """Replaces NeMo-RL's `VllmGeneration`. Owns the seeds of its rows and, in one process of the run, the supervisor.

    Ray copies the generation to other processes. In asynchronous GRPO the trajectory collector has a copy, which gets its
    policy version from the collector (`rollout_actors.py`).
    """

    facts: RunFacts
    """Set by `install` before NeMo-RL builds a generation."""

    step_log: StepLog
    """Set by `install` before NeMo-RL builds a generation."""

    is_supervised_elsewhere = False
    """Whether another process than the one that builds the generation supervises the engines."""

    latest: "ref[SpecrolloutGeneration] | None" = None
    """Generation of this process, or its copy."""

    _supervisor: Supervisor | None = None

    def __init__(self, cluster: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        SpecrolloutGeneration.latest = ref(self)
        self.facts = type(self).facts  # an attribute of the object goes with copies to other processes
        self.row_seeds = RowSeeds(self.facts.seed, self.facts.first_version)
        self._conversations = Conversations()
        self._stream = Stream.ROLLOUT
        self._validated: list[int] = []
        self._num_refits = 0
        if not self.is_supervised_elsewhere:
            self._supervisor = Supervisor(config, self.facts, self.step_log)
            self.step_log.source = WeakMethod(self.step_metrics)
        super().__init__(cluster, config, *args, **kwargs)
        if self._supervisor is not None:
            self._supervisor.attach(self.worker_group)
            if not getattr(self, "_defer_model_load", False):
                self._supervisor.open_exchange()

    def load_and_start(self) -> None:
        """Loads the models of deferred engines (NeMo-Gym's). Only then can they exchange requests."""
        super().load_and_start()
        if self._supervisor is not None:
            self._supervisor.open_exchange()

    def supervise(self, log: StepLog) -> None:
        """Supervises the engines from this process, which has a copy of the generation. Their models must be loaded."""
        self._supervisor = Supervisor(self.cfg, self.facts, log)
        self._supervisor.attach(self.worker_group)
        self._supervisor.open_exchange()

    def end_supervision(self) -> None:
        """Ends the supervision by this process."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close()
            supervisor.close_exchange()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy in another process, without the supervisor."""
        return {name: value for name, value in self.__dict__.items() if name != "_supervisor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        SpecrolloutGeneration.latest = ref(self)

    def shutdown(self) -> bool:
        """Ends the engines. Heads' trainer and drafters end before them, and the exchange after them."""
        if self._supervisor is not None:
            self._supervisor.close()
        is_down = bool(super().shutdown())
        if self._supervisor is not None:
            self._supervisor.close_exchange()
        return is_down

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Generates as NeMo-RL does, with a seed for each row."""
        with nullcontext() if self._supervisor is None else self._supervisor.rollout():
            return super().generate(self._with_seeds(data), greedy)

    async def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[Any]], None]:
        """Generates as NeMo-RL does, with a seed for the only row."""
        async for result in super().generate_async(self._with_seeds(data), greedy):
            yield result

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Lets the engines drop cached prefixes and sleep. All races end before that."""
        with self.new_weights():
            return bool(super().finish_generation(*args, **kwargs))

    def new_weights(self) -> AbstractContextManager[None]:
        """Encloses a refit."""
        return nullcontext() if self._supervisor is None else self._supervisor.new_weights()

    def weights_updated(self) -> None:
        """Begins the next policy version after a refit. The first refit brings the weights that the run starts from."""
        self._num_refits += 1
        self.row_seeds.begin_version(self._version)
        if self._supervisor is not None:
            self._supervisor.policy_updated(self._version)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Encloses a validation: its rows have a stream of seeds of their own, and the engines drop their sample stats."""
        self._stream, self._validated = Stream.VALIDATION, []
        try:
            yield
        finally:
            self._stream = Stream.ROLLOUT
        worker_client(self.worker_group).take_sample_stats(self._validated)

    def snapshot_step_metrics(self) -> None:
        """Begins the window of a step's metrics. NeMo-RL calls it before a step's generation."""
        super().snapshot_step_metrics()
        if self._supervisor is not None:
            self._supervisor.begin_step()

    def get_step_metrics(self) -> dict[str, Any]:
        """Returns NeMo-RL's metrics of the step and ours, whose names begin with `specrollout/`.

        Ours are arrays of one number: NeMo-RL's loop adds arrays up, and prints a line for every plain number.
        """
        metrics: dict[str, Any] = super().get_step_metrics()
        return metrics | {name: np.array(value) for name, value in self.step_metrics().items()}

    def step_metrics(self) -> dict[str, float]:
        """Returns our metrics since `snapshot_step_metrics`, by name."""
        return {} if self._supervisor is None else self._supervisor.end_step(self._version)

    @property
    def _version(self) -> int:
        """Training steps behind the engines' weights."""
        return self.facts.first_version + self._num_refits - 1

    def seeds_of(self, contents: list[Sequence[int]]) -> list[int]:
        """Returns seeds for rows that are requested over HTTP. `contents` are the bytes of each row's question."""
        return self.row_seeds.seeds(contents, self._stream)

    def _with_seeds(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Returns `data` with the seed of each row and the length of its conversation's first prompt."""
        lengths = data["input_lengths"].tolist()
        rows = [row[:length].tolist() for row, length in zip(data["input_ids"], lengths, strict=True)]
        seeds, sample = self.row_seeds.seeds(rows, self._stream), current_sample.get()
        if self._stream is Stream.VALIDATION:
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
        return seeded


def seed_gym_rows(prepare: Callable[..., None]) -> Callable[..., None]:
    """Wraps NeMo-RL's function that prepares NeMo-Gym's rows: each row gets a seed of this process's generation."""

    def seeds_of(contents: list[Sequence[int]]) -> list[int]:
        latest = SpecrolloutGeneration.latest
        generation = None if latest is None else latest()
        assert generation is not None
        return generation.seeds_of(contents)

    return preparing_with_seeds(prepare, seeds_of)
