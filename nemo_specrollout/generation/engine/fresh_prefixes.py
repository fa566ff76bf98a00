# SPDX-License-Identifier: Apache-2.0
"""Keeps requests from reusing cached prefixes that older weights have computed. vLLM is not imported.

vLLM finds a cached block of the KV cache by its tokens, whatever weights computed it. It can drop a cached block only while no
request uses the block. Therefore this module gives each prompt a salt that stands for the present weights (vLLM's
`cache_salt`). The salt enters the hash of the prompt's blocks. So requests under the same weights still share their prefixes,
and a block of older weights is never found again.
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
"""Key of the salt in vLLM's prompts, and name of the same field in vLLM's requests."""
Generate = Callable[..., AsyncGenerator[Any, None]]
"""Type of the method `AsyncLLM.generate`."""


class CacheSalt:
    """Gives an engine's new prompts a salt, which changes with each update of the engine's weights.

    Owns the number of updates. No two engines and no two runs have a salt in common, because cached blocks may be stored
    outside the engine and outlive it.
    """

    def __init__(self) -> None:
        self._engine = uuid4().hex
        self._num_changes = 0

    def renew(self) -> None:
        """Changes the salt, because the weights change. Prompts with the new salt find no cached blocks of earlier prompts."""
        self._num_changes += 1

    def of(self, prompt: Any) -> Any:
        """Returns a copy of one of vLLM's prompts with the salt, or the prompt itself if its kind cannot have a salt.

        If the prompt has a salt already, that salt stays a part of the new one, because the sender uses it to keep prompts
        apart.
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
    """Makes vLLM's synchronous `LLMEngine` give the prompt of every request the cache salt of the present weights."""
    add_request = engine.add_request

    def add_salted(request_id: str, prompt: Any, *arguments: Any, **options: Any) -> Any:
        return add_request(request_id, salt.of(prompt), *arguments, **options)

    engine.add_request = add_salted


class NewKv:
    """Makes an asynchronous engine recompute the KV of running requests after an update of its weights.

    It wraps `AsyncLLM.collective_rpc`, through which the weights arrive. vLLM handles calls in the order in which they are
    sent, and handles all waiting calls before it begins an engine step. This class sends the call that drops all KV right
    after the call that delivers the last weights. So no engine step with new weights reads KV of older ones.
    """

    def __init__(self, llm: Any, last_calls: Collection[str]) -> None:
        """`last_calls` are the methods of vLLM workers that deliver the last tensors of a weight update."""
        self._llm = llm
        self._last_calls = last_calls
        self._native = llm.collective_rpc
        self._is_due = False
        llm.collective_rpc = self._call

    def change_begins(self) -> None:
        """Notes that a weight update begins."""
        self._is_due = True

    async def change_ends(self) -> None:
        """Drops all KV, unless this happened already when the last tensors of the weight update arrived."""
        if self._is_due:
            await self._drop()

    async def _call(self, method: Any, *arguments: Any, **options: Any) -> Any:
        call = self._native(method, *arguments, **options)
        if method not in self._last_calls:
            return await call
        reply, _ = await asyncio.gather(call, self._drop())
        return reply

    async def _drop(self) -> None:
        """Makes vLLM preempt all running requests and drop all KV. The requests continue after their KV is recomputed."""
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        self._is_due = False


def _promise() -> Future[None]:
    """Returns a new future whose result will be None. A task that is cancelled while it waits does not cancel the future."""
    promise: Future[None] = Future()
    promise.set_running_or_notify_cancel()
    return promise


@dataclass(eq=False)
class _Attempt:
    """An attempt to decode a request, from its start until the request's first output."""

    request_id: str
    outputs: AsyncGenerator[Any, None]
    first: asyncio.Task[Any]
    """Task that waits for the first output. Its result is None if the request ends without any output."""
    is_stopped: bool = False
    """Whether the attempt was cancelled because the weights change."""
    left: Future[None] = field(default_factory=_promise)
    """Done when vLLM no longer has the request of this attempt, or when the first output has arrived."""

    def stop(self) -> None:
        self.is_stopped = True
        self.first.get_loop().call_soon_threadsafe(self.first.cancel)


class FreshPrefixes:
    """Gives the requests of an asynchronous engine their cache salt, and starts none while the engine's weights change.

    Owns the attempts to decode requests that have no output yet, and knows whether the weights are changing. A change begins
    before the first new tensor arrives and ends after the last one.

    Invariant: vLLM looks up the cached prefix of a new request only between two changes, and with the salt of that time. A
    request that arrives during a change waits for its end. A request that has sampled no token when a change begins may still
    be in vLLM's queue. So it is removed from vLLM and starts again after the change. A request that has sampled a token goes
    on. If vLLM preempts such a request, it may find blocks with its own salt again. They hold the KV that it would also have
    without the preemption.

    Changes belong to one event loop. Requests may come from several event loops, because NeMo-RL's HTTP server has a thread of
    its own.
    """

    def __init__(self, llm: Any, generate: Generate, salt: CacheSalt) -> None:
        """`generate` is the method of `llm`, vLLM's `AsyncLLM`, that this object's method `generate` replaces."""
        self._llm = llm
        self._generate = generate
        self._salt = salt
        self._lock = Lock()
        self._is_changing = False
        self._attempts: set[_Attempt] = set()
        self._waiting: list[Future[None]] = []

    async def change_begins(self) -> None:
        """Begins a change of the weights. From now on, no request starts until `change_ends` is called.

        Removes from vLLM all requests that have sampled no token yet, and waits until they are gone. They start again after
        the change.
        """
        with self._lock:
            self._is_changing = True
            self._salt.renew()
            early = [attempt for attempt in self._attempts if not self._has_sampled(attempt.request_id)]
        for attempt in early:
            attempt.stop()
        await asyncio.gather(*(asyncio.wrap_future(attempt.left) for attempt in early))

    def change_ends(self) -> None:
        """Ends a change of the weights, even if the update has failed, and starts the waiting requests."""
        with self._lock:
            self._is_changing = False
            waiting = self._waiting
            self._waiting = []
        for request in waiting:
            request.set_result(None)

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """Yields the outputs of a request. It replaces `AsyncLLM.generate` and takes the same arguments."""
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
        """Starts an attempt to decode a request, as soon as the weights are not changing."""
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
        """Waits for the first output of an attempt to decode a request, and returns it.

        Returns None if there is no output, or if the attempt was cancelled because the weights change. Raises what vLLM has
        raised. If the caller is cancelled, the request is removed from vLLM too.
        """
        try:
            await asyncio.wait({attempt.first})
            if not attempt.first.cancelled():
                return attempt.first.result()
            if not attempt.is_stopped:
                raise asyncio.CancelledError
            await self._llm.abort(attempt.request_id)  # vLLM does not do so if it was just taking the request
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
        """Returns whether every sample of a request has at least one token.

        This is also known for requests whose output vLLM yields only at the end.
        """
        outputs = self._llm.output_processor
        samples = [outputs.request_states.get(sample) for sample in list(outputs.external_req_ids.get(request_id, ()))]
        return bool(samples) and not any(sample is not None and sample.is_prefilling for sample in samples)


async def _first_of(outputs: AsyncGenerator[Any, None]) -> Any:
    async for output in outputs:
        return output
    return None
