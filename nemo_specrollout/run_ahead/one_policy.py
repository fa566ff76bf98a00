# SPDX-License-Identifier: Apache-2.0
"""Requests of an asynchronous engine whose weights change while they run (`run_ahead`): each sample is of one policy."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, as_bytes

_LOOK_S = 0.005
"""Seconds between two looks whether a change has ended."""


class OnePolicyStream:
    """Makes requests begin again when weights have changed. Their text so far is drafts, so most of it is verified at once.

    Owns the count of changes. A change begins before the first new tensor arrives and ends after the last one, and both
    count. So a request that overlaps with any part of a change begins again, even if it has just ended.
    """

    def __init__(self, generate: Callable[..., AsyncGenerator[Any, None]]) -> None:
        """`generate` is vLLM's own method."""
        self._generate = generate
        self._num_changes = 0

    def weights_change(self) -> None:
        """Notes that a change of the weights begins or ends."""
        self._num_changes += 1

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """Replaces `AsyncLLM.generate` for a request that carries our identity. Yields the last output only."""
        attempt = 0
        while True:
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
            while self._num_changes % 2:
                await asyncio.sleep(_LOOK_S)
            params = _with_drafts(params, [] if latest is None else latest.outputs[0].token_ids)


def _with_drafts(params: Any, text: list[int]) -> Any:
    """Returns sampling parameters that bring `text` as drafts. No prefix that older weights have cached is read."""
    params = params.clone()
    identity = {**params.extra_args[EXTRA_ARGS_KEY], "ahead": as_bytes(text)}
    params.extra_args = {**params.extra_args, EXTRA_ARGS_KEY: identity}
    params.skip_reading_prefix_cache = True
    return params
