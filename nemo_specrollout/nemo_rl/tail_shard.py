# SPDX-License-Identifier: Apache-2.0
"""The tail, in an actor of NeMo-RL around a synchronous engine: its shard is rolled out together with the others'."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from nemo_specrollout.generation.hosted_engine import HostedEngine, as_vllm_returns, shard_requests
from nemo_specrollout.nemo_rl.tail_link import TailLink
from nemo_specrollout.racing.shard_rollout import ShardRollout

logger = logging.getLogger(__name__)


class ShardTail:
    """Stands in for `vllm.LLM.generate`. Owns the engine's end of the line."""

    def __init__(self, llm: Any, actor: Any, worker: int) -> None:
        self._engine, self._link, self._worker = HostedEngine(llm), TailLink(actor, worker), worker
        self._has_warned = False

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], native: Callable[[], list[Any]]) -> list[Any]:
        """vLLM's records of the requests, in their order; `native` makes them where one of them cannot go on elsewhere."""
        requests = shard_requests(self._worker, prompts, params)
        if requests is None:
            self._link.leave()
            return native()
        rollout = ShardRollout(self._worker, self._engine, self._link)
        made = rollout.run(requests)
        if rollout.failure is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("specrollout: nothing moves any more, each engine does its own share: %s", rollout.failure)
        return [as_vllm_returns(r, str(i), m) for i, (r, m) in enumerate(zip(requests, made, strict=True))]

    def help(self) -> None:
        """The shard is empty."""
        self.generate([], [], list)
