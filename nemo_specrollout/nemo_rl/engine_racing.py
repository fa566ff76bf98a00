# SPDX-License-Identifier: Apache-2.0
"""An engine's part in moves and races of requests: its calls of the exchange, and its requests while it is connected."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from nemo_specrollout.generation.engine import HostedEngine
from nemo_specrollout.generation.vllm_requests import as_vllm_returns, shard_requests
from nemo_specrollout.nemo_rl.ray_calls import PATIENCE_S, answer_of, ray_errors_as_exchange_failed
from nemo_specrollout.racing.turn_engine import roll_out_shard
from nemo_specrollout.racing.turns import ExchangeFailed

logger = logging.getLogger(__name__)


def ask_exchange(actor: Any, engine: int, method: str, *arguments: Any) -> Callable[[], Any]:
    """Calls a method of the exchange for an engine. Returns a function that waits for the answer or raises ExchangeFailed."""
    return partial(answer_of, getattr(actor, method).remote(engine, *arguments))


async def ask_exchange_async(actor: Any, engine: int, method: str, *arguments: Any) -> Any:
    """Calls a method of the exchange for an engine, and returns the answer. Raises ExchangeFailed."""
    with ray_errors_as_exchange_failed():
        return await asyncio.wait_for(getattr(actor, method).remote(engine, *arguments), PATIENCE_S)


class ShardRacing:
    """Stands in for `vllm.LLM.generate` of a synchronous engine, whose shard is rolled out together with the others'."""

    def __init__(self, llm: Any, actor: Any, engine: int) -> None:
        self._hosted, self._ask, self._engine = HostedEngine(llm), partial(ask_exchange, actor, engine), engine
        self._has_warned = False

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], native: Callable[[], list[Any]]) -> list[Any]:
        """Returns vLLM's records of the requests, in their order.

        The engine works alone, by `native`, if one of the requests cannot go on in another engine, or the exchange is lost.
        """
        requests = shard_requests(self._engine, prompts, params)
        if requests is None:
            with suppress(ExchangeFailed):
                self._ask("leave")()
            return native()
        try:
            made = roll_out_shard(self._hosted, self._ask, requests)
        except ExchangeFailed as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("specrollout: the exchange failed, so each engine makes its own requests: %s", error)
            return native()
        return [as_vllm_returns(r, str(i), m) for i, (r, m) in enumerate(zip(requests, made, strict=True))]
