# SPDX-License-Identifier: Apache-2.0
"""An asynchronous engine that reports in turns, and its part in an exchange with other engines.

The engine decodes by itself all the time, so a turn is only the time until its next report.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nemo_specrollout.generation.engine.requests import Rollout, ShardRequest
from nemo_specrollout.generation.engine.vllm_requests import (
    REFUSALS,
    as_vllm_returns,
    is_portable,
    shard_request,
    text_and_params,
)
from nemo_specrollout.stragglers.attempts import covered
from nemo_specrollout.stragglers.decisions.idle_time import EarlyWorth
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.turn_engine import FEW_ATTEMPTS, num_text_tokens
from nemo_specrollout.stragglers.turns import ExchangeFailed, Starts, TurnOrders, TurnResult, TurnWork

logger = logging.getLogger(__name__)

MAX_EARLY_STOPS = 256
"""Number of attempts that are remembered because the engine was told to stop them but did not have them.

Most of these attempts have already ended. But a few have not started yet, because the order to stop them has overtaken the
order to start them."""
Generate = Callable[[Any, Any, str], AsyncIterator[Any]]
"""`AsyncLLM.generate`, which takes a prompt, sampling parameters and a request id, and yields vLLM's outputs."""
Ask = Callable[..., Coroutine[Any, Any, Any]]
"""A function that calls a method of `StragglerExchange` in the name of one engine. Its arguments are the method, and the
method's arguments without the engine's number. It raises ExchangeFailed if the exchange is lost."""


@dataclass
class _Streamed:
    """A running attempt, which is the engine's work on one request, with the tokens that were not reported yet."""

    name: int
    request: ShardRequest
    began_s: float
    waits: bool
    """Whether the engine was full when the attempt began. If so, the time until its first token does not measure the
    prefill."""
    task: asyncio.Task[None] = field(init=False)
    first_s: float | None = None
    """Time of the first token, by `time.perf_counter`."""
    ended_s: float | None = None
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class StreamEngine:
    """Reports in turns what vLLM's `AsyncLLM` generates. Owns the running attempts, which continue between turns.

    An attempt is the engine's work on one request. The object belongs to one event loop.

    Invariant: each token of an attempt is reported once and in order.
    """

    def __init__(self, generate: Generate, capacity: int) -> None:
        """`capacity` is the number of requests that the engine decodes at a time."""
        self.capacity = capacity
        self._generate = generate
        self._attempts: dict[int, _Streamed] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks of stopped attempts whose requests vLLM has not released yet."""
        self._num_requests = 0
        self._early_stops: deque[int] = deque(maxlen=MAX_EARLY_STOPS)
        self._reported_s = time.perf_counter()

    async def turn(self, orders: TurnOrders) -> TurnResult:
        """Stops and starts attempts as ordered, and returns the report on the turn.

        The turn ends when its time is over or when no attempt is left. Raises the engine's errors. But if vLLM refuses a
        request, this is reported in `TurnResult.refused`.
        """
        self._early_stops.extend(name for name in orders.stops if name not in self._attempts)
        await self._stop(orders.stops)
        self.begin(orders.starts)
        await self._wait(orders.seconds)
        return self._result()

    def begin(self, starts: Starts) -> None:
        """Begins attempts at once, except those that the engine was already told to stop."""
        for name, request in starts:
            assert isinstance(request, ShardRequest)
            if name in self._early_stops:
                continue
            waits = len(self._attempts) >= self.capacity
            attempt = self._attempts[name] = _Streamed(name, request, time.perf_counter(), waits)
            attempt.task = asyncio.create_task(self._consume(attempt))

    async def stop_all(self) -> None:
        """Stops all attempts. Waits until vLLM has released them, and also all attempts that were stopped earlier."""
        await self._stop(list(self._attempts))
        if self._ending:
            await asyncio.wait(self._ending)

    async def _stop(self, names: Sequence[int]) -> None:
        """Cancels the tasks of attempts. vLLM aborts a request when its outputs are no longer consumed."""
        stopped = [self._attempts.pop(name) for name in names if name in self._attempts]
        for attempt in stopped:
            attempt.task.cancel()
            self._ending.add(attempt.task)
            attempt.task.add_done_callback(self._ending.discard)
        await asyncio.gather(*(attempt.task for attempt in stopped), return_exceptions=True)

    async def _consume(self, attempt: _Streamed) -> None:
        text, params = text_and_params(attempt.request, streams=True)
        self._num_requests += 1
        async for output in self._generate({"prompt_token_ids": text}, params, f"specrollout-{self._num_requests}"):
            (made,) = output.outputs
            tokens = list(made.token_ids)
            if tokens and attempt.first_s is None:
                attempt.first_s = time.perf_counter()
            attempt.tokens += tokens
            attempt.logprobs += [entry[token].logprob for entry, token in zip(made.logprobs or (), tokens, strict=True)]
            attempt.finish_reason = made.finish_reason
        attempt.ended_s = time.perf_counter()

    async def _wait(self, seconds: float) -> None:
        """Waits for `seconds`, or until no attempt is left.

        If there are few attempts (`FEW_ATTEMPTS`), it waits only until one of them ends.
        """
        until = time.perf_counter() + seconds
        while (left_s := until - time.perf_counter()) > 0:
            tasks = [a.task for a in self._attempts.values() if not a.task.done()]
            if not tasks:
                return
            done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if done and len(tasks) <= FEW_ATTEMPTS:
                return

    def _result(self) -> TurnResult:
        before = self._reported_s
        self._reported_s = time.perf_counter()
        attempts = list(self._attempts.values())
        decoding = [a for a in attempts if a.first_s is not None and a.first_s <= before]
        work = _work(decoding, attempts, before, self._reported_s)
        steady = tuple(a.name for a in decoding if a.ended_s is None)
        parts = {}
        finished = {}
        refused = []
        for attempt in attempts:
            if attempt.task.done():
                del self._attempts[attempt.name]
                if attempt.first_s is None and isinstance(attempt.task.exception(), REFUSALS):
                    refused.append(attempt.name)
                    continue
                attempt.task.result()
                assert attempt.finish_reason is not None
                finished[attempt.name] = attempt.finish_reason
            if attempt.tokens or attempt.name in finished:
                parts[attempt.name] = attempt.tokens, attempt.logprobs
                attempt.tokens = []
                attempt.logprobs = []
        return TurnResult(parts, finished, work, steady=steady, refused=tuple(refused))


def _work(decoding: list[_Streamed], attempts: list[_Streamed], since_s: float, now_s: float) -> TurnWork:
    """Returns the engine's work from `since_s` to `now_s`, which are times of `time.perf_counter`.

    `decoding` are those of the `attempts` that had their first token before `since_s`. Only they count for the speed of
    decoding. Attempts that got their first token later count for the prefill.
    """
    request_s = [(now_s if a.ended_s is None else a.ended_s) - since_s for a in decoding]
    begun = [(a, a.first_s) for a in attempts if a.first_s is not None and a.first_s > since_s and not a.waits]
    return TurnWork(
        max(request_s, default=0.0),
        sum(request_s),
        sum(len(a.tokens) for a in decoding),
        covered([(a.began_s, first_s) for a, first_s in begun]),
        num_text_tokens(a.request for a, _ in begun),
    )


class StreamShard:
    """An asynchronous engine's part in the exchange. Owns the futures of the responses for which callers wait.

    If the exchange is lost, the engine generates its own requests alone from their beginning, with the same tokens.
    """

    def __init__(
        self,
        number: int,
        engine: StreamEngine,
        ask: Ask,
        stays: str | None,
        early_worth: Callable[[], EarlyWorth] = EarlyWorth,
    ) -> None:
        """`stays` is the reason why every request must stay in this engine (`reason_to_stay`), or None if requests may move.

        `early_worth` returns how much time the engine can save by decoding requests of coming steps (`IdleWork.worth`). This
        object only passes the value on. An asynchronous engine decodes such requests by itself.
        """
        self._number = number
        self._stays = stays
        self._engine = engine
        self._ask = ask
        self._early_worth = early_worth
        self._waiting: dict[int, asyncio.Future[Rollout | None]] = {}
        self._num_requests = 0
        self._loop: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.failure: str | None = None
        """Reason why the engine works alone, or None while it takes part in the exchange."""

    async def begin(self) -> None:
        """Joins the exchange, unless all requests must stay in this engine.

        Such an engine could not continue the requests of other engines either.
        """
        if self._stays is not None:
            await self._go_alone(ExchangeFailed(self._stays))
            return
        try:
            await self._ask(StragglerExchange.join, self._engine.capacity)
        except ExchangeFailed as error:
            await self._go_alone(error)
        else:
            self._loop = asyncio.create_task(self._take_turns())

    async def leave(self, reason: str) -> None:
        """Leaves the exchange for good.

        Stops all attempts, and generates the engine's own requests alone from their beginning.
        """
        await self._go_alone(ExchangeFailed(reason))
        await self._engine.stop_all()  # a turn or an earlier failure may have begun to stop attempts

    async def generate(
        self, prompt: Any, params: Any, request_id: str, native: Callable[[], AsyncIterator[Any]]
    ) -> AsyncIterator[Any]:
        """Replaces `AsyncLLM.generate`, but yields only the last output.

        `native` calls vLLM's own method, which yields all outputs. It is used for requests that cannot move, for requests that
        an engine has refused, and for all requests after the exchange was lost.
        """
        rollout = None
        if self.failure is None and is_portable(prompt, params, self._stays):
            request = shard_request((self._number, self._num_requests), prompt, params)
            self._num_requests += 1
            rollout = await self._roll_out(request)
        if rollout is not None:
            yield as_vllm_returns(request, request_id, rollout)
            return
        async for output in native():
            yield output

    async def _roll_out(self, request: ShardRequest) -> Rollout | None:
        """Returns the response to a request, or None if the exchange is lost or an engine has refused the request."""
        number = request.home[1]
        self._waiting[number] = asyncio.get_running_loop().create_future()
        adding = asyncio.ensure_future(self._ask(StragglerExchange.add, [request]))
        try:
            self._engine.begin(await asyncio.shield(adding))
            return await self._waiting[number]
        except ExchangeFailed as error:
            await self._go_alone(error)
            return None
        except asyncio.CancelledError:
            self._in_background(self._cancel(number, adding))  # after `adding`, because calls may overtake each other
            raise
        finally:
            del self._waiting[number]

    async def _cancel(self, number: int, adding: asyncio.Future[Starts]) -> None:
        await adding
        await self._ask(StragglerExchange.cancel, [number])

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with suppress(ExchangeFailed):
                await work

        task = asyncio.create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _take_turns(self) -> None:
        turns = deque[TurnOrders]()
        result = None
        receiving = asyncio.create_task(self._ask(StragglerExchange.exchange, None))
        try:
            while True:
                if turns:
                    result = await self._engine.turn(turns.popleft())
                reply = await receiving
                for number, rollout in reply.answers:
                    future = self._waiting.get(number)
                    if future is not None and not future.done():
                        future.set_result(rollout)
                turns.extend(reply.orders)
                receiving = asyncio.create_task(self._ask(StragglerExchange.exchange, result, self._early_worth()))
                result = None
        except Exception as error:  # of the exchange or the engine, which will raise it again for native requests
            await self._go_alone(error)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _go_alone(self, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = f"{error}" if isinstance(error, ExchangeFailed) else f"{type(error).__name__}: {error}"
        logger.warning(
            "specrollout: requests no longer move between engines; each engine decodes its own: %s", self.failure
        )
        if self._loop is not None and self._loop is not asyncio.current_task():
            self._loop.cancel()
        self._in_background(self._ask(StragglerExchange.leave))
        await self._engine.stop_all()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ExchangeFailed(self.failure))
