# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's vLLM generation, on the driver and in the collector: every row gets its seed, every step its figures."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm import VllmGeneration

from nemo_specrollout.config.addresses import secret_of_run
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.strict import build
from nemo_specrollout.generation.totals import EngineTotals
from nemo_specrollout.generation.worker_blocks import worker_blocks
from nemo_specrollout.nemo_rl.draft_supply import SupplyWindow, logged
from nemo_specrollout.nemo_rl.head_refresh import HeadRefresh
from nemo_specrollout.nemo_rl.identities import RowIdentities, Stream
from nemo_specrollout.nemo_rl.metrics import (
    PREFIX,
    acceptance_counts,
    head_figures,
    sample_lines,
    step_facts,
    step_metrics,
    weight_updates,
)
from nemo_specrollout.nemo_rl.remote_drafters import RemoteDrafters
from nemo_specrollout.nemo_rl.step_notes import StepNotes
from nemo_specrollout.training.head_folder import HeadFolder

SEEDS_KEY = "specrollout_seeds"


@dataclass(frozen=True)
class RunFacts:
    """What NeMo-RL does not tell a generation: `grpo.seed`, the training steps behind the weights at start and at the end, and
    the folder of the run's draft heads."""

    seed: int
    first_version: int = 0
    last_version: int = 0
    heads: str = ""


class SpecrolloutGeneration(VllmGeneration):
    """Stands where NeMo-RL builds its `VllmGeneration`. Owns the identities of the rows that pass through it, and the driver's
    part of the online refresh and of remote drafters.

    In asynchronous GRPO the trajectory collector has a copy, whose version it sets itself (`collector.py`).
    """

    facts: RunFacts  # set by `install` before NeMo-RL builds one, as `notes`
    notes: StepNotes
    _refresh: HeadRefresh | None = None
    _drafters: RemoteDrafters | None = None
    _supply: SupplyWindow | None = None
    _tail: Any = None
    _asked: dict[Stream, list[int]] | None = None

    def __init__(self, cluster: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        self.identities = RowIdentities(self.facts.seed, self.facts.first_version)
        self._stream = Stream.ROLLOUT
        self._asked: dict[Stream, list[int]] = {stream: [] for stream in Stream}
        self._num_refits = 0
        self._totals_before: list[EngineTotals] | None = None
        self._totals_after: list[EngineTotals] | None = None  # of the step before
        self._facts_at = time.perf_counter()
        block = build(SpecrolloutConfig, config["specrollout"], BLOCK_PATH)
        self._supply = None if block.remote is None else SupplyWindow()
        self._drafters = _start_drafters(block, config, self.notes)  # they start while the engines do
        super().__init__(cluster, config, *args, **kwargs)
        self._refresh = self._start_refresh(block)
        if not getattr(self, "_defer_model_load", False):
            self._tail = self._start_tail(block)

    def load_and_start(self) -> None:
        """NeMo-RL's: engines that were deferred, as for NeMo-Gym, load their models. They can share requests only then."""
        super().load_and_start()
        self._tail = self._start_tail(build(SpecrolloutConfig, self.cfg["specrollout"], BLOCK_PATH))

    def __getstate__(self) -> dict[str, Any]:
        """For Ray, which copies the generation to the trajectory collector: heads, drafters and samples are the driver's to
        see to."""
        of_driver = {"_refresh", "_drafters", "_supply", "_asked", "_tail"}
        return {name: value for name, value in self.__dict__.items() if name not in of_driver}

    def shutdown(self) -> bool:
        """NeMo-RL's; the head's trainer and the drafters end too."""
        for ours in (self._refresh, self._drafters):
            if ours is not None:
                ours.close()
        is_down = bool(super().shutdown())
        tail, self._tail = self._tail, None
        if tail is not None:  # after the engines, which would miss it
            tail.close()
        return is_down

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """NeMo-RL's, with a seed for each row."""
        with nullcontext() if self._tail is None else self._tail.rollout():
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
        """A refit is done within. A synchronous engine has nothing to do outside of a rollout."""
        is_async = self._tail is not None and self.cfg["vllm_cfg"]["async_engine"]
        return self._tail.new_weights() if is_async else nullcontext()

    def weights_updated(self) -> None:
        """A refit is done. The first brings the weights that the run starts from."""
        self._num_refits += 1
        self.identities.begin_version(self._version)
        self._call_all_engines("specrollout_policy_is", [self._version])
        if self._refresh is not None:
            self._refresh.policy_updated(self._version)
        if self._drafters is not None:
            self._drafters.look(self._call_all_engines)

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
        if self._supply is not None:
            self._supply.begin(self._call_all_engines)

    def get_step_metrics(self) -> dict[str, Any]:
        """NeMo-RL's figures of the step, and ours under `specrollout/`.

        Ours are arrays of one number: NeMo-RL's loop adds those up, and prints a line for every plain one.
        """
        metrics: dict[str, Any] = super().get_step_metrics()
        before, self._totals_before = self._totals_before, None
        if before is not None:
            after = self._engine_totals()
            if counts := acceptance_counts(before, after):
                self.notes.words["acceptance"] = counts
            figures = {**step_metrics(before, after), **self._heads_after_step(before, after), **self._supply_of_step()}
            figures |= weight_updates(self._totals_after, after) | self._tail_of_step()
            self._totals_after = after
            metrics |= {k: np.array(v) for k, v in figures.items()}
        return metrics

    @property
    def _version(self) -> int:
        """Training steps behind the engines' weights."""
        return self.facts.first_version + self._num_refits - 1

    def _heads_after_step(self, before: list[EngineTotals], after: list[EngineTotals]) -> dict[str, float]:
        """Notes samples and alarms, tells the trainer of the step; figures of the heads."""
        assert self._asked is not None
        asked, self._asked = self._asked, {stream: [] for stream in Stream}
        seeds = asked[Stream.ROLLOUT] or None  # in asynchronous GRPO they were given elsewhere
        ends = self._call_all_engines("specrollout_end_step", [seeds])
        self.notes.samples += sample_lines(ends, seeds, without=asked[Stream.VALIDATION])
        self.notes.alarms += [alarm["sentence"] for end in ends for alarm in end["alarms"]]
        figures = head_figures(ends)
        if self._refresh is not None:
            now = time.perf_counter()
            to_come = max(0, self.facts.last_version - self._version - 1)
            facts = step_facts(before, after, now - self._facts_at, to_come)
            self._facts_at = self._facts_at if facts is None else now
            refreshed = self._refresh.after_step(self._version, facts)
            figures |= {PREFIX + name: value for name, value in refreshed.items()}
        return figures

    def _supply_of_step(self) -> dict[str, float]:
        """Notes how well remote drafters kept up, looks after them; figures of both."""
        figures: dict[str, float] = {}
        if self._supply is not None:
            self.notes.words["draft_supply"] = supply = self._supply.end(self._call_all_engines)
            figures |= logged(supply)
        if self._drafters is not None:
            self._drafters.look(self._call_all_engines)
            figures |= {PREFIX + name: value for name, value in self._drafters.figures().items()}
        return figures

    def _tail_of_step(self) -> dict[str, float]:
        return {} if self._tail is None else {f"{PREFIX}tail/{name}": x for name, x in self._tail.figures().items()}

    def _start_tail(self, block: SpecrolloutConfig) -> Any:
        """Where there are engines to share requests, and they may; each is told which it is."""
        num_engines = self.worker_group.dp_size
        if block.fastest_of_n is None or not block.fastest_of_n.enabled or num_engines < 2:
            return None
        from nemo_specrollout.nemo_rl.tail_driver import TailDriver

        tail = TailDriver(block, num_engines, self.cfg["max_new_tokens"], self.notes)
        leaders = map(self.worker_group.get_dp_leader_worker_idx, range(num_engines))
        call = self.worker_group.run_single_worker_single_data
        ray.get([call("specrollout_meet", leader, actor=tail.actor, engine=e) for e, leader in enumerate(leaders)])
        return tail

    def _start_refresh(self, block: SpecrolloutConfig) -> HeadRefresh | None:
        if block.draft_refresh is None:
            return None
        from nemo_specrollout.nemo_rl.head_trainer import TrainerLink, TrainerOrder

        config = self.cfg
        order = TrainerOrder(config["specrollout"], config["model_name"], self.facts.heads, config["temperature"])
        call = partial(_call_engines, self.worker_group)  # not a method: a cycle would keep the engines alive
        folder = HeadFolder(Path(self.facts.heads))
        blocks = worker_blocks(block, self.worker_group.dp_size)
        has_head = [of_engine.head is not None for of_engine in blocks]
        return HeadRefresh(block, folder, partial(TrainerLink, order), call, has_head, self.notes)

    def _call_all_engines(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        return _call_engines(self.worker_group, method, [arguments] * self.worker_group.dp_size)

    def _engine_totals(self) -> list[EngineTotals]:
        futures = self.worker_group.run_all_workers_single_data(
            "specrollout_totals", run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"]
        )
        return [EngineTotals.from_wire(reply) for reply in ray.get(futures)]

    def _with_seeds(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        lengths = data["input_lengths"].tolist()
        rows = (row[:length].tolist() for row, length in zip(data["input_ids"], lengths, strict=True))
        seeded: BatchedDataDict[Any] = BatchedDataDict(data)
        seeds = self.identities.seeds(rows, self._stream)
        if self._asked is not None:
            self._asked[self._stream] += seeds
        seeded[SEEDS_KEY] = torch.tensor(seeds, dtype=torch.int64)
        return seeded


def _start_drafters(block: SpecrolloutConfig, config: Any, notes: StepNotes) -> RemoteDrafters | None:
    """Of `workers` alone: a run does not look after drafters at `addresses`."""
    if block.remote is None or not block.remote.workers:
        return None
    from nemo_specrollout.nemo_rl.drafter_actors import start_links

    secret = secret_of_run()
    start = partial(start_links, block.remote, config["vllm_cfg"], secret)
    return RemoteDrafters(start, secret, notes, starts_later=bool(block.remote.gpus))


def _call_engines(worker_group: Any, method: str, arguments: Sequence[Sequence[Any] | None]) -> list[Any]:
    """Calls `method` of the workers of as many engines as there are lists of arguments, None is left out; what each of them
    returned."""
    call, leader = worker_group.run_single_worker_single_data, worker_group.get_dp_leader_worker_idx
    asked = [(leader(engine), list(args)) for engine, args in enumerate(arguments) if args is not None]
    return ray.get([call("specrollout_call", worker, method=method, arguments=args) for worker, args in asked])
