# SPDX-License-Identifier: Apache-2.0
"""Refuses bad requests in the caller's process, where vLLM admits requests, before they reach an engine core.

From 0.32 on, an engine of vLLM shows each request to the class method `validate_params` of its logits processors. This is
vLLM's own place for such checks. So the checks cover `LLM`, `AsyncLLM` and the OpenAI server, which answers with status 400.
`arguments.with_specrollout` names `RequestCheck` to vLLM. Versions before 0.32 take no logits processors on the V2 model
runner. There `RolloutSamplingParams` checks the requests of NeMo-RL, and the vLLM worker survives other bad requests.

vLLM hides the GPUs from the process while it imports this module, so the module must import nothing that needs one.
"""

from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.worker.gpu.sample import bad_words, logit_bias

from nemo_specrollout.generation.engine.identity import check_request

if TYPE_CHECKING:
    LogitsProcessor: Any = object
else:
    try:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
    except ImportError:  # before 0.32
        LogitsProcessor = object

_END_TOKENS = 8
"""Number of stop tokens for which a request must leave room, because vLLM later adds the model's own end tokens."""


def check_params(params: Any) -> None:
    """Raises ValueError, with field, value and fix, for sampling parameters that this package's engines cannot serve.

    An identity may be malformed or missing (`check_request`), or a list may be too long for the V2 model runner. vLLM itself
    would notice such a list only in the middle of an engine step.
    """
    check_request(params)
    lists = [
        ("allowed_token_ids", params.allowed_token_ids, logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", params.logit_bias, logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
    ]
    if params.min_tokens > 0:
        most = logit_bias.MAX_NUM_STOP_TOKEN_IDS - _END_TOKENS
        lists.append(("stop_token_ids with min_tokens", params.stop_token_ids, most))
    for name, given, most in lists:
        if given and len(given) > most:
            raise ValueError(f"{name}: {len(given)} tokens; vLLM's V2 model runner has room for {most}: send fewer")


def check_bad_words(params: Any) -> None:
    """Raises ValueError if `bad_words` has more tokens than the V2 model runner has room for."""
    words = params.bad_words_token_ids or ()
    limits = [
        ("MAX_NUM_BAD_WORDS", len(words), "words"),
        ("MAX_BAD_WORDS_TOTAL_TOKENS", sum(map(len, words)), "tokens in all"),
    ]
    for name, size, what in limits:
        most = getattr(bad_words, name, None) or getattr(envs, f"VLLM_{name}")  # a constant before 0.28
        if size > most:
            raise ValueError(f"bad_words: {size} {what}; vLLM's V2 model runner has room for {most}: send fewer")


class RequestCheck(LogitsProcessor):
    """A logits processor of vLLM that checks requests and changes no logits."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for a request that must not reach the engine."""
        check_params(sampling_params)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Returns False, which tells vLLM that this request needs no changes of its logits."""
        return False

    def apply(self, logits: Any, ctx: Any) -> Any:
        """Returns the logits unchanged."""
        return logits
