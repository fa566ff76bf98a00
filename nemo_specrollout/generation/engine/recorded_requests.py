# SPDX-License-Identifier: Apache-2.0
"""Turns vLLM's requests and outputs into the rows that an audit recomputes (`audit/rows.py`).

An audit checks afterwards whether the recorded tokens are those that the policy samples.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from vllm.sampling_params import RequestOutputKind

from nemo_specrollout.audit.recorder import RowRecorder
from nemo_specrollout.audit.rows import EngineFacts, FinishedRow, RowParams
from nemo_specrollout.config.staying_requests import PLUGINS
from nemo_specrollout.generation.engine.requests import EXTRA_ARGS_KEY
from nemo_specrollout.generation.engine.vllm_requests import properties_of

_COMPUTED = {
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "allowed_token_ids",
}
"""Sampling parameters that change which token is sampled, and whose effect an audit can compute from their values alone."""
_CHANGE_NO_TOKEN = {
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "output_text_buffer_length",
    "_eos_token_id",
    "_all_stop_token_ids",
    "_watermarking_skipped",
    "extra_args",
    "bad_words",
    "_bad_words_token_ids",
    "skip_reading_prefix_cache",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
}
"""Sampling parameters that change no token, or that `row_params` treats separately."""
_ENGINE_CHANGES = {
    "logits_processors": "a logits processor of the user's",
    PLUGINS: "a logits processor of an installed package",
    "watermark_config": "a watermark",
    "rswa_window": "attention that depends on where the prompt ends",
    "canvas_length": "a diffusion model",
}


def changes_of_engine(vllm_config: Any) -> tuple[str, ...]:
    """Returns, in words, what makes an engine sample other tokens than an audit would compute."""
    has = properties_of(vllm_config)
    return tuple(words for name, words in _ENGINE_CHANGES.items() if has.get(name))


def row_params(params: Any, prompt: Any = None, changes: Iterable[str] = ()) -> RowParams:
    """Returns the sampling parameters on which the tokens of a request depend.

    Args:
        params: vLLM's `SamplingParams`.
        prompt: vLLM's prompt, such as a mapping with "prompt_token_ids", or None if it is not known.
        changes: other things that change the request's tokens, in words.
    """
    default = type(params)()
    others = set(params.__struct_fields__) - _COMPUTED - _CHANGE_NO_TOKEN
    unknown = [*changes, *(name for name in sorted(others) if getattr(params, name) != getattr(default, name))]
    if isinstance(prompt, Mapping) and not {"prompt_token_ids"} >= set(prompt):
        unknown.append("a prompt with more than text")
    if params.min_tokens:
        unknown.append("min_tokens")
    bad_words = params._bad_words_token_ids or ()
    if params.bad_words and not bad_words:
        unknown.append("bad_words")
    return RowParams(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        logit_bias=dict(params.logit_bias or {}),
        bad_words=tuple(map(tuple, bad_words)),
        unknown=tuple(unknown),
    )


class RequestRecorder:
    """Records the requests of one engine for an audit. Owns the sampling parameters of the rows that are running."""

    def __init__(self, folder: Path, engine: int, vllm_config: Any, version: str) -> None:
        """`folder` receives the files, `engine` is the number of the engine, and `version` is the version of vLLM."""
        model = vllm_config.model_config
        dtype = str(model.dtype).removeprefix("torch.")
        self.rows = RowRecorder(folder, EngineFacts(engine, version, dtype, model.logprobs_mode == "raw_logprobs"))
        self._changes = changes_of_engine(vllm_config)
        self._params = dict[int, RowParams]()

    def begun(self, prompts: Sequence[Any], params: Sequence[Any]) -> None:
        """Notes the sampling parameters of rows that start. Each row has its seed in the `extra_args` of its parameters."""
        for prompt, of_row in zip(prompts, params, strict=True):
            self._params[_seed_of(of_row)] = row_params(of_row, prompt, self._changes)

    def ended(self, seed: int, prompt: Any, token_ids: Any, logprobs: Any) -> None:
        """Records the row with this seed, with the sampling parameters that `begun` has noted for it.

        A row without any token is not recorded.
        """
        params = self._params.pop(seed, None)
        if params is not None and len(token_ids):
            self.rows.add(FinishedRow(seed, prompt, token_ids, logprobs, params))

    async def followed(self, outputs: AsyncGenerator[Any, None], prompt: Any, params: Any) -> AsyncGenerator[Any, None]:
        """Yields the outputs of a request that is not one of NeMo-RL's rows, and records the request when it ends.

        A request for several samples (`n` above 1) is not recorded.
        """
        token_ids = list[int]()
        logprobs = list[float | None]()
        async with aclosing(outputs):
            async for output in outputs:
                (completion, *_) = output.outputs
                if params.output_kind is not RequestOutputKind.DELTA:
                    token_ids, logprobs = [], []
                token_ids += completion.token_ids
                logprobs += _logprobs_of(completion)
                if output.finished and params.n == 1 and token_ids:
                    known = None if None in logprobs else logprobs
                    of_row = row_params(params, prompt, self._changes)
                    row = FinishedRow(_seed_of(params), output.prompt_token_ids or [], token_ids, known, of_row)  # type: ignore[arg-type]
                    self.rows.add(row)
                yield output


def _seed_of(params: Any) -> int:
    return int(params.extra_args[EXTRA_ARGS_KEY].get("seed", -1))


def _logprobs_of(completion: Any) -> list[float | None]:
    """Returns the log-prob of each token of an output, or None for a token for which vLLM has returned no log-prob."""
    if not completion.logprobs:
        return [None] * len(completion.token_ids)
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return [entry[token].logprob if entry and token in entry else None for entry, token in pairs]
