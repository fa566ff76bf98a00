# SPDX-License-Identifier: Apache-2.0
"""New weights for a running engine: the tensors that vLLM must be given, and their loading in its vLLM worker."""

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_specrollout.storage.model_folder import EMBEDDING, LM_HEAD, read_object, text_config

if TYPE_CHECKING:
    import torch

Tensor = TypeVar("Tensor")


def with_tied_lm_head(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns a model's tensors, with the embedding also under the LM head's name if the model of `folder` ties the two.

    vLLM >= 0.29 reloads each layer by itself: without the second name, the LM head would keep its old weights. A model
    without an LM head is tied, unless its config denies it: some are by default.
    """
    found = list(tensors)
    config = read_object(folder / "config.json")
    names = dict(found)
    is_tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    if is_tied is not False and EMBEDDING in names and LM_HEAD not in names:
        found.append((LM_HEAD, names[EMBEDDING]))
    return found


def reload(worker: Any, tensors: "list[tuple[str, torch.Tensor]]") -> None:
    """Replaces the model's weights by Hugging Face names. The caller clears the prefix cache."""
    started = time.perf_counter()
    worker.model_runner.reload_weights(weights_iterator=iter(tensors))
    has_new_heads = _reload_native_heads(worker.model_runner, dict(tensors))
    worker.specrollout_weights_updated(time.perf_counter() - started)
    if has_new_heads and worker.specrollout_router is not None:
        worker.specrollout_router.samples.head_version = worker.specrollout_policy_version


def _reload_native_heads(runner: Any, tensors: "Mapping[str, torch.Tensor]") -> bool:
    """Loads the policy's own (MTP) heads from a checkpoint's tensors. Returns whether it did.

    vLLM's reloading of a policy leaves these heads out. Nothing is loaded if the engine does not draft with them or the
    checkpoint lacks them.
    """
    if getattr(runner.speculative_config, "method", None) != "mtp":
        return False
    num_layers = runner.model_config.hf_text_config.num_hidden_layers
    layers = [int(number) for name in tensors for number in re.findall(r"layers\.(\d+)\.", name)[:1]]
    if max(layers, default=0) < num_layers and not any("mtp" in name for name in tensors):
        return False
    from nemo_specrollout.heads.serving.head_loading import reload_draft_weights

    reload_draft_weights(runner, tensors)
    return True
