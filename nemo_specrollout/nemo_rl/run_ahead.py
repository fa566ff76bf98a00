# SPDX-License-Identifier: Apache-2.0
"""`run_ahead` in NeMo-RL: the next prompts, early, and the thread that lets idle engines decode them.

The engines have the weights of the step before. A request's seed is known before its weights are, so their texts are drafts
for the same requests under the same noise. Nothing else ever sees these texts.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar
from weakref import ref

import ray
from torchdata.stateful_dataloader import StatefulDataLoader

from nemo_specrollout.generation.requests import TOKEN_BYTES
from nemo_specrollout.nemo_rl.ray_calls import WorkerClient
from nemo_specrollout.nemo_rl.row_seeds import Row
from nemo_specrollout.reports.records import PREFIX

SLICE_S = 0.1
"""Seconds for which a synchronous engine decodes ahead before it looks at its other calls."""
_END = object()


class PeekingLoader(StatefulDataLoader):
    """NeMo-RL's data loader, which can show its next batch early. Its state is as if it had not."""

    _latest: ClassVar["ref[PeekingLoader] | None"] = None
    _next: Any = None
    _state_before: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._stream = super().__iter__()
        self._next = self._state_before = None
        while (batch := self._take()) is not _END:
            PeekingLoader._latest = ref(self)
            yield batch

    def _take(self) -> Any:
        batch, self._next, self._state_before = self._next, None, None
        return next(self._stream, _END) if batch is None else batch

    def peek(self) -> Any:
        """Returns the batch that comes next; None at the end of an epoch."""
        if self._next is None:
            self._state_before = super().state_dict()
            self._next = next(self._stream, _END)
        return None if self._next is _END else self._next

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._state_before is None else self._state_before


def next_prompts() -> list[list[int]]:
    """Returns the tokens of the prompts of the next step, in order; empty if they are not known."""
    loader = None if PeekingLoader._latest is None else PeekingLoader._latest()
    batch = None if loader is None else loader.peek()
    logs = [] if batch is None else batch["message_log"]
    return [[token for message in log for token in message["token_ids"].tolist()] for log in logs]


class RunAhead:
    """Lets the engines decode rows while they have nothing else to do. Owns the thread that asks them, and the texts.

    States: idle, running. `begin` starts an idle one; `end` stops the engines within a slice and keeps the texts.
    """

    def __init__(self, worker_group: Any) -> None:
        """`worker_group` is NeMo-RL's group of the engines' actors."""
        self._workers = WorkerClient(worker_group)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._shards: list[list[Row]] = []
        self._texts: dict[int, bytes] = {}
        self._seconds = 0.0

    @contextmanager
    def weights_change(self) -> Iterator[None]:
        """Encloses a change of weights while asynchronous engines decode. Rows under way begin again, so none is mixed."""
        self._tell_change()
        try:
            yield
        finally:
            self._tell_change()

    def _tell_change(self) -> None:
        ray.get([self._workers.start(engine, "weights_change") for engine in range(self._workers.num_engines)])

    def begin(self, prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
        """Lets the engines decode these rows, each of which has a prompt."""
        self._texts, num_engines = {}, self._workers.num_engines
        ranges = [slice(*ab) for ab in pairwise(len(rows) * i // num_engines for i in range(num_engines + 1))]
        self._shards = [list(rows[of]) for of in ranges]
        self._stop.clear()
        work = [(prompts[of], rows[of]) for of in ranges]
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stops the engines, which forget all but the texts. Does nothing if they are not at work."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        thread.join()
        replies = [self._workers.start(engine, "end_ahead") for engine, rows in enumerate(self._shards) if rows]
        for rows, texts in zip(filter(None, self._shards), ray.get(replies), strict=True):
            self._texts |= {row.seed: text for row, text in zip(rows, texts, strict=True) if text}

    def text_of(self, seed: int) -> bytes:
        """Returns the text that was made for the row with this seed, as int32 numbers."""
        return self._texts.get(seed, b"")

    def figures(self) -> dict[str, float]:
        """Returns the metrics of the texts that the step had as drafts."""
        tokens = sum(map(len, self._texts.values())) // TOKEN_BYTES
        return {f"{PREFIX}ahead_tokens": float(tokens), f"{PREFIX}ahead_s": self._seconds}

    def _run(self, work: Sequence[tuple[Sequence[Any], Sequence[Row]]]) -> None:
        started = time.perf_counter()
        calls = {self._advance(engine, *shard): engine for engine, shard in enumerate(work) if shard[1]}
        while calls and not self._stop.is_set():
            for call in ray.wait(list(calls), timeout=SLICE_S)[0]:
                engine = calls.pop(call)
                try:
                    is_busy = ray.get(call)
                except ray.exceptions.RayActorError:
                    continue  # the engine's next call fails, too, and NeMo-RL says so
                if is_busy:
                    calls[self._advance(engine)] = engine
        self._seconds = time.perf_counter() - started

    def _advance(self, engine: int, prompts: Sequence[Any] = (), rows: Sequence[Row] = ()) -> Any:
        return self._workers.start(engine, "run_ahead", prompts=list(prompts), rows=list(rows), seconds=SLICE_S)
