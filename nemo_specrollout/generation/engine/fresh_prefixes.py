# SPDX-License-Identifier: Apache-2.0
"""Keeps requests from prefixes that older weights have cached. Plain data and tasks: vLLM is not imported.

vLLM finds a cached block by its tokens, not by the weights that computed it, and it drops its cached blocks only while no
request holds one. So each prompt gets a salt that names the weights (vLLM's `cache_salt`), which is part of the hash of its
blocks. Requests of the same weights still share their prefixes, and a block of older weights is never found again.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from uuid import uuid4

SALT_KEY = "cache_salt"
"""Key of vLLM's prompts, and name of a field of its requests."""
Generate = Callable[..., AsyncGenerator[Any, None]]
"""`AsyncLLM.generate`."""


class CacheSalt:
    """The salt of the prompts that an engine gets now. Owns the number of changes of the engine's weights.

    No two engines or runs have a salt in common, because blocks may outlive an engine in a store outside of it.
    """

    def __init__(self) -> None:
        self._engine = uuid4().hex
        self._num_changes = 0

    def renew(self) -> None:
        """Notes that the weights change. Prompts that are salted from now on find none of the blocks of earlier ones."""
        self._num_changes += 1

    def of(self, prompt: Any) -> Any:
        """Returns one of vLLM's prompts with the salt, and unchanged if it is of a kind that cannot have one.

        A salt that the prompt brings stays a part of it, because it keeps the prompts of its sender apart from others'.
        """
        salt = f"{self._engine}-{self._num_changes}"
        if isinstance(prompt, str):
            return {"prompt": prompt, SALT_KEY: salt}
        if isinstance(prompt, Mapping):
            return {**prompt, SALT_KEY: _joined(salt, prompt.get(SALT_KEY))}
        if isinstance(prompt, Sequence):
            return {"prompt_token_ids": list(prompt), SALT_KEY: salt}
        if hasattr(prompt, SALT_KEY):
            salted = copy(prompt)
            setattr(salted, SALT_KEY, _joined(salt, getattr(prompt, SALT_KEY)))
            return salted
        return prompt


def _joined(salt: str, given: str | None) -> str:
    return salt if given is None else f"{salt}-{given}"


def salt_synchronous(engine: Any, salt: CacheSalt) -> None:
    """Makes vLLM's synchronous `LLMEngine` salt the prompt of every request that it gets."""
    add_request = engine.add_request

    def add_salted(request_id: str, prompt: Any, *arguments: Any, **options: Any) -> Any:
        return add_request(request_id, salt.of(prompt), *arguments, **options)

    engine.add_request = add_salted


class NewKv:
    """Makes an asynchronous engine compute the KV of running requests again with new weights.

    Replaces `AsyncLLM.collective_rpc`, by which weights come. vLLM takes calls in the order in which they are sent, and takes
    all that are there before it begins a step. So vLLM drops all KV right behind the new weights, and no step with them reads
    KV of older ones.
    """

    def __init__(self, llm: Any, last_calls: Collection[str]) -> None:
        """`last_calls` are the methods of vLLM workers with each of which the last tensors of a change come."""
        self._llm = llm
        self._last_calls = last_calls
        self._native = llm.collective_rpc
        self._is_due = False
        llm.collective_rpc = self._call

    def change_begins(self) -> None:
        """Notes that new weights are coming."""
        self._is_due = True

    async def change_ends(self) -> None:
        """Drops all KV if the weights did not come by one of the last calls."""
        if self._is_due:
            await self._drop()

    async def _call(self, method: Any, *arguments: Any, **options: Any) -> Any:
        call = self._native(method, *arguments, **options)
        if method not in self._last_calls:
            return await call
        reply, _ = await asyncio.gather(call, self._drop())
        return reply

    async def _drop(self) -> None:
        """Makes vLLM preempt all running requests and drop all KV. They go on when vLLM has computed theirs again."""
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        self._is_due = False


def _promise() -> Future[None]:
    """Returns a future that cannot be cancelled by those who wait for it."""
    promise: Future[None] = Future()
    promise.set_running_or_notify_cancel()
    return promise


@dataclass(eq=False)
class _Attempt:
    """An attempt of a request that has no output yet."""

    request_id: str
    outputs: AsyncGenerator[Any, None]
    first: asyncio.Task[Any]
    """Waits for the first output. Its result is None if there is none."""
    is_stopped: bool = False
    """Whether a change of the weights has cancelled it."""
    left: Future[None] = field(default_factory=_promise)
    """Is done when vLLM has the attempt no longer, or has its first output."""

    def stop(self) -> None:
        self.is_stopped = True
        self.first.get_loop().call_soon_threadsafe(self.first.cancel)


class FreshPrefixes:
    """Salts the requests of an asynchronous engine, and lets none begin while weights change.

    Owns the attempts that have no output yet, and knows whether a change is under way. A change begins before the first new
    tensor arrives and ends after the last one.

    Invariant: vLLM looks for the prefix of a new request between two changes only, and under the salt of that time. A
    request that comes during a change waits until the change has ended. So does one that has sampled no token when a change
    begins, because it may still wait in vLLM's queue: it is taken out of vLLM, and begins after the change. A request that
    has sampled a token goes on. If vLLM preempts it, it finds the blocks that its own salt names, which it would have kept.

    Changes belong to one event loop. Requests may come on several, because NeMo-RL's HTTP server has a thread of its own.
    """

    def __init__(self, llm: Any, generate: Generate, salt: CacheSalt) -> None:
        """`generate` is vLLM's own method of `llm`."""
        self._llm = llm
        self._generate = generate
        self._salt = salt
        self._lock = Lock()
        self._is_changing = False
        self._attempts: set[_Attempt] = set()
        self._waiting: list[Future[None]] = []

    async def change_begins(self) -> None:
        """Notes that new weights are coming. No request is at its beginning in vLLM when this returns."""
        with self._lock:
            self._is_changing = True
            self._salt.renew()
            early = [attempt for attempt in self._attempts if not self._has_sampled(attempt.request_id)]
        for attempt in early:
            attempt.stop()
        await asyncio.gather(*(asyncio.wrap_future(attempt.left) for attempt in early))

    def change_ends(self) -> None:
        """Notes that all new weights have come, or that the change has failed. Requests that wait begin."""
        with self._lock:
            self._is_changing = False
            waiting = self._waiting
            self._waiting = []
        for request in waiting:
            request.set_result(None)

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """Replaces `AsyncLLM.generate`, with the same outputs."""
        while True:
            attempt = await self._begin(prompt, params, request_id, options)
            async with aclosing(attempt.outputs):
                first = await self._first_output(attempt)
                if attempt.first.cancelled():
                    continue
                if first is None:
                    return
                yield first
                async for output in attempt.outputs:
                    yield output
                return

    async def _begin(self, prompt: Any, params: Any, request_id: str, options: Mapping[str, Any]) -> _Attempt:
        """Begins an attempt as soon as no change is under way."""
        while True:
            with self._lock:
                if not self._is_changing:
                    outputs = self._generate(self._salt.of(prompt), params, request_id=request_id, **options)
                    attempt = _Attempt(request_id, outputs, asyncio.create_task(_first_of(outputs)))
                    self._attempts.add(attempt)
                    return attempt
                opened = _promise()
                self._waiting.append(opened)
            await asyncio.wrap_future(opened)

    async def _first_output(self, attempt: _Attempt) -> Any:
        """Waits for the first output of an attempt, or until a change has taken the attempt out of vLLM. Returns the output.

        Raises what vLLM raised. If the caller is cancelled, vLLM has the attempt no longer either.
        """
        try:
            await asyncio.wait({attempt.first})
            if not attempt.first.cancelled():
                return attempt.first.result()
            if not attempt.is_stopped:
                raise asyncio.CancelledError
            await self._llm.abort(attempt.request_id)  # vLLM does not if it was about to take the request
            return None
        except asyncio.CancelledError:
            if not attempt.first.done() and not attempt.is_stopped:
                attempt.first.cancel()
            await asyncio.wait({attempt.first})
            raise
        finally:
            with self._lock:
                self._attempts.discard(attempt)
            attempt.left.set_result(None)

    def _has_sampled(self, request_id: str) -> bool:
        """Returns whether all samples of a request have a token, also if the request yields nothing before its end."""
        outputs = self._llm.output_processor
        samples = [outputs.request_states.get(sample) for sample in list(outputs.external_req_ids.get(request_id, ()))]
        return bool(samples) and not any(sample is not None and sample.is_prefilling for sample in samples)


async def _first_of(outputs: AsyncGenerator[Any, None]) -> Any:
    async for output in outputs:
        return output
    return None
