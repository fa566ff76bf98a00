# SPDX-License-Identifier: Apache-2.0
"""An asynchronous engine that decodes early requests, those of coming steps, in slots that its own requests leave free.

The engine decodes by itself all the time, and its own requests may come at any time. Each early request is an asyncio task,
which is cancelled as soon as one of the engine's own requests needs its slot.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from nemo_specrollout.generation.engine.vllm_requests import REFUSALS
from nemo_specrollout.run_ahead.early_requests import EarlyMade, EarlyRequests, OwnLoad, engine_id
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyStart
from nemo_specrollout.run_ahead.rolling import MAX_TRIES, RETRY_S, Question, RequestOf, Rolling, StaleCache

logger = logging.getLogger(__name__)

LOOK_S = 0.02
"""Seconds after which it is checked again which early requests to start or stop, if no request comes or goes."""


class RollingStream(Rolling):
    """Decodes early requests, which are those of coming steps, beside the own requests of an `AsyncLLM`.

    A plan says which early requests the engine may decode. It lasts from `plan` until `end`, and this object is idle
    otherwise. It owns the early requests of the plan with a task for each, and the task that starts and stops them. It counts
    the engine's own running requests, all of which pass through `own`.

    Invariant: if the engine has more requests than slots, all of its early requests were told to stop.

    The object belongs to the event loop in which `plan` was called. The engine's own requests may come in other event loops,
    because NeMo-RL's HTTP server has a thread of its own.
    """

    def __init__(
        self,
        llm: Any,
        generate: Callable[..., AsyncGenerator[Any, None]],
        request_of: RequestOf,
        most_branches: int,
    ) -> None:
        """`generate` is vLLM's own method of `llm`. `most_branches` is the largest number of branches of a request, or 0."""
        super().__init__(request_of, most_branches)
        self._llm = llm
        self._generate = generate
        self._own: set[object] = set()
        """An object for each of the engine's own requests. To add and to discard objects is safe in all threads."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of early requests by name, including tasks whose requests vLLM has not released yet."""
        self._changed = asyncio.Event()
        self._is_due = False
        """Whether early requests may start. They may when the engine got requests of its own since the plan began, or when
        `wait` was called."""

    async def plan(self, rows: Sequence[EarlyRow], scale: float, kept: float) -> None:
        """Starts a plan with requests of coming steps (`rows`).

        They are decoded in free slots once the engine has other requests.

        For the arguments see `RollingEngine.plan`.
        """
        early = self._open(self._llm, rows, scale, kept)
        self._is_due = bool(self._own)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(early))

    async def own(self, outputs: AsyncGenerator[Any, None], params: Any) -> AsyncGenerator[Any, None]:
        """Passes on the outputs of one of the engine's own requests. Stops early requests whose slot or KV cache it needs."""
        token = object()
        self._own.add(token)
        self._is_due = True
        self._tell(self._give_way)
        comes_in_parts = params.output_kind.name == "DELTA"
        num_tokens = 0
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    num_new = sum(len(sample.token_ids) for sample in output.outputs)
                    num_tokens = num_tokens + num_new if comes_in_parts else num_new
                    if output.finished:
                        self._lengths.append(num_tokens)
                    yield output
        finally:
            self._own.discard(token)
            self._tell(self._changed.set)

    async def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` while the engine decodes early requests.

        Returns whether one of them is left or could start.
        """
        keeper = self._keeper
        early = self._early
        if keeper is None or early is None or early.is_empty or keeper.done():
            return False
        self._is_due = True
        await asyncio.wait([keeper, *self._tasks.values()], timeout=seconds)
        return not early.is_empty and not keeper.done()

    async def end(self, *, keeps_cache: bool) -> EarlyMade:
        """Ends the plan, removes all early requests from the engine, and returns what was made.

        Also makes the engine drop its cached prefixes, unless `keeps_cache` is true. Raises StaleCache if that fails.
        """
        early = self._early
        keeper = self._keeper
        self._early = self._keeper = None
        if early is not None and keeper is not None:
            keeper.cancel()
            early.read_all()
            self._stop(early, early.running)
            await asyncio.gather(keeper, *self._tasks.values(), return_exceptions=True)
            for question in self._last_questions(early):
                await self._ask(question)
        if not keeps_cache:
            await self._drop_cache()
        return self._made(early)

    # Early requests

    async def _keep(self, early: EarlyRequests) -> None:
        """Starts and stops early requests whenever other requests have come or gone, and after every `LOOK_S` seconds."""
        try:
            num_before = 0
            while self._early is early:  # a cancellation may be lost in vLLM's code
                self._changed.clear()
                self._give_way()
                load = self._load(early)
                early.note_time(load.num_requests, asyncio.get_running_loop().time())
                may_begin = self._is_due and early.has_slot(load) and load.num_requests <= num_before
                if may_begin or early.has_leftovers:
                    for question in self._questions(early, load):
                        await self._ask(question)
                if may_begin:
                    for start in early.begin(self._load(early)):  # requests may have come in the meantime
                        self._begin(early, start)
                num_before = load.num_requests  # while this number rises, more requests will come
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
        except Exception:
            logger.exception(
                "specrollout: the engine decodes no further requests of coming steps until new weights come"
            )
            raise

    def _load(self, early: EarlyRequests) -> OwnLoad:
        """Returns the state of the engine's own requests, including requests that vLLM has not added yet."""
        load = early.own_load()
        num_requests = max(load.num_requests, len(self._own))
        return load._replace(num_requests=num_requests, is_waiting=load.is_waiting or num_requests > load.num_requests)

    def _give_way(self) -> None:
        """Stops early requests that save no more time, or whose slot or KV cache the engine's own requests need."""
        early = self._early
        if early is not None:
            names = early.give_way(self._load(early))
            self._stop(early, names)
            early.figures.num_stopped += len(names)

    def _begin(self, early: EarlyRequests, start: EarlyStart) -> None:
        prompt, params = self._request_of(start)
        if params is None:
            self._leave(early, start.name)
            return
        task = asyncio.create_task(self._decode(early, start.name, prompt, params))
        self._tasks[start.name] = task
        task.add_done_callback(lambda _: self._let_go(start.name))

    async def _decode(self, early: EarlyRequests, name: int, prompt: Any, params: Any) -> None:
        try:
            async with aclosing(self._generate(prompt, params, request_id=engine_id(name))) as outputs:
                async for output in outputs:
                    if output.finished:
                        (made,) = output.outputs
                        early.finished(output.request_id, made.token_ids, made.finish_reason)
        except REFUSALS as error:
            self._refused(early, name, error)
        finally:
            early.stopped([name])

    def _let_go(self, name: int) -> None:
        task = self._tasks.pop(name)
        if not task.cancelled():
            task.exception()  # if the error is important, the request of the coming step raises it again
        self._changed.set()

    def _stop(self, early: EarlyRequests, names: Sequence[int]) -> None:
        early.read(names)
        early.stopped(names)
        for name in names:
            if name in self._tasks:
                self._tasks[name].cancel()

    def _tell(self, what: Callable[[], None]) -> None:
        """Calls `what` in the event loop in which `plan` was called. If the caller runs in that loop, it is called at once.

        Does nothing without a plan.
        """
        if self._early is None or self._loop is None:
            return
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            what()
        else:
            self._loop.call_soon_threadsafe(what)

    async def _ask(self, question: Question) -> None:
        with question.pace:
            question.answered(await self._llm.collective_rpc(question.method.__name__, args=question.arguments))

    async def _drop_cache(self) -> None:
        for _ in range(MAX_TRIES):
            if await self._llm.reset_prefix_cache() is not False:
                return
            await asyncio.sleep(RETRY_S)  # so that a step that was running ends
        raise StaleCache
