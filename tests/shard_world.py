# SPDX-License-Identifier: Apache-2.0
"""Shards of a rollout, each with a thread and a real engine. One engine steps at a time, as vLLM requires."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lab.local.engine import RolloutEngine
from nemo_specrollout.generation.engine.ahead_branches import pack
from nemo_specrollout.generation.engine.hosted_engine import HostedEngine
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, Rollout, RolloutRequest, ShardRequest
from nemo_specrollout.generation.engine.vllm_requests import RolloutSamplingParams, shard_request, text_and_params
from nemo_specrollout.run_ahead.rolling_engine import RollingEngine
from nemo_specrollout.sampling.seeds import request_seed
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.turn_engine import Answer, Ask, roll_out_shard
from nemo_specrollout.stragglers.turns import ExchangeFailed

_ENGINES_TURN = threading.Lock()


class OneAtATime(HostedEngine):
    """An engine that waits for the others: vLLM keeps the state of a forward pass in a module."""

    def submit(self, requests: Sequence[ShardRequest], sampling: Mapping[str, Any]) -> list[str]:
        with _ENGINES_TURN:
            return super().submit(requests, sampling)

    def step(self) -> dict[str, Rollout]:
        with _ENGINES_TURN:
            return super().step()

    def abort(self, ids: list[str]) -> None:
        with _ENGINES_TURN:
            super().abort(ids)


@dataclass
class ThreadAnswer:
    """The answer of an exchange in this process."""

    future: Future[Any]

    def is_there(self) -> bool:
        return self.future.done()

    def __call__(self) -> Any:
        return self.future.result()


@dataclass
class ThreadLink:
    """A link to an exchange in this process, which is lost after `dies_after` exchanges."""

    exchange_: StragglerExchange
    worker: int
    dies_after: int = 1 << 60
    num_exchanges: int = 0
    _event: tuple[int, Callable[[], None]] = (0, lambda: None)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def __call__(self, method: Callable[..., object], *arguments: Any) -> Answer:
        self.num_exchanges += method is StragglerExchange.exchange
        if self.num_exchanges == self._event[0]:
            self._event[1]()
        if self.num_exchanges > self.dies_after:
            raise ExchangeFailed("it died")
        return ThreadAnswer(self._pool.submit(method, self.exchange_, self.worker, *arguments))

    def when_exchanged(self, number: int, event: Callable[[], None]) -> None:
        """Has `event` called at the exchange of that number."""
        self._event = (number, event)


@dataclass
class IdleInTurn:
    """Work for coming steps of an engine that waits for the others with each slice."""

    rolling: RollingEngine
    has_begun: threading.Event = field(default_factory=threading.Event)

    def slice(self, seconds: float) -> bool:
        with _ENGINES_TURN:
            has_more = self.rolling.slice(seconds)
        self.has_begun.set()
        return has_more

    def worth(self) -> EarlyWorth:
        return self.rolling.worth()


@dataclass
class Shard:
    """An engine's part in a rollout, as in NeMo-RL's actor: without the exchange, vLLM makes its own requests."""

    engine: OneAtATime
    ask: Ask
    idle: IdleInTurn | None = None
    failure: str | None = None

    def run(self, requests: Sequence[ShardRequest]) -> list[Rollout]:
        try:
            return roll_out_shard(self.engine, self.ask, requests, self.idle)
        except ExchangeFailed as error:
            self.failure = str(error)
        texts, params = zip(*(text_and_params(r, streams=False) for r in requests), strict=True)
        with _ENGINES_TURN:
            made = self.engine._llm.generate([{"prompt_token_ids": t} for t in texts], list(params), use_tqdm=False)
        return [Rollout.from_vllm(output) for output in made]


class StreamingEngine:
    """`AsyncLLM.generate` over an engine in this process, which a task steps while it has requests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine._llm.llm_engine
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        queue = self._queues[request_id] = asyncio.Queue()
        self._engine.add_request(request_id, prompt, params)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        is_finished = False
        try:
            while not is_finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                is_finished = output.finished
                yield output
        finally:
            del self._queues[request_id]
            if not is_finished:
                self._engine.abort_request([request_id])

    async def _step(self) -> None:
        while self._engine.has_unfinished_requests():
            try:
                outputs = self._engine.step()
            except Exception as error:  # as AsyncLLM does, raise the error in every waiting call
                for queue in self._queues.values():
                    queue.put_nowait(error)
                raise
            for output in outputs:
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)
            await asyncio.sleep(0.001)


@dataclass
class LoopLink:
    """A link to an exchange in this process, which is lost after `dies_after` exchanges."""

    exchange_: StragglerExchange
    worker: int
    dies_after: int = 1 << 60

    async def __call__(self, method: Callable[..., object], *arguments: Any) -> Any:
        self.dies_after -= method is StragglerExchange.exchange
        if self.dies_after < 0 and method is StragglerExchange.exchange:
            raise ExchangeFailed("it died")
        return await asyncio.to_thread(method, self.exchange_, self.worker, *arguments)


def sharded(
    engine: RolloutEngine, work: Sequence[RolloutRequest], cuts: Sequence[int], **sampling: Any
) -> list[list[ShardRequest]]:
    """Returns `work` in contiguous shards as NeMo-RL would send it: parameters and a seed in each request."""
    shards = [work[a:b] for a, b in itertools.pairwise([0, *cuts, len(work)])]
    return [
        [_as_sent(engine, r, (worker, i), sampling) for i, r in enumerate(shard)] for worker, shard in enumerate(shards)
    ]


def _as_sent(
    engine: RolloutEngine, request: RolloutRequest, home: tuple[int, int], sampling: Mapping[str, Any]
) -> ShardRequest:
    prompt = {"prompt_token_ids": request.prompt_token_ids}
    return shard_request(home, prompt, given(engine, request, sampling))


def given(engine: RolloutEngine, request: RolloutRequest, sampling: Mapping[str, Any]) -> RolloutSamplingParams:
    seed = request_seed(engine._seed, request.prompt_index, request.sample_index, request.policy_version)
    identity: dict[str, Any] = {"seed": seed}
    if request.ahead:
        identity |= {"ahead": request.ahead, "branches": pack(request.branches)}
    return RolloutSamplingParams(**{**engine._sampling(request), **sampling, "extra_args": {EXTRA_ARGS_KEY: identity}})


def rolled_out(
    rollouts: Sequence[Shard], shards: Sequence[list[ShardRequest]], delays: Sequence[threading.Event | None]
) -> list[Rollout]:
    """Returns the responses of all shards, in order. A shard begins when its event is set."""

    def run(i: int) -> list[Rollout]:
        delay = delays[i]
        if delay is not None:
            delay.wait()
        return rollouts[i].run(shards[i])

    with ThreadPoolExecutor(len(shards)) as pool:
        return [r for made in pool.map(run, range(len(shards))) for r in made]
