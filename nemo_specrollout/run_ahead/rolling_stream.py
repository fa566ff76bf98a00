# SPDX-License-Identifier: Apache-2.0
"""An asynchronous engine that decodes requests of coming steps in slots that its own requests leave free (`run_ahead`).

The engine steps by itself and its own requests come at any time. Early requests are tasks. They give way as soon as a request
of the engine's own comes that needs a slot.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.generation.engine.vllm_requests import REFUSALS
from nemo_specrollout.run_ahead.decisions.flips import FlipModel
from nemo_specrollout.run_ahead.early_requests import (
    MAX_TRIES,
    RETRY_S,
    EarlyFigures,
    EarlyMade,
    EarlyRequests,
    EngineSize,
    OwnLoad,
    Seldom,
    StaleCache,
    engine_id,
    longest_of,
)
from nemo_specrollout.run_ahead.early_texts import EarlyRow, EarlyStart, EarlyTexts
from nemo_specrollout.run_ahead.rolling_engine import RequestOf

logger = logging.getLogger(__name__)

LOOK_S = 0.02
"""Seconds after which the engine is looked at again if no request has come or gone."""


class RollingStream:
    """Decodes early requests beside the requests of an `AsyncLLM`.

    States: idle; with a plan, from `plan` to `end`. Owns the early requests of the plan with a task for each, and the task
    that begins and stops them. Knows how many requests of the engine's own are under way, all of which pass through `own`.

    Invariant: the engine has no more requests than slots while it has an early one that was not told to stop.

    Belongs to the event loop of `plan`. The engine's own requests may come on others, because NeMo-RL's HTTP server has
    a thread of its own.
    """

    def __init__(
        self,
        llm: Any,
        generate: Callable[..., AsyncGenerator[Any, None]],
        request_of: RequestOf,
        most_branches: int,
    ) -> None:
        """`generate` is vLLM's own method of `llm`. `most_branches` bounds the branches of a request; 0 for none."""
        self._llm = llm
        self._generate = generate
        self._request_of = request_of
        self._most_branches = most_branches
        self._names = itertools.count()
        self._own: set[object] = set()
        """A token for each request of the engine's own. Adding and discarding are safe in all threads."""
        self._early: EarlyRequests | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of early requests by name, also of those that vLLM has not let go yet."""
        self._changed = asyncio.Event()
        self._known_lengths: list[int] = []
        """Lengths of the responses of the last rollout during a plan."""
        self._lengths: list[int] = []
        """Lengths of the responses that have ended since the plan began."""
        self._is_due = False
        """Whether the engine's own requests have begun to come since the plan, or `wait` says that it has nothing to do."""
        self._asks_prices = Seldom()
        self._asks_ties = Seldom()
        self._has_warned = False

    @property
    def has_plan(self) -> bool:
        """Whether the engine has rows of coming steps to decode."""
        return self._early is not None

    async def plan(self, rows: Sequence[EarlyRow], scale: float, kept: float) -> None:
        """Takes rows of coming steps, which are decoded in free slots once requests of the engine's own have come.

        For the arguments see `RollingEngine.plan`.
        """
        assert self._early is None, "the plan before has not ended"
        texts = EarlyTexts(rows, FlipModel(scale), self._most_branches, kept, self._names)
        size = EngineSize.of(self._llm.vllm_config)
        self._early = EarlyRequests(self._llm.output_processor, size, texts, longest_of(rows))
        self._lengths = []
        self._is_due = bool(self._own)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(self._early))

    async def own(self, outputs: AsyncGenerator[Any, None], params: Any) -> AsyncGenerator[Any, None]:
        """Passes on the outputs of a request of the engine's own, for which early ones give way."""
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
        """Lets the engine work for at most `seconds`. Returns whether an early request is left, or could begin."""
        keeper = self._keeper
        early = self._early
        if keeper is None or early is None or early.is_empty or keeper.done():
            return False
        self._is_due = True
        await asyncio.wait([keeper, *self._tasks.values()], timeout=seconds)
        return not early.is_empty and not keeper.done()

    async def end(self, *, keeps_cache: bool) -> EarlyMade:
        """Ends the plan. No early request is left in the engine. Returns what was made.

        Also makes the engine drop its cached prefixes, unless it `keeps_cache`. Raises StaleCache if it does not drop them.
        """
        early = self._early
        keeper = self._keeper
        self._early = self._keeper = None
        made = EarlyMade({}, EarlyFigures())
        if early is not None and keeper is not None:
            keeper.cancel()
            self._stop(early, early.running)
            await asyncio.gather(keeper, *self._tasks.values(), return_exceptions=True)
            if self._most_branches and early.untold:
                early.take_ties(await self._ask(WorkerCalls.specrollout_take_ties, early.untold))
            await self._ask(WorkerCalls.specrollout_forget_ties)
            made = early.made()
            self._known_lengths = self._lengths or self._known_lengths
        if not keeps_cache:
            await self._drop_cache()
        return made

    # Early requests

    async def _keep(self, early: EarlyRequests) -> None:
        """Begins and stops early requests whenever something has changed, and every now and then."""
        try:
            num_before = 0
            while self._early is early:  # a cancellation may be lost in vLLM's code
                self._changed.clear()
                self._give_way()
                load = self._load(early)
                early.note_time(load.num_requests, asyncio.get_running_loop().time())
                has_slots = load.num_requests + early.num_running < early.size.slots and not load.is_waiting
                if self._is_due and has_slots and load.num_requests <= num_before:
                    await self._ask_worker(early, load)
                    for start in early.begin(self._load(early)):  # requests may have come in the meantime
                        self._begin(early, start)
                num_before = load.num_requests  # while requests arrive one by one, more of them will
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
        except Exception:
            logger.exception(
                "specrollout: the engine decodes no further requests of coming steps until new weights come"
            )
            raise

    async def _ask_worker(self, early: EarlyRequests, load: OwnLoad) -> None:
        """Asks for prices, once for each plan, and for the near-ties from which branches can begin."""
        if early.prices is None and self._asks_prices.is_due():
            with self._asks_prices:
                reply = await self._ask(WorkerCalls.specrollout_step_seconds)
            early.set_prices(reply, self._known_lengths or [*self._lengths, *load.lengths])
        is_due = not early.num_running or self._asks_ties.is_due()  # without any at work, branches are all that is left
        if self._most_branches and early.untold and is_due:
            with self._asks_ties:
                early.take_ties(await self._ask(WorkerCalls.specrollout_take_ties, early.untold))

    def _load(self, early: EarlyRequests) -> OwnLoad:
        """Returns the load of the engine's own requests, with those that vLLM has not taken yet."""
        load = early.own_load()
        num_requests = max(load.num_requests, len(self._own))
        return load._replace(num_requests=num_requests, is_waiting=load.is_waiting or num_requests > load.num_requests)

    def _give_way(self) -> None:
        """Stops the early requests that take what the engine's own need."""
        early = self._early
        if early is not None:
            names = early.give_way(self._load(early))
            self._stop(early, names)
            early.figures.num_stopped += len(names)

    def _begin(self, early: EarlyRequests, start: EarlyStart) -> None:
        prompt, params = self._request_of(start)
        if params is None:
            early.finished(engine_id(start.name), (), "stop")
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
            early.finished(engine_id(name), (), "stop")  # it would be refused again
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "specrollout: vLLM refuses a request of a coming step, which is left for its step: %s", error
                )
        finally:
            early.stopped([name])

    def _let_go(self, name: int) -> None:
        task = self._tasks.pop(name)
        if not task.cancelled():
            task.exception()  # its own request of the coming step raises it again if it is of importance
        self._changed.set()

    def _stop(self, early: EarlyRequests, names: Sequence[int]) -> None:
        early.read(names)
        early.stopped(names)
        for name in names:
            if name in self._tasks:
                self._tasks[name].cancel()

    def _tell(self, what: Callable[[], None]) -> None:
        """Has a function called in the event loop of the plan, at once if this is it."""
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

    async def _ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the reply of the only vLLM worker that does not reply None."""
        replies = await self._llm.collective_rpc(method.__name__, args=arguments)
        return next((reply for reply in replies if reply is not None), None)

    async def _drop_cache(self) -> None:
        for _ in range(MAX_TRIES):
            if await self._llm.reset_prefix_cache() is not False:
                return
            await asyncio.sleep(RETRY_S)  # a step that was under way has ended then
        raise StaleCache
