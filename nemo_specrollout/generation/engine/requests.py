# SPDX-License-Identifier: Apache-2.0
"""Rollout requests as plain data, with their identities, seeds and results. vLLM is not imported."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_specrollout.generation.engine.ahead_branches import (
    TOKEN_BYTES,
    AheadBranch,
    after_prefix,
    num_common,
    pack,
    paths_of,
)
from nemo_specrollout.sampling.seeds import request_seed

EXTRA_ARGS_KEY = "specrollout"
"""Key in `SamplingParams.extra_args` under which a request carries its identity."""


@dataclass(frozen=True)
class RolloutRequest:
    """A request for one sample of one prompt. Its `prompt_index`, `sample_index` and `policy_version` determine its noise."""

    prompt_token_ids: Sequence[int]
    prompt_index: int
    sample_index: int
    policy_version: int = 0
    speculate: bool = True
    """False for a request that must be decoded without drafts, as in an equality check."""
    exact_length: int | None = None
    """Number of tokens that the response must have, for timing engine steps. With None, the response ends at a stop token."""
    prefix_token_ids: Sequence[int] = ()
    """Beginning of the response, which another engine has sampled and which this engine continues."""
    ahead: bytes = b""
    """Token ids of the expected response, as int32 numbers, for the drafter `ahead`. Older weights have sampled it with the
    same noise."""
    branches: tuple[AheadBranch, ...] = ()
    """Other responses that are possible instead of the expected one (`ahead`). Each parts from its parent at a near-tie."""
    ties: int | None = None
    """Name under which the vLLM worker keeps the near-ties of the request, or None if they are not needed. A near-tie is a
    token whose score is hardly higher than the second-best score."""
    is_early: bool = False
    """Whether the request belongs to a coming training step. When that step comes, newer weights decode the request again, so
    this response is not a sample."""

    @property
    def num_ahead(self) -> int:
        """Number of tokens in `ahead`, the expected response. The real response will probably be at least as long."""
        return len(self.ahead) // TOKEN_BYTES

    def noise_seed(self, engine_seed: int) -> int:
        """Returns the seed of the request's noise in an engine whose own seed is `engine_seed`."""
        return request_seed(engine_seed, self.prompt_index, self.sample_index, self.policy_version)


@dataclass(frozen=True)
class ShardRequest:
    """A request that engines can hand over to each other. It has sampling parameters of its own."""

    prompt_token_ids: Sequence[int]
    prompt_index: int
    """Number that is the same for all samples of one prompt."""
    home: tuple[int, int]
    """Number of the engine that received the request from NeMo-RL, and index of the request in that engine."""
    params: bytes
    """vLLM's `SamplingParams`, including the seed, encoded as msgpack. So a process that only passes the request on need not
    import vLLM."""
    prefix_token_ids: Sequence[int] = ()
    """Beginning of the response, which another engine has sampled."""
    num_ahead: int = 0
    """Number of tokens of the text that was made ahead for the request. The real response will probably be at least as
    long."""


@dataclass(frozen=True)
class Rollout:
    """A finished response to a request.

    `logprobs` has the log-prob of each token in the distribution from which the token was sampled. With greedy sampling it is
    the log-prob at temperature 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """`stop` or `length`."""

    @classmethod
    def from_vllm(cls, finished: Any) -> "Rollout":
        """Returns the response that is in vLLM's `RequestOutput` of a finished request."""
        output = finished.outputs[0]
        token_ids = list(output.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, token_ids, strict=True)]
        return cls(token_ids, logprobs, output.finish_reason)


@dataclass(frozen=True)
class RequestIdentity:
    """What the vLLM worker knows about a request in addition to its text and its sampling parameters."""

    seed: int
    """Seed of the request's noise."""
    group: int
    """Number that is the same for all samples of one prompt."""
    speculate: bool = True
    """False for a request that must be decoded without drafts."""
    ahead: bytes = b""
    """Token ids of the text that is expected after the prompt, as int32 numbers."""
    branches: tuple[AheadBranch, ...] = ()
    """Other texts that may follow the prompt instead of `ahead`."""
    ties: int | None = None
    """Name under which the near-ties of the request are kept, or None if they are not needed. A near-tie is a token whose
    score is hardly higher than the second-best score."""
    is_early: bool = False
    """Whether newer weights will decode the request again, in a coming training step or after a weight update within the step.

    The tokens of such a request are never trained on. So its near-ties are kept, but no statistics."""


@dataclass(frozen=True)
class NewRequest:
    """A request that has just taken a slot of vLLM's model runner."""

    slot: int
    identity: RequestIdentity
    prompt_length: int
    """Number of tokens of the prompt."""
    token_ids: Sequence[int]
    """Text of the request so far. It is the prompt, and after a preemption also the tokens that were sampled before."""
    limit: int
    """Largest number of tokens that the text may have, including the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    sampling_params: Any = None
    """vLLM's sampling parameters."""
    num_cached: int = 0
    """Number of tokens of `token_ids` whose KV was cached, so that a drafter with weights need not read them."""

    @classmethod
    def from_vllm(cls, new: Any, identity: RequestIdentity, slot: int, max_model_len: int) -> "NewRequest":
        """Returns the record for the request in vLLM's `NewRequestData`, which has been given request slot `slot`."""
        params = new.sampling_params
        prompt_length = len(new.prefill_token_ids if new.prompt_token_ids is None else new.prompt_token_ids)
        limit = min(max_model_len, prompt_length + params.max_tokens)
        eos = set() if params.ignore_eos or params.eos_token_id is None else {params.eos_token_id}
        stop_token_ids = frozenset(params.stop_token_ids or ()) | eos
        known = (prompt_length, new.prefill_token_ids, limit, stop_token_ids, params)
        return cls(slot, identity, *known, num_cached=new.num_computed_tokens)

    @property
    def paths(self) -> list[np.ndarray]:
        """The texts made ahead that the request carries, as int32 arrays. The first is `ahead`, and its branches follow."""
        return paths_of(self.identity.ahead, self.identity.branches)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in `token_ids`."""
        return len(self.token_ids)


def rollout_extra_args(request: RolloutRequest) -> dict[str, dict[str, int | bytes]]:
    """Returns vLLM's `extra_args` for a rollout request.

    From these and from the engine's seed, the vLLM worker derives the noise of the request.
    """
    identity: dict[str, int | bytes] = {
        "prompt_index": request.prompt_index,
        "sample_index": request.sample_index,
        "policy_version": request.policy_version,
        "speculate": request.speculate,
    }
    if request.prefix_token_ids:
        identity["prompt_length"] = len(request.prompt_token_ids)
    if request.ahead:
        identity["ahead"] = request.ahead[TOKEN_BYTES * len(request.prefix_token_ids) :]
    if request.branches:
        identity["branches"] = pack(after_prefix(request.branches, len(request.prefix_token_ids)))
    if request.ties is not None:
        identity["ties"] = request.ties
    if request.is_early:
        identity["early"] = True
    return {EXTRA_ARGS_KEY: identity}


def num_kept(ahead: bytes, token_ids: Sequence[int] | np.ndarray) -> int:
    """Returns how many tokens at the beginning of a text made ahead (`ahead`) are the same in the response."""
    text = np.frombuffer(ahead, np.int32)
    return num_common(text, np.asarray(token_ids[: len(text)]))


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """Returns the token ids of a text as bytes of int32 numbers, the form in which requests carry texts."""
    return array("i", token_ids).tobytes()
