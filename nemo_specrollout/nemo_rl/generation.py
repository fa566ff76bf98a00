# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's vLLM generation, on the driver and in the collector: every row gets its seed, every step its figures."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm import VllmGeneration

from nemo_specrollout.generation.totals import EngineTotals
from nemo_specrollout.nemo_rl.identities import RowIdentities, Stream
from nemo_specrollout.nemo_rl.metrics import step_metrics

SEEDS_KEY = "specrollout_seeds"


@dataclass(frozen=True)
class RunFacts:
    """What NeMo-RL does not tell a generation: `grpo.seed`, and the training steps behind the weights at start."""

    seed: int
    first_version: int = 0


class SpecrolloutGeneration(VllmGeneration):
    """Stands where NeMo-RL builds its `VllmGeneration`. Owns the identities of the rows that pass through it.

    In asynchronous GRPO the trajectory collector has a copy, whose version it sets itself (`collector.py`).
    """

    facts: RunFacts  # set by `install` before NeMo-RL builds one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.identities = RowIdentities(self.facts.seed, self.facts.first_version)
        self._stream = Stream.ROLLOUT
        self._num_refits = 0
        self._totals_before: list[EngineTotals] | None = None
        super().__init__(*args, **kwargs)

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """NeMo-RL's, with a seed for each row."""
        return super().generate(self._with_seeds(data), greedy)

    async def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[Any]], None]:
        """NeMo-RL's, with a seed for the one row."""
        async for result in super().generate_async(self._with_seeds(data), greedy):
            yield result

    def weights_updated(self) -> None:
        """A refit is done. The first brings the weights that the run starts from."""
        self.identities.begin_version(self.facts.first_version + self._num_refits)
        self._num_refits += 1

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Rows asked for within belong to `stream`."""
        self._stream, before = stream, self._stream
        try:
            yield
        finally:
            self._stream = before

    def snapshot_step_metrics(self) -> None:
        """NeMo-RL's hook before a step's generation."""
        super().snapshot_step_metrics()
        self._totals_before = self._engine_totals()

    def get_step_metrics(self) -> dict[str, Any]:
        """NeMo-RL's figures of the step, and ours under `specrollout/`.

        Ours are arrays of one number: NeMo-RL's loop adds those up, and prints a line for every plain one.
        """
        metrics: dict[str, Any] = super().get_step_metrics()
        before, self._totals_before = self._totals_before, None
        if before is not None:
            metrics |= {k: np.array(v) for k, v in step_metrics(before, self._engine_totals()).items()}
        return metrics

    def _engine_totals(self) -> list[EngineTotals]:
        futures = self.worker_group.run_all_workers_single_data(
            "specrollout_totals", run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"]
        )
        return [EngineTotals.from_wire(reply) for reply in ray.get(futures)]

    def _with_seeds(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        lengths = data["input_lengths"].tolist()
        rows = (row[:length].tolist() for row, length in zip(data["input_ids"], lengths, strict=True))
        seeded: BatchedDataDict[Any] = BatchedDataDict(data)
        seeded[SEEDS_KEY] = torch.tensor(self.identities.seeds(rows, self._stream), dtype=torch.int64)
        return seeded
