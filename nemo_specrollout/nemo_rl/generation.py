# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's vLLM generation, on the driver and in the collector: every row gets its seed, every step its figures."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakMethod, ref

import numpy as np
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm import VllmGeneration

from nemo_specrollout.nemo_rl.conversations import Conversations
from nemo_specrollout.nemo_rl.gym_rows import seeding
from nemo_specrollout.nemo_rl.identities import RowIdentities, Stream, current_sample
from nemo_specrollout.nemo_rl.run_facts import RunFacts
from nemo_specrollout.nemo_rl.step_log import StepNotes
from nemo_specrollout.nemo_rl.supervisor import Supervisor, call_all_engines

SEEDS_KEY, ROOTS_KEY = "specrollout_seeds", "specrollout_prompt_lengths"


class SpecrolloutGeneration(VllmGeneration):
    """Stands where NeMo-RL builds its `VllmGeneration`. Owns the identities of the rows that pass through it, and on the
    driver the supervisor of the engines.

    In asynchronous GRPO the trajectory collector has a copy, whose version it sets itself (`collector.py`).
    """

    facts: RunFacts  # set by `install` before NeMo-RL builds one, as `notes`
    notes: StepNotes
    is_supervised_elsewhere = False
    latest: "ref[SpecrolloutGeneration] | None" = None
    """The generation of this process, or its copy."""
    _supervisor: Supervisor | None = None

    def __init__(self, cluster: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        SpecrolloutGeneration.latest = ref(self)
        self.facts = type(self).facts  # for copies in other processes
        self.identities = RowIdentities(self.facts.seed, self.facts.first_version)
        self._conversations = Conversations()
        self._stream = Stream.ROLLOUT
        self._validated: list[int] = []
        self._num_refits = 0
        if not self.is_supervised_elsewhere:
            self._supervisor = Supervisor(config, self.facts, self.notes)
            self.notes.source = WeakMethod(self.step_figures)
        super().__init__(cluster, config, *args, **kwargs)
        if self._supervisor is not None:
            self._supervisor.attach(self.worker_group)
            if not getattr(self, "_defer_model_load", False):
                self._supervisor.meet()

    def load_and_start(self) -> None:
        """NeMo-RL's: engines that were deferred, as for NeMo-Gym, load their models. They can share requests only then."""
        super().load_and_start()
        if self._supervisor is not None:
            self._supervisor.meet()

    def supervise(self, notes: StepNotes) -> None:
        """Looks after the engines from this process, which has a copy of the generation. Their models must be loaded."""
        self._supervisor = Supervisor(self.cfg, self.facts, notes)
        self._supervisor.attach(self.worker_group)
        self._supervisor.meet()

    def end_supervision(self) -> None:
        """Stops looking after heads, drafters and samples in this process."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close()
            supervisor.close_exchange()

    def __getstate__(self) -> dict[str, Any]:
        """For Ray, which copies the generation to other processes: one supervises."""
        return {name: value for name, value in self.__dict__.items() if name != "_supervisor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process."""
        self.__dict__.update(state)
        SpecrolloutGeneration.latest = ref(self)

    def shutdown(self) -> bool:
        """NeMo-RL's; the head's trainer and the drafters end too."""
        if self._supervisor is not None:
            self._supervisor.close()
        is_down = bool(super().shutdown())
        if self._supervisor is not None:
            self._supervisor.close_exchange()
        return is_down

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """NeMo-RL's, with a seed for each row."""
        with nullcontext() if self._supervisor is None else self._supervisor.rollout():
            return super().generate(self._with_seeds(data), greedy)

    async def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[Any]], None]:
        """NeMo-RL's, with a seed for the one row."""
        async for result in super().generate_async(self._with_seeds(data), greedy):
            yield result

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """NeMo-RL's: engines forget cached prefixes, and sleep; requests beaten in a race must be gone by then."""
        with self.new_weights():
            return bool(super().finish_generation(*args, **kwargs))

    def new_weights(self) -> AbstractContextManager[None]:
        """A refit is done within."""
        return nullcontext() if self._supervisor is None else self._supervisor.new_weights()

    def weights_updated(self) -> None:
        """A refit is done. The first brings the weights that the run starts from."""
        self._num_refits += 1
        self.identities.begin_version(self._version)
        if self._supervisor is not None:
            self._supervisor.policy_is(self._version)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Rows asked for within have the seeds of a validation; the engines keep nothing of them for `samples.jsonl`."""
        self._stream, self._validated = Stream.VALIDATION, []
        try:
            yield
        finally:
            self._stream = Stream.ROLLOUT
        call_all_engines(self.worker_group, "specrollout_take_sample_stats", [self._validated])

    def snapshot_step_metrics(self) -> None:
        """NeMo-RL's hook before a step's generation."""
        super().snapshot_step_metrics()
        if self._supervisor is not None:
            self._supervisor.begin_step()

    def get_step_metrics(self) -> dict[str, Any]:
        """NeMo-RL's figures of the step, and ours under `specrollout/`.

        Ours are arrays of one number: NeMo-RL's loop adds those up, and prints a line for every plain one.
        """
        metrics: dict[str, Any] = super().get_step_metrics()
        return metrics | {name: np.array(value) for name, value in self.step_figures().items()}

    def step_figures(self) -> dict[str, float]:
        """Returns our figures since `snapshot_step_metrics`, by name."""
        return {} if self._supervisor is None else self._supervisor.end_step(self._version)

    @property
    def _version(self) -> int:
        """Training steps behind the engines' weights."""
        return self.facts.first_version + self._num_refits - 1

    def seeds_of(self, contents: list[Sequence[int]]) -> list[int]:
        """Returns seeds for rows that are asked for over HTTP. `contents` are bytes of what each row asks."""
        return self.identities.seeds(contents, self._stream)

    def _with_seeds(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        lengths = data["input_lengths"].tolist()
        rows = [row[:length].tolist() for row, length in zip(data["input_ids"], lengths, strict=True)]
        seeded: BatchedDataDict[Any] = BatchedDataDict(data)
        seeds, sample = self.identities.seeds(rows, self._stream), current_sample.get()
        if self._stream is Stream.VALIDATION:
            self._validated += seeds
        elif self._supervisor is not None and sample is None:
            self._supervisor.note_asked(seeds)
        if sample is not None and sample.prompt_length is not None:
            roots = [sample.prompt_length] * len(rows)
        else:
            roots = self._conversations.root_lengths(rows)
        seeded[SEEDS_KEY] = torch.tensor(seeds, dtype=torch.int64)
        seeded[ROOTS_KEY] = torch.tensor(roots, dtype=torch.int64)
        return seeded


def seed_gym_rows(prepare: Callable[..., None]) -> Callable[..., None]:
    """Returns NeMo-RL's function that prepares rows for NeMo-Gym; each then has a seed of this process's generation."""

    def seeds_of(contents: list[Sequence[int]]) -> list[int]:
        latest = SpecrolloutGeneration.latest
        generation = None if latest is None else latest()
        assert generation is not None
        return generation.seeds_of(contents)

    return seeding(prepare, seeds_of)
