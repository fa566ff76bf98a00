# SPDX-License-Identifier: Apache-2.0
"""The records of rows (samples) from which an audit can compute the rows' tokens again, and the files that contain them.

A file is a compressed archive of numpy, so `numpy.load(file)` reads it without this package. It has B rows that an engine
finished at about the same time, with U different prompts.

| array | content |
|---|---|
| `facts` | JSON as bytes, with format, engine, version of vLLM, dtype, and the different sampling parameters of the rows |
| `seeds_B` | seed of the noise in the engine, int64 |
| `params_B`, `prompts_B` | index of the row's sampling parameters and of its prompt, int32 |
| `prompt_lengths_U`, `lengths_B` | tokens of each prompt and of each response, int32 |
| `prompt_tokens`, `tokens` | token ids of all prompts and of all responses, one after another, int32 |
| `logprobs` | the engine's log-prob of each token in `tokens`, float32, or NaN where it was not asked for |
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrollout.storage.files import replacing_file

Array = np.ndarray[Any, np.dtype[Any]]
FOLDER = "rows"
"""Name of the folder that has a run's files of rows. It is beside the run's other records."""
FORMAT = 1
"""Version of the format of files of rows."""


@dataclass(frozen=True)
class RowParams:
    """Those sampling parameters of a row that change which tokens are sampled. With the defaults, no logit is changed."""

    temperature: float = 1.0
    top_k: int = 0
    """Number of the most likely tokens from which one is sampled, or 0 for all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens, such as the end-of-text token, that may not be among the first `min_tokens`. Empty if `min_tokens` is 0."""
    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not occur in the response."""
    unknown: tuple[str, ...] = ()
    """Names of further parameters that change the tokens but that an audit cannot apply, such as "structured outputs"."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RowParams":
        """Returns the parameters whose JSON form is `values`. In JSON, tuples are lists, and token ids as keys are strings."""
        tuples = {name: tuple(values[name]) for name in ("stop_token_ids", "allowed_token_ids", "unknown")}
        bad_words = tuple(map(tuple, values["bad_words"]))
        logit_bias = {int(token): bias for token, bias in values["logit_bias"].items()}
        return cls(**{**values, **tuples, "bad_words": bad_words, "logit_bias": logit_bias})


@dataclass(frozen=True)
class FinishedRow:
    """One response that an engine has finished, with what an audit needs to compute its tokens again."""

    seed: int
    """The seed from which the engine computed the request's sampling noise."""
    prompt_token_ids: Sequence[int] | Array
    token_ids: Sequence[int] | Array
    """The tokens of the response."""
    logprobs: Sequence[float] | Array | None
    """The engine's log-prob of each token of the response, or None if the request did not ask for log-probs."""
    params: RowParams


@dataclass(frozen=True)
class RecordedRow:
    """One recorded response, with its step, its number in the step, and the policy versions that sampled it."""

    step: int
    number: int
    """Number of the row among the rows of its step, from 0."""
    seed: int
    """The seed from which the engine computed the request's sampling noise."""
    prompt_token_ids: Array
    """The tokens of the prompt, int32, shape [prompt]."""
    token_ids: Array
    """The tokens of the response, int32, shape [T]."""
    logprobs: Array
    """The engine's log-prob of each token of the response, float32, shape [T]. A log-prob that is not known is NaN."""
    policy_spans: tuple[tuple[int, int], ...]
    """Pairs of a policy version and the first position that it sampled. Positions count from the start of the prompt."""
    params: RowParams = field(default_factory=RowParams)
    read_again: tuple[int, ...] = ()
    """Those first positions in `policy_spans` before which the engine computed the KV cache of all earlier text again."""

    @property
    def text(self) -> Array:
        """The tokens of the prompt and then of the response, int32, shape [prompt + T]."""
        return np.concatenate([self.prompt_token_ids, self.token_ids])


@dataclass(frozen=True)
class EngineFacts:
    """The facts about an engine that an audit needs to compute the engine's rows again."""

    engine: int
    """Number of the engine in its run."""
    vllm: str
    """Version of the engine's vLLM. It determines how the sampling noise is computed."""
    dtype: str
    """Precision in which the engine computes: float32, bfloat16 or float16."""
    raw_logprobs: bool = False
    """True if the engine's log-probs come from the logits before temperature, penalties and other sampling parameters."""


def write_rows(file: Path, facts: EngineFacts, rows: Sequence[FinishedRow]) -> None:
    """Writes finished rows of one engine to a new file. The file appears only when it is complete. Raises OSError."""
    params = list[RowParams]()
    prompts = dict[bytes, int]()
    params_B, prompts_B = [], []
    for row in rows:
        if row.params not in params[-1:]:
            params.append(row.params)
        params_B.append(len(params) - 1)
        prompt = np.asarray(row.prompt_token_ids, np.int32).tobytes()
        prompts_B.append(prompts.setdefault(prompt, len(prompts)))
    about = {"format": FORMAT, **asdict(facts), "params": [asdict(each) for each in params]}
    logprobs = [np.full(len(r.token_ids), np.nan) if r.logprobs is None else r.logprobs for r in rows]
    arrays: dict[str, Array] = {
        "facts": np.frombuffer(json.dumps(about).encode(), np.uint8),
        "seeds_B": np.array([row.seed for row in rows], np.int64),
        "params_B": np.array(params_B, np.int32),
        "prompts_B": np.array(prompts_B, np.int32),
        "prompt_lengths_U": np.array([len(prompt) // 4 for prompt in prompts], np.int32),
        "lengths_B": np.array([len(row.token_ids) for row in rows], np.int32),
        "prompt_tokens": np.frombuffer(b"".join(prompts), np.int32),
        "tokens": _joined([row.token_ids for row in rows], np.int32),
        "logprobs": _joined(logprobs, np.float32),
    }
    with replacing_file(file) as temporary, temporary.open("wb") as output:
        np.savez_compressed(output, **arrays)  # type: ignore[arg-type]  # names of arrays, not of options


def _joined(parts: Sequence[Any], dtype: Any) -> Array:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


class RowFile:
    """A file of rows. It reads the tokens and log-probs only when the first row is asked for."""

    def __init__(self, path: Path) -> None:
        """Reads the facts and the seeds of a file of rows.

        Raises ValueError with the file's name if the file is damaged or has another version of the format.
        """
        self.path = path
        facts, seeds_B = self._read("facts", "seeds_B")
        about = json.loads(facts.tobytes())
        if about.get("format") != FORMAT:
            raise ValueError(f"{path} was written by another version of nemo-specrollout")
        self.facts = EngineFacts(**{name: about[name] for name in EngineFacts.__dataclass_fields__})
        self._params = [RowParams.from_json(each) for each in about["params"]]
        self.seeds: list[int] = seeds_B.tolist()

    def finished(self, place: int) -> FinishedRow:
        """Returns the row with index `place` in the file, from 0. Raises ValueError if the file is damaged."""
        first, end = self._bounds["lengths_B"][place : place + 2].tolist()
        prompt = int(self._arrays["prompts_B"][place])
        prompt_first, prompt_end = self._bounds["prompt_lengths_U"][prompt : prompt + 2].tolist()
        return FinishedRow(
            self.seeds[place],
            self._arrays["prompt_tokens"][prompt_first:prompt_end],
            self._arrays["tokens"][first:end],
            self._arrays["logprobs"][first:end],
            self._params[int(self._arrays["params_B"][place])],
        )

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        names = ("params_B", "prompts_B", "prompt_lengths_U", "lengths_B", "prompt_tokens", "tokens", "logprobs")
        return dict(zip(names, self._read(*names), strict=True))

    @cached_property
    def _bounds(self) -> dict[str, Array]:
        """Where each response (`lengths_B`) and each prompt (`prompt_lengths_U`) begins in its array of tokens.

        Each array has one more element at its end, which says where the last text ends.
        """
        names = ("lengths_B", "prompt_lengths_U")
        return {name: np.concatenate([[0], np.cumsum(self._arrays[name], dtype=np.int64)]) for name in names}

    def _read(self, *names: str) -> list[Array]:
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                return [archive[name] for name in names]
        except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zipfile.error) as error:
            raise ValueError(f"{self.path} is damaged ({error})") from error
