# SPDX-License-Identifier: Apache-2.0
"""Requests of an asynchronous engine whose weights change while they run (`run_ahead`): each sample is of one policy."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, longest_known_text


class OnePolicyStream:
    """Makes requests begin again when weights have changed. Their text so far is drafts, so most of it is verified at once.

    Owns the count of changes, and knows whether one is under way. A change begins before the first new tensor arrives and
    ends after the last one. Belongs to one event loop.

    Invariant: vLLM decodes a request whose output is yielded between two changes, and during none. A request that comes
    during a change waits until the change has ended. A request that is under way when a change begins starts again after
    it, even if vLLM has just finished it.
    """

    def __init__(self, generate: Callable[..., AsyncGenerator[Any, None]]) -> None:
        """`generate` is vLLM's own method, but a request reads no prefix that was cached before the latest change."""
        self._generate = generate
        self._num_changes = 0
        self._settled = asyncio.Event()
        """Set while no change is under way."""
        self._settled.set()

    def change_begins(self) -> None:
        """Notes that new weights are coming. Every request under way has to begin again."""
        self._num_changes += 1
        self._settled.clear()

    def change_ends(self) -> None:
        """Notes that all new weights have come, or that the change has failed. Requests that wait go on."""
        self._settled.set()

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """Replaces `AsyncLLM.generate` for a request that carries our identity. Yields the last output only."""
        attempt = 0
        while True:
            while not self._settled.is_set():  # another change may begin before this task runs
                await self._settled.wait()
            begun_at = self._num_changes
            latest = None
            async with aclosing(self._generate(prompt, params, request_id=f"{request_id}-{attempt}")) as outputs:
                async for output in outputs:
                    latest = output
                    if self._num_changes != begun_at:
                        break
            if self._num_changes == begun_at:
                if latest is not None:
                    yield latest
                return
            attempt += 1
            params = _with_drafts(params, [] if latest is None else latest.outputs[0].token_ids)


def _with_drafts(params: Any, text: list[int]) -> Any:
    """Returns sampling parameters with `text` as drafts, and with the drafts beyond it that they had before."""
    params = params.clone()
    identity = params.extra_args[EXTRA_ARGS_KEY]
    drafts = longest_known_text(text, identity.get("ahead", b""))
    params.extra_args = {**params.extra_args, EXTRA_ARGS_KEY: {**identity, "ahead": drafts}}
    return params
