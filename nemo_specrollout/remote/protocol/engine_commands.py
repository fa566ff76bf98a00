# SPDX-License-Identifier: Apache-2.0
"""Commands that the drafter side gives to its engine, and the rows in which the engine returns draft tokens."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

DRAFT_ROW = np.dtype(
    [
        ("shadow", np.int64),
        ("position", np.int64),  # index of the token in the shadow sequence
        ("prefix_hash", np.uint64),  # of all tokens before it; the engine leaves 0, and `ShadowSequences` fills it in
        ("token", np.int32),
        ("level", np.int8),  # evidence level (`drafters.base`)
    ],
    align=True,
)
"""One draft token."""


@dataclass(frozen=True)
class DraftModel:
    """Properties of a draft model that have to fit the policy."""

    vocab_size: int
    tokenizer: str
    """Fingerprint of the tokenizer; empty if unknown."""
    max_model_len: int
    """Longest shadow sequence, in tokens."""


@dataclass(frozen=True)
class OpenShadow:
    """Command to start a shadow sequence with a text."""

    shadow: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    text: np.ndarray
    """int32 token ids."""


@dataclass(frozen=True)
class CloseShadow:
    """Command to free a shadow sequence."""

    shadow: int


@dataclass(frozen=True)
class CorrectShadow:
    """Command to keep the first `num_kept` tokens of a shadow sequence and to continue it with `tokens`."""

    shadow: int
    num_kept: int
    tokens: list[int]


@dataclass(frozen=True)
class LoadWeights:
    """Command to draft with the weights in `folder`; `DrafterSide.weights_loaded` takes the outcome."""

    folder: str
    draft_version: int
    peer: Hashable
    """Sender of the request, which gets the answer."""


EngineCommand = OpenShadow | CloseShadow | CorrectShadow | LoadWeights
