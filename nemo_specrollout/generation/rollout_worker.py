# SPDX-License-Identifier: Apache-2.0
"""A rollout engine that works in turns: takes orders, steps for a while, reports what its runs have made."""

import time
from dataclasses import dataclass, field
from typing import Any

from nemo_specrollout.generation.engine import RolloutEngine, RolloutRequest
from nemo_specrollout.generation.turns import Orders, Progress, Report, Work

# With so few runs a turn ends as soon as one of them does: somebody may be racing for it.
FEW_RUNS = 4


@dataclass
class _Run:
    request_id: str
    num_told: int = 0


@dataclass
class _Turn:
    """What is to be reported."""

    told: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)

    def tell(self, key: int, tokens: list[int], logprobs: list[float]) -> None:
        known = self.told.setdefault(key, ([], []))
        known[0].extend(tokens)
        known[1].extend(logprobs)

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens, _ in self.told.values())


class RolloutWorker:
    """Runs under way in an engine; owns their names and how much of each was told.

    Invariant: a run's tokens are told once each and in order, all of those that a turn made in its report.
    """

    def __init__(self, engine: RolloutEngine, **sampling: Any) -> None:
        """`sampling` overrides the config's sampling parameters."""
        self.engine, self._sampling = engine, sampling
        self._runs: dict[int, _Run] = {}
        self._key_of: dict[str, int] = {}

    def turn(self, orders: Orders) -> Report:
        """Stops and begins what `orders` say, steps until their seconds are over or nothing is left to do, and reports."""
        turn = _Turn()
        until = time.perf_counter() + orders.seconds
        self._stop(orders.stops, turn)
        prefill_s = self._begin(orders.starts, turn)
        num_first = turn.num_tokens
        decode_s, request_s = self._decode(until, turn)
        self._tell_all(turn)
        num_prefilled = sum(len(r.prompt_token_ids) + len(r.prefix_token_ids) for _, r in orders.starts)
        work = Work(decode_s, request_s, turn.num_tokens - num_first, prefill_s, num_prefilled)
        return Report(Progress.of(turn.told), turn.finished, work)

    def forget(self) -> None:
        """Stops all runs."""
        self._stop(tuple(self._runs), _Turn())

    def _stop(self, keys: tuple[int, ...], turn: _Turn) -> None:
        runs = {key: self._runs.pop(key) for key in keys if key in self._runs}
        for key, run in runs.items():
            turn.tell(key, *self.engine.progress(run.request_id, run.num_told))
            del self._key_of[run.request_id]
        self.engine.abort([run.request_id for run in runs.values()])

    def _begin(self, starts: tuple[tuple[int, RolloutRequest], ...], turn: _Turn) -> float:
        """Takes the step that computes the texts of new runs; its seconds."""
        if not starts:
            return 0.0
        started = time.perf_counter()
        ids = self.engine.submit([request for _, request in starts], self._sampling)
        for (key, _), request_id in zip(starts, ids, strict=True):
            self._runs[key], self._key_of[request_id] = _Run(request_id), key
        self._step(turn)
        self._tell_all(turn)
        return time.perf_counter() - started

    def _decode(self, until: float, turn: _Turn) -> tuple[float, float]:
        """Seconds of steps, and the same summed over the requests of each."""
        decode_s = request_s = 0.0
        now = time.perf_counter()
        while self._runs and now < until:
            num_runs = len(self._runs)
            self._step(turn)
            before, now = now, time.perf_counter()
            decode_s += now - before
            request_s += (now - before) * min(num_runs, self.engine.max_num_seqs)
            if len(self._runs) < num_runs <= FEW_RUNS:
                break
        return decode_s, request_s

    def _step(self, turn: _Turn) -> None:
        for request_id, rollout in self.engine.step().items():
            key = self._key_of.pop(request_id)
            num_told = self._runs.pop(key).num_told
            turn.tell(key, rollout.token_ids[num_told:], rollout.logprobs[num_told:])
            turn.finished[key] = rollout.finish_reason

    def _tell_all(self, turn: _Turn) -> None:
        for key, run in self._runs.items():
            tokens, logprobs = self.engine.progress(run.request_id, run.num_told)
            if tokens:
                run.num_told += len(tokens)
                turn.tell(key, tokens, logprobs)
