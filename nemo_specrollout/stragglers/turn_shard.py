# SPDX-License-Identifier: Apache-2.0
"""A synchronous engine's part in the rollouts that it shares with other engines."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from nemo_specrollout.generation.engine.hosted_engine import HostedEngine
from nemo_specrollout.generation.engine.vllm_requests import as_vllm_returns, reason_to_stay, shard_requests
from nemo_specrollout.stragglers.exchange import StragglerExchange
from nemo_specrollout.stragglers.turn_engine import Ask, roll_out_shard
from nemo_specrollout.stragglers.turns import ExchangeFailed, IdleWork

logger = logging.getLogger(__name__)

_ABOUT_PROGRESS = {"use_tqdm"}
"""Arguments of `vllm.LLM.generate` that only concern the display of progress, so that no token depends on them."""


class TurnShard:
    """Replaces `vllm.LLM.generate` of a synchronous engine, so that several engines roll out their requests together."""

    def __init__(self, llm: Any, number: int, ask: Ask, idle: IdleWork | None = None) -> None:
        """`number` is the engine's number in the exchange, which `ask` calls.

        `idle` decodes requests of coming steps in the engine.
        """
        self._hosted = HostedEngine(llm)
        self._number = number
        self._ask = ask
        self._idle = idle
        self._stays = reason_to_stay(llm.llm_engine.vllm_config)
        self._has_warned = False

    def generate(
        self, prompts: Sequence[Any], params: Sequence[Any], native: Callable[[], list[Any]], **arguments: Any
    ) -> list[Any]:
        """Returns vLLM's outputs for the requests, in their order.

        The engine works alone if one of the requests cannot continue in another engine, or if the exchange is lost. It then
        calls `native`, which is vLLM's own method.

        `arguments` are the arguments of vLLM's `generate` besides prompts and parameters. With any argument that is not in
        `_ABOUT_PROGRESS`, such as a LoRA adapter, the engine works alone as well, because other engines would not get it.
        """
        is_plain = {name for name, value in arguments.items() if value is not None} <= _ABOUT_PROGRESS
        requests = shard_requests(self._number, prompts, params, self._stays) if is_plain else None
        if requests is None:
            with suppress(ExchangeFailed):
                self._ask(StragglerExchange.leave)()
            if self._stays is not None:
                self._warn(f"no request leaves this engine ({self._stays})")
            return native()
        try:
            made = roll_out_shard(self._hosted, self._ask, requests, self._idle)
        except ExchangeFailed as error:
            self._warn(f"the exchange failed, so each engine makes its own requests: {error}")
            return native()
        return [as_vllm_returns(r, str(i), m) for i, (r, m) in enumerate(zip(requests, made, strict=True))]

    def _warn(self, sentence: str) -> None:
        """Logs a sentence as a warning, but only the first time that it is called."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("specrollout: %s", sentence)
