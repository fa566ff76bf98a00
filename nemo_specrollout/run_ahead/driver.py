# SPDX-License-Identifier: Apache-2.0
"""The driver's part of `run_ahead`: the thread that lets idle engines decode the rows of the next step.

The engines have the weights of the step before. A request's seed is known before its weights are, so their texts are drafts
for the same requests under the same noise. Nothing else ever sees these texts.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import ray

from nemo_specrollout.generation.engine.requests import TOKEN_BYTES
from nemo_specrollout.reports.records import PREFIX, ahead_alarms, ahead_figures

SLICE_S = 0.1
"""Seconds for which a synchronous engine decodes ahead before it looks at its other calls."""


class Engines(Protocol):
    """The engines of a run, as the driver reaches them. NeMo-RL's are a `WorkerClient` (`nemo_rl/ray_calls.py`)."""

    num_engines: int

    def start(self, engine: int, method: str, /, **arguments: Any) -> Any:
        """Begins to call a method of an engine's actor. Returns Ray's reference to the reply."""


class Row(Protocol):
    """A row of the next step. Its other fields matter only to the engines, to which it is sent as it is."""

    @property
    def seed(self) -> int: ...


@dataclass
class _Made:
    """Texts for the rows of a policy version."""

    version: int
    texts: dict[int, bytes] = field(default_factory=dict)
    """Text of each seed, as int32 numbers."""
    seconds: float = 0.0


class RunAhead:
    """Lets the engines decode rows while they have nothing else to do. Owns the thread that asks them, and the texts.

    States: idle, running. `begin` starts an idle one; `end` stops the engines within a slice and keeps the texts. A run that
    begins again for the same policy version goes on where its texts end.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._shards: list[Sequence[Row]] = []
        self._made = self._made_before = _Made(-1)

    @contextmanager
    def weights_change(self) -> Iterator[None]:
        """Encloses a change of weights while asynchronous engines decode.

        Rows that overlap with the change begin again, so that none is mixed. An engine whose rows wait for the end of a
        change must be told of it, also when another engine or the change itself has failed.
        """
        try:
            self._ask("weights_change_begins")
            yield
        finally:
            self._ask("weights_change_ends")

    def begin(self, version: int, prompts: Sequence[Sequence[int]], rows: Sequence[Row], after: int) -> None:
        """Lets engines decode the rows of a coming policy version. A synchronous one first ends `after` calls of generate.

        `prompts` has the token ids of each row's prompt.
        """
        self.end(keeps_cache=True)
        if version != self._made.version:
            self._made_before = self._made
            self._made = _Made(version)
        num_engines = self._engines.num_engines
        ranges = [slice(*ab) for ab in pairwise(len(rows) * i // num_engines for i in range(num_engines + 1))]
        self._shards = [rows[of] for of in ranges]
        self._stop.clear()
        work = [(prompts[of], rows[of]) for of in ranges]
        self._thread = threading.Thread(target=self._run, args=(work, after), daemon=True)
        self._thread.start()

    def end(self, *, keeps_cache: bool = False) -> None:
        """Stops the engines, which forget all else, and gives each of them all texts. Does nothing if they are not at work.

        With `keeps_cache` they keep cached prefixes, which are right until the weights change.
        """
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        self._stop.set()
        thread.join()
        at_work = [engine for engine, rows in enumerate(self._shards) if rows]
        replies = [self._engines.start(engine, "end_ahead", keeps_cache=keeps_cache) for engine in at_work]
        for rows, texts in zip(filter(None, self._shards), ray.get(replies), strict=True):
            made, pairs = self._made.texts, zip(rows, texts, strict=bool(texts))  # no texts: the engine was never free
            made |= {row.seed: max(text, made.get(row.seed, b""), key=len) for row, text in pairs if text}
        self._ask("texts_ahead", texts=ray.put(self._made.texts))

    def figures(self, version: int) -> tuple[dict[str, float], list[str]]:
        """Returns metrics and alarms of the texts for the step of a policy version, the last one or the one before."""
        made = next((made for made in (self._made, self._made_before) if made.version == version), _Made(version))
        num_made = sum(map(len, made.texts.values())) // TOKEN_BYTES
        num_kept, num_tokens = map(sum, zip(*self._ask("take_kept"), strict=True))
        figures = ahead_figures(num_made, num_kept, num_tokens, made.seconds)
        return {PREFIX + name: value for name, value in figures.items()}, ahead_alarms(num_made, num_kept)

    def _ask(self, method: str, **arguments: Any) -> list[Any]:
        """Calls all engines, waits until each of them has replied or failed, and returns the replies.

        Raises the error of the first engine that has failed.
        """
        engines = range(self._engines.num_engines)
        calls = [self._engines.start(engine, method, **arguments) for engine in engines]
        ray.wait(calls, num_returns=len(calls))
        return list(ray.get(calls))

    def _run(self, work: Sequence[tuple[Sequence[Any], Sequence[Row]]], after: int) -> None:
        started = time.perf_counter()
        calls = {self._advance(engine, after, *shard): engine for engine, shard in enumerate(work) if shard[1]}
        while calls and not self._stop.is_set():
            for call in ray.wait(list(calls), timeout=SLICE_S)[0]:
                engine = calls.pop(call)
                try:
                    is_busy = ray.get(call)
                except ray.exceptions.RayActorError:
                    continue  # the engine's next call fails, too, and NeMo-RL says so
                if is_busy is not False:
                    again = work[engine] if is_busy is None else ()
                    calls[self._advance(engine, after, *again)] = engine
        self._made.seconds += time.perf_counter() - started

    def _advance(self, engine: int, after: int, prompts: Sequence[Any] = (), rows: Sequence[Row] = ()) -> Any:
        work = {"prompts": list(prompts), "rows": list(rows), "seconds": SLICE_S, "after": after}
        return self._engines.start(engine, "run_ahead", **work)
