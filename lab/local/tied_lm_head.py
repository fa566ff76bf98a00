# SPDX-License-Identifier: Apache-2.0
"""New weights of a model whose LM head is its embedding, as vLLM must be given them."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from nemo_specrollout.storage.model_folder import EMBEDDING, LM_HEAD, read_object, text_config

Tensor = TypeVar("Tensor")


def with_tied_lm_head(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns a model's tensors, with the embedding also under the LM head's name if the model of `folder` ties the two.

    vLLM >= 0.29 reloads each layer by itself: without the second name, the LM head would keep its old weights. A model
    without an LM head is tied, unless its config denies it: some are by default.
    """
    found, config = list(tensors), read_object(folder / "config.json")
    names, is_tied = dict(found), config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    if is_tied is not False and EMBEDDING in names and LM_HEAD not in names:
        found.append((LM_HEAD, names[EMBEDDING]))
    return found
