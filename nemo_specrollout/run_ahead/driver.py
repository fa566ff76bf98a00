# SPDX-License-Identifier: Apache-2.0
"""The driver's part of `run_ahead`: the thread that lets idle engines decode the rows of the next step.

The engines have the weights of the step before. A request's seed is known before its weights are, so their texts are drafts
for the same requests under the same noise. Nothing else ever sees these texts.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, Protocol

import ray

from nemo_specrollout.generation.engine.remote_calls import EngineActorCalls
from nemo_specrollout.generation.engine.requests import TOKEN_BYTES
from nemo_specrollout.reports.records import PREFIX, ahead_alarms, ahead_figures

Parameters = ParamSpec("Parameters")
SLICE_S = 0.1
"""Seconds for which a synchronous engine decodes ahead at a time. Its other calls wait for the end of a slice."""


class Engines(Protocol):
    """The engines of a run, as the driver reaches them. NeMo-RL's are an `EngineClient` (`nemo_rl/ray_calls.py`)."""

    num_engines: int

    def start(
        self,
        engine: int,
        method: Callable[Concatenate[EngineActorCalls, Parameters], object],
        /,
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Any:
        """Begins to call a method of an engine actor. Returns Ray's reference to the reply."""


def ask_all(
    engines: Engines,
    method: Callable[Concatenate[EngineActorCalls, Parameters], object],
    *arguments: Parameters.args,
    **named: Parameters.kwargs,
) -> list[Any]:
    """Calls a method of every engine actor, waits until each of them has replied or failed, and returns the replies.

    Raises the error of the first engine that has failed.
    """
    calls = [engines.start(engine, method, *arguments, **named) for engine in range(engines.num_engines)]
    ray.wait(calls, num_returns=len(calls))
    return list(ray.get(calls))


class Row(Protocol):
    """A row of the next step. Its other fields matter only to the engines, to which it is sent as it is."""

    @property
    def seed(self) -> int: ...


@dataclass
class _Made:
    """What was made ahead for the rows of one policy version."""

    version: int
    texts: dict[int, bytes] = field(default_factory=dict)
    """The longest text that was made under each seed, as int32 numbers."""
    seconds: float = 0.0
    """Wall time for which engines have decoded these rows."""


class RunAhead:
    """Lets the engines decode rows while they have nothing else to do. Owns the thread that asks them, and the texts.

    It is idle until `begin`. Then it runs until `end`, which stops the engines within a slice, keeps their texts and sends
    them to all engines. If `begin` comes again for the same policy version, as after an interruption, the rows bring their
    texts as drafts, so that they are soon where they were, and each row keeps the longer one of its texts.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._shards: list[Sequence[Row]] = []
        self._made = self._made_before = _Made(-1)

    def begin(self, version: int, prompts: Sequence[Sequence[int]], rows: Sequence[Row], after: int) -> None:
        """Lets engines decode the rows of a coming policy version, each engine its share of them.

        `prompts` has the token ids of each row's prompt. A synchronous engine begins when it has ended `after` calls of
        `generate` since the start of the run, so that it does not decode ahead before its part of the current rollout.
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
        """Stops the engines and gives each of them the texts of all. Does nothing if they are not at work.

        The engines drop the prefixes that they have cached, because the next weights must not read them. With `keeps_cache`
        they keep them, which is right as long as the weights stay.
        """
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        self._stop.set()
        thread.join()
        at_work = [engine for engine, rows in enumerate(self._shards) if rows]
        end = EngineActorCalls.specrollout_end_ahead
        replies = [self._engines.start(engine, end, keeps_cache=keeps_cache) for engine in at_work]
        for engine, texts in zip(at_work, ray.get(replies), strict=True):
            if texts:  # an engine that was never free has begun no row
                self._keep(self._shards[engine], texts)
        texts_once: Any = ray.put(self._made.texts)  # stored once for all engines
        ask_all(self._engines, EngineActorCalls.specrollout_texts_ahead, texts=texts_once)

    def _keep(self, rows: Sequence[Row], texts: Sequence[bytes]) -> None:
        """Keeps the text of each row, unless a longer one of the same row is known."""
        made = self._made.texts
        for row, text in zip(rows, texts, strict=True):
            if text and len(text) >= len(made.get(row.seed, b"")):
                made[row.seed] = text

    def figures(self, version: int) -> tuple[dict[str, float], list[str]]:
        """Returns the metrics and alarms of the texts that were made for the step of a policy version.

        Texts are known of the last two versions for which any were made. For another version the figures are 0. Asks the
        engines how much of these texts was right, and counts it for this step only.
        """
        made = next((made for made in (self._made, self._made_before) if made.version == version), _Made(version))
        num_made = sum(map(len, made.texts.values())) // TOKEN_BYTES
        kept = ask_all(self._engines, EngineActorCalls.specrollout_take_kept)
        num_kept, num_tokens = map(sum, zip(*kept, strict=True))
        figures = ahead_figures(num_made, num_kept, num_tokens, made.seconds)
        return {PREFIX + name: value for name, value in figures.items()}, ahead_alarms(num_made, num_kept)

    def _run(self, work: Sequence[tuple[Sequence[Any], Sequence[Row]]], after: int) -> None:
        """Asks each engine for slice after slice, until its rows have ended or `end` is called. Runs in the thread.

        `work` has the prompts and the rows of each engine. Its first call brings them, and further calls only go on. An
        engine that replies None has not taken them yet, so the next call brings them again.
        """
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
        """Begins a slice of an engine, with more rows. Returns Ray's reference to the reply."""
        run_ahead = EngineActorCalls.specrollout_run_ahead
        return self._engines.start(
            engine, run_ahead, prompts=list(prompts), rows=list(rows), seconds=SLICE_S, after=after
        )
