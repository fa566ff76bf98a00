# SPDX-License-Identifier: Apache-2.0
"""What the drafter's half of the protocol asks of its engine."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from nemo_specrollout.remote.protocol.shadow_sequences import Correction


@dataclass(frozen=True)
class DraftModel:
    """What a verifier must know of a drafter's model."""

    vocab_size: int
    tokenizer: str
    max_model_len: int


@dataclass(frozen=True)
class ShadowOpening:
    """The engine is to open a request for `shadow`, with int32 `text`."""

    shadow: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    text: np.ndarray


@dataclass(frozen=True)
class ShadowClosing:
    """The engine is to forget the request of `shadow`."""

    shadow: int


@dataclass(frozen=True)
class Publication:
    """The engine is to draft with the weights in `folder`; `DrafterSide.published` is to be told how it went."""

    folder: str
    draft_version: int
    peer: Hashable


Order = ShadowOpening | ShadowClosing | Correction | Publication
