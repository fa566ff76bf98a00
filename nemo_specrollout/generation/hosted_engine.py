# SPDX-License-Identifier: Apache-2.0
"""An engine that somebody else has started: requests with parameters of their own in, one step at a time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nemo_specrollout.generation.compat import (
    finished_output,
    going_on,
    is_portable,
    params_from_wire,
    params_to_wire,
    tokens_so_far,
)
from nemo_specrollout.generation.engine import Rollout, rollout_of
from nemo_specrollout.generation.identity import EXTRA_ARGS_KEY
from nemo_specrollout.generation.shard_request import ShardRequest
from nemo_specrollout.sampling.seeds import content_hash


class HostedEngine:
    """A `vllm.LLM`, as a `TurnEngine` drives one. Owns the names of its requests."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self.max_num_seqs = int(self._engine.vllm_config.scheduler_config.max_num_seqs)
        self._num_requests = 0

    def submit(self, requests: Sequence[ShardRequest], sampling: Mapping[str, Any]) -> list[str]:
        """Queues requests; the engine's ids of them. Nothing overrides their own parameters."""
        assert not sampling
        ids = [f"specrollout-{self._num_requests + i}" for i in range(len(requests))]
        self._num_requests += len(requests)
        for request_id, request in zip(ids, requests, strict=True):
            text, params = text_and_params(request, streams=False)
            self._engine.add_request(request_id, {"prompt_token_ids": text}, params)
        return ids

    def progress(self, request_id: str, start: int = 0) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of a request under way, from number `start` of those that this engine made."""
        return tokens_so_far(self._engine, request_id, start)

    def step(self) -> dict[str, Rollout]:
        """One step of all that is queued; the responses that it finished, by their ids."""
        return {o.request_id: rollout_of(o) for o in self._engine.step() if o.finished}

    def abort(self, ids: list[str]) -> None:
        """Forgets queued requests."""
        self._engine.abort_request(ids)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Its host does that."""
        raise NotImplementedError


def shard_requests(worker: int, prompts: Sequence[Any], params: Sequence[Any]) -> list[ShardRequest] | None:
    """What a worker is asked for, so that others can go on with it; None if any of it needs the engine that it began in."""
    if not all(map(is_portable, prompts, params)):
        return None
    return [shard_request((worker, i), p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]


def shard_request(home: tuple[int, int], prompt: Any, params: Any) -> ShardRequest:
    """One of them."""
    tokens = list(prompt["prompt_token_ids"])
    root = (params.extra_args or {}).get(EXTRA_ARGS_KEY, {}).get("prompt_length")  # a later turn's group is the first's
    return ShardRequest(tokens, content_hash(tokens[:root]), home, params_to_wire(params))


def text_and_params(request: ShardRequest, *, streams: bool) -> tuple[list[int], Any]:
    """What the engine is asked to go on with, and how: told at the end, or as it comes. Where it is told as it comes weights
    may change amid requests, and what was made elsewhere is computed again with the present weights."""
    num_prompt, num_prefix = len(request.prompt_token_ids), len(request.prefix_token_ids)
    params = going_on(params_from_wire(request.params), num_prompt, num_prefix, streams=streams)
    return [*request.prompt_token_ids, *request.prefix_token_ids], params


def as_vllm_returns(request: ShardRequest, request_id: str, made: Rollout) -> Any:
    """vLLM's own record of a finished request."""
    params = params_from_wire(request.params)
    return finished_output(
        request_id, list(request.prompt_token_ids), params, made.token_ids, made.logprobs, made.finish_reason
    )
