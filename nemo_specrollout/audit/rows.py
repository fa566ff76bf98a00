# SPDX-License-Identifier: Apache-2.0
"""What a run records of each row so that an audit can compute its tokens again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class RowParams:
    """The sampling parameters of a row that change which token is sampled. The defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    """0 is without."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that cannot come before `min_tokens`, the end of the text among them."""
    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the response never has."""
    unknown: tuple[str, ...] = ()
    """What else changes the row's tokens and cannot be computed here, each in words, such as "structured output"."""


@dataclass(frozen=True)
class RecordedRow:
    """One response as the run recorded it."""

    step: int
    seed: int
    """The seed of the noise in the engine."""
    prompt_token_ids: Array
    """int32, shape [prompt]."""
    token_ids: Array
    """The response, int32, shape [T]."""
    logprobs: Array
    """The engine's log-prob of each token of the response, float32, shape [T]. Empty if the run did not ask for them."""
    policy_spans: tuple[tuple[int, int], ...]
    """Version of each policy that sampled, and the first position that it sampled, from the beginning of the prompt."""
    params: RowParams = field(default_factory=RowParams)

    @property
    def text(self) -> Array:
        """Prompt and response, int32, shape [prompt + T]."""
        return np.concatenate([self.prompt_token_ids, self.token_ids])
