# SPDX-License-Identifier: Apache-2.0
"""Converts vLLM's requests and outputs to and from the form in which engines can hand requests over to each other."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm import exceptions as vllm_exceptions
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from nemo_specrollout.config.staying_requests import PLUGINS, WHY_ALL_STAY, plugins_here
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.admission import check_bad_words, check_params
from nemo_specrollout.generation.engine.ahead_branches import after_prefix, pack, unpack
from nemo_specrollout.generation.engine.arguments import users_processors
from nemo_specrollout.generation.engine.identity import given_identity
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY, TOKEN_BYTES, Rollout, ShardRequest
from nemo_specrollout.sampling.seeds import content_hash

REFUSALS = (ValueError, getattr(vllm_exceptions, "VLLMError", ValueError))
"""Exceptions that vLLM may raise for a request that it does not accept."""
REFUSAL: type[Exception] = getattr(vllm_exceptions, "VLLMValidationError", ValueError)
"""Exception that makes the HTTP servers of vLLM and NeMo-RL answer with status 400."""

_PORTABLE_PARAMS = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "extra_args",
    "seed",
    "logit_bias",
    "allowed_token_ids",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "skip_clone",
    "skip_reading_prefix_cache",
    "_all_stop_token_ids",
    "_eos_token_id",
}
"""Sampling parameters with which another engine can continue a request. They concern one position at a time, or no token at
all.

Every other parameter depends on the response from its beginning, or asks for something that an engine returns only for tokens
that it has sampled itself."""


@contextmanager
def refused_as_by_vllm() -> Iterator[None]:
    """Turns a ValueError that is raised within the context into vLLM's error for a bad request."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, REFUSAL):
            raise
        raise REFUSAL(str(error)) from error


class RolloutSamplingParams(SamplingParams):
    """vLLM's `SamplingParams`, with checks that allow min-p and logit bias together with drafts.

    This package's sampler supports min-p and logit bias with drafts, and vLLM's own does not. Every version of vLLM calls the
    checks before it admits a request. So a bad request is refused before it reaches the engine.
    """

    @classmethod
    def of(cls, params: SamplingParams) -> "RolloutSamplingParams":
        """Returns `params` as an object of this class. Values that vLLM has derived from other values are copied too."""
        copied = cls.__new__(cls)
        for name in params.__struct_fields__:
            setattr(copied, name, getattr(params, name))
        return copied

    def verify(self, *engine: Any, **more: Any) -> None:
        """Checks the parameters as vLLM does, and then by this package's rules. Raises vLLM's errors for a bad request."""
        super().verify(*engine, **more)
        with refused_as_by_vllm():
            check_params(self)

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        """Turns bad words into tokens as vLLM does, and checks their number. Raises vLLM's errors for a bad request."""
        super().update_from_tokenizer(tokenizer)
        with refused_as_by_vllm():
            check_bad_words(self)

    def _validate_spec_decode(self, speculative_config: Any) -> None:
        """Accepts `min_p` and `logit_bias` together with drafts, which vLLM's own check would refuse."""
        if speculative_config is not None and getattr(self, "logprob_token_ids", None) and not compat.CHOOSES_ON_DEVICE:
            raise REFUSAL(
                "logprob_token_ids: with drafts it needs vLLM 0.32 or later; ask for `logprobs`, or set drafters to []"
            )


def reason_to_stay(vllm_config: Any) -> str | None:
    """Returns why no request may leave an engine with this vLLM config, or None if requests may leave it.

    An engine that continues another engine's request takes the text so far for its prompt. So tokens would change if they
    depend on where the prompt ends. Examples are a logits processor that counts tokens, and attention that sees only some of
    the tokens.
    """
    has = properties_of(vllm_config)
    return next((f"{name}: {WHY_ALL_STAY[name]}" for name, value in has.items() if value), None)


def properties_of(vllm_config: Any) -> dict[str, Any]:
    """Returns the values that an engine with this vLLM config has for the properties in `WHY_ALL_STAY`, by name.

    A true value means that no request may leave the engine.
    """
    model = vllm_config.model_config
    outputs = compat.output_options(vllm_config)
    return {
        "logits_processors": users_processors(model.logits_processors),
        PLUGINS: plugins_here(),
        "watermark_config": getattr(vllm_config, "watermark_config", None),
        "enable_return_routed_experts": getattr(outputs, "enable_return_routed_experts", False),
        "return_sampling_mask": getattr(model, "return_sampling_mask", False),
        "rswa_window": getattr(model, "rswa_window", None) is not None,
        "canvas_length": getattr(model, "is_diffusion", False),
    }


def is_portable(prompt: Any, params: Any, stays: str | None) -> bool:
    """Returns whether another engine can continue a request from any token.

    `stays` is the result of `reason_to_stay` for the request's engine. A portable request has a text prompt, a seed that is
    the same in all engines, and sampling parameters that look at one position at a time. So a request with stop strings,
    penalties, a thinking budget or a minimum length is not portable, because these need the response from its beginning. A
    request with the user's own entries in `extra_args` is not portable either, because the user's code may need the same.
    """
    if stays is not None or not isinstance(prompt, Mapping) or set(prompt) != {"prompt_token_ids"}:
        return False
    extra = params.extra_args or {}
    identity = extra.get(EXTRA_ARGS_KEY)
    if len(extra) != 1 or not isinstance(identity, Mapping) or "seed" not in identity:
        return False
    default = type(params)(logprobs=0)
    others = set(type(params).__struct_fields__) - _PORTABLE_PARAMS
    is_default = all(_are_equal(getattr(params, name), getattr(default, name)) for name in others)
    return is_default and params.logprobs == 0 and params.max_tokens is not None


def _are_equal(value: Any, default: Any) -> bool:
    """Returns whether a parameter has its default value. An empty list counts as None, but 0 and False do not."""
    if _is_empty(value) or _is_empty(default):
        return _is_empty(value) and _is_empty(default)
    return bool(value == default)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Sized) and len(value) == 0)


def shard_requests(
    engine: int, prompts: Sequence[Any], params: Sequence[Any], stays: str | None
) -> list[ShardRequest] | None:
    """Returns the requests of engine number `engine` in a form that other engines can continue. None if one is not portable.

    `stays` is the result of `reason_to_stay` for the engine. If it is not None, the engine cannot continue requests of other
    engines either. Then the result is None even if there are no requests.
    """
    if stays is not None or not all(is_portable(*request, stays) for request in zip(prompts, params, strict=True)):
        return None
    return [shard_request((engine, i), p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]


def shard_request(home: tuple[int, int], prompt: Any, params: Any) -> ShardRequest:
    """Returns a portable request in a form that other engines can continue. `home` is as in `ShardRequest`.

    Raises vLLM's error for a bad request if the request's identity is malformed.
    """
    tokens = list(prompt["prompt_token_ids"])
    with refused_as_by_vllm():
        given = given_identity(params)
    first_turn = given.prompt_length  # all turns of a conversation belong to the group of its first prompt
    num_ahead = len(given.ahead) // TOKEN_BYTES
    group = content_hash(tokens[:first_turn])
    return ShardRequest(tokens, group, home, msgspec.msgpack.encode(params), num_ahead=num_ahead)


def text_and_params(request: ShardRequest, *, streams: bool) -> tuple[list[int], Any]:
    """Returns the token ids and the sampling parameters with which an engine continues a request.

    If `streams` is true, tokens are returned one by one, and weights may change while the request runs. A request that already
    has a part of its response then reads no cached KV, because older weights may have computed it.
    """
    num_prompt = len(request.prompt_token_ids)
    num_prefix = len(request.prefix_token_ids)
    params = sampling_params(request)
    params.output_kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    if num_prefix:
        identity = {"prompt_length": num_prompt, **params.extra_args[EXTRA_ARGS_KEY]}
        if "ahead" in identity:
            identity["ahead"] = identity["ahead"][TOKEN_BYTES * num_prefix :]
        if "branches" in identity:
            identity["branches"] = pack(after_prefix(unpack(identity["branches"]), num_prefix))
        params.extra_args = {**params.extra_args, EXTRA_ARGS_KEY: identity}
        params.max_tokens -= num_prefix
        params.skip_reading_prefix_cache = streams or params.skip_reading_prefix_cache
    return [*request.prompt_token_ids, *request.prefix_token_ids], params


def sampling_params(request: ShardRequest) -> Any:
    """Returns a request's vLLM sampling parameters, decoded from the msgpack in `request.params`."""
    return msgspec.msgpack.decode(request.params, type=RolloutSamplingParams)


def as_vllm_returns(request: ShardRequest, request_id: str, rollout: Rollout) -> RequestOutput:
    """Returns a response in the form in which vLLM returns a finished request, but without the decoded text."""
    tokens = rollout.token_ids
    logprobs = rollout.logprobs
    reason = rollout.finish_reason
    is_stop_token = reason == "stop" and tokens[-1] != sampling_params(request).eos_token_id
    entries = [{token: Logprob(logprob)} for token, logprob in zip(tokens, logprobs, strict=True)]
    completion = CompletionOutput(
        0, "", tokens, sum(logprobs), entries, finish_reason=reason, stop_reason=tokens[-1] if is_stop_token else None
    )
    return RequestOutput(request_id, None, list(request.prompt_token_ids), None, [completion], finished=True)
