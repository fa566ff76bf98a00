# SPDX-License-Identifier: Apache-2.0
"""A rollout engine that works in turns: takes orders, steps for a while, reports what its runs have made."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from nemo_specrollout.generation.engine import Rollout
from nemo_specrollout.racing.turns import Orders, Progress, Report, Request, Work

# With so few runs a turn ends as soon as one of them does: somebody may be racing for it.
FEW_RUNS = 4
# Steps in which an engine tells of the first, if it schedules the next before.
FIRST_STEPS = 2


class Steps(Protocol):
    """What a rollout worker drives, one step at a time: `RolloutEngine`, `HostedEngine`."""

    max_num_seqs: int

    def submit(self, requests: Sequence[Any], sampling: Mapping[str, Any]) -> list[str]: ...

    def progress(self, request_id: str, start: int = 0) -> tuple[list[int], list[float]]: ...

    def step(self) -> dict[str, Rollout]: ...

    def abort(self, ids: list[str]) -> None: ...

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None: ...


@dataclass
class _Run:
    """What the engine was asked for, under which id, and how many of the tokens that it made since were told."""

    name: int
    request: Request
    engine_id: str = ""
    num_told: int = 0


@dataclass
class _Turn:
    """What is to be reported."""

    told: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)

    def tell(self, name: int, tokens: list[int], logprobs: list[float]) -> None:
        known = self.told.setdefault(name, ([], []))
        known[0].extend(tokens)
        known[1].extend(logprobs)

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens, _ in self.told.values())


def num_text_tokens(requests: Iterable[Request]) -> int:
    """Tokens of what these begin with; a prompt counts once for all its samples, which share what was computed of it."""
    requests = list(requests)
    prompts = {r.prompt_index: len(r.prompt_token_ids) for r in requests}
    return sum(prompts.values()) + sum(len(r.prefix_token_ids) for r in requests)


class RolloutWorker:
    """Runs under way in an engine, by the names that the coordinator gave them; owns how much of each was told.

    Invariant: a run's tokens are told once each and in order, all of those that a turn made in its report.
    """

    def __init__(self, engine: Steps, **sampling: Any) -> None:
        """`sampling` overrides the config's sampling parameters."""
        self.engine, self._sampling = engine, sampling
        self.policy_version = 0
        self._runs: dict[int, _Run] = {}
        self._by_engine_id: dict[str, _Run] = {}
        self._step_s = 0.0  # of the decode steps of late

    def turn(self, orders: Orders) -> Report:
        """Stops and begins what `orders` say, steps until their seconds are over or nothing is left to do, and reports."""
        turn, old = _Turn(), [run.name for run in self._runs.values() if run.num_told]
        until = time.perf_counter() + orders.seconds
        self._stop(orders.stops)
        first_s, num_first_steps, num_prefilled = self._begin(orders.starts, turn)
        num_first = turn.num_tokens
        decode_s, request_s, num_steps = self._decode(until, turn)
        self._tell_all(turn)
        prefill_s = max(first_s - num_first_steps * self._step_s, 0.0) if num_prefilled else 0.0
        work = Work(decode_s, request_s, turn.num_tokens - num_first, prefill_s, num_prefilled)
        self._step_s = decode_s / num_steps if num_steps else self._step_s
        steady = tuple(name for name in old if name in self._runs)
        return Report(Progress.of(turn.told), turn.finished, work, self.policy_version, steady)

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int, *, recompute_kv_cache: bool
    ) -> None:
        """The policy is that of `policy_version` from the next turn on; runs go on.

        With `recompute_kv_cache` what they have so far is read again, so that each further token is what the new policy says
        after this text. Without, the new policy goes on from the old one's KV cache, as NeMo-RL does by default.
        """
        runs = list(self._runs.values()) if recompute_kv_cache else []
        for run in runs:
            tokens, _ = self.engine.progress(run.engine_id)
            run.request = replace(run.request, prefix_token_ids=(*run.request.prefix_token_ids, *tokens))
            run.num_told = 0
        self._take_out(runs)
        self.engine.load_weights(tensors)
        self.policy_version = policy_version
        self._put_in(runs)

    def forget(self) -> None:
        """Stops all runs."""
        self._stop(list(self._runs))

    def _stop(self, names: Sequence[int]) -> None:
        """What they have made since they were last told of is not asked for."""
        self._take_out([self._runs.pop(name) for name in names if name in self._runs])

    def _begin(self, starts: Sequence[tuple[int, Request]], turn: _Turn) -> tuple[float, int, int]:
        """Takes the steps that compute the texts of new runs: their seconds, how many they are, and tokens of the texts that
        were computed whole. An engine that schedules asynchronously tells of a step in the one after it."""
        if not starts:
            return 0.0, 0, 0
        started, num_steps, told = time.perf_counter(), 0, set[int]()
        runs = [_Run(name, request) for name, request in starts]
        self._runs |= {run.name: run for run in runs}
        self._put_in(runs)
        while not told and num_steps < FIRST_STEPS:
            self._step(turn)
            self._tell_all(turn)
            num_steps += 1
            told = {name for name, _ in starts if name in turn.told}
        num_prefilled = num_text_tokens(request for name, request in starts if name in told)
        return time.perf_counter() - started, num_steps, num_prefilled

    def _put_in(self, runs: Sequence[_Run]) -> None:
        for run, engine_id in zip(runs, self.engine.submit([r.request for r in runs], self._sampling), strict=True):
            run.engine_id = engine_id
            self._by_engine_id[engine_id] = run

    def _take_out(self, runs: Sequence[_Run]) -> None:
        self.engine.abort([run.engine_id for run in runs])
        for run in runs:
            del self._by_engine_id[run.engine_id]

    def _decode(self, until: float, turn: _Turn) -> tuple[float, float, int]:
        """Seconds of steps, the same summed over the requests of each, and how many steps."""
        decode_s, request_s, num_steps = 0.0, 0.0, 0
        now = time.perf_counter()
        while self._runs and now < until:
            num_runs = len(self._runs)
            self._step(turn)
            before, now = now, time.perf_counter()
            num_steps += 1
            decode_s += now - before
            request_s += (now - before) * min(num_runs, self.engine.max_num_seqs)
            if len(self._runs) < num_runs <= FEW_RUNS:
                break
        return decode_s, request_s, num_steps

    def _step(self, turn: _Turn) -> None:
        for engine_id, rollout in self.engine.step().items():
            run = self._by_engine_id.pop(engine_id)
            del self._runs[run.name]
            turn.tell(run.name, rollout.token_ids[run.num_told :], rollout.logprobs[run.num_told :])
            turn.finished[run.name] = rollout.finish_reason

    def _tell_all(self, turn: _Turn) -> None:
        for run in self._runs.values():
            tokens, logprobs = self.engine.progress(run.engine_id, run.num_told)
            if tokens:
                run.num_told += len(tokens)
                turn.tell(run.name, tokens, logprobs)
