# SPDX-License-Identifier: Apache-2.0
"""An engine that NeMo-RL has started, driven one step at a time with requests that carry their own sampling parameters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nemo_specrollout.generation.requests import Rollout, ShardRequest
from nemo_specrollout.generation.vllm_requests import text_and_params, tokens_so_far


class HostedEngine:
    """A `vllm.LLM` of NeMo-RL's, with the methods by which a shard rollout drives an engine. Owns its requests' ids."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self.max_num_seqs = int(self._engine.vllm_config.scheduler_config.max_num_seqs)
        self._num_requests = 0

    def submit(self, requests: Sequence[ShardRequest], sampling: Mapping[str, Any]) -> list[str]:
        """Queues requests and returns their ids. `sampling` must be empty: requests have their own parameters."""
        assert not sampling
        ids = [f"specrollout-{self._num_requests + i}" for i in range(len(requests))]
        self._num_requests += len(requests)
        for request_id, request in zip(ids, requests, strict=True):
            text, params = text_and_params(request, streams=False)
            self._engine.add_request(request_id, {"prompt_token_ids": text}, params)
        return ids

    def progress(self, request_id: str, start: int = 0) -> tuple[list[int], list[float]]:
        """Returns tokens and log-probs that this engine sampled for an unfinished request, from token `start` on."""
        return tokens_so_far(self._engine, request_id, start)

    def step(self) -> dict[str, Rollout]:
        """Runs one engine step. Returns the responses that it finished, by request id."""
        return {o.request_id: Rollout.from_vllm(o) for o in self._engine.step() if o.finished}

    def abort(self, ids: list[str]) -> None:
        """Removes unfinished requests."""
        self._engine.abort_request(ids)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises NotImplementedError: NeMo-RL updates the weights of its engines."""
        raise NotImplementedError
