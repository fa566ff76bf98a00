# SPDX-License-Identifier: Apache-2.0
"""Loads new weights into a running engine, with functions that run in its vLLM worker."""

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def reload(worker: Any, tensors: "list[tuple[str, torch.Tensor]]") -> None:
    """Replaces the model's weights by `tensors`, which have Hugging Face names. The caller must clear the prefix cache."""
    started = time.perf_counter()
    worker.model_runner.reload_weights(weights_iterator=iter(tensors))
    has_new_heads = _reload_native_heads(worker.model_runner, dict(tensors))
    worker.specrollout_weights_updated(time.perf_counter() - started)
    if has_new_heads and worker.specrollout_router is not None:
        worker.specrollout_router.samples.head_version = worker.specrollout_policy_version


def _reload_native_heads(runner: Any, tensors: "Mapping[str, torch.Tensor]") -> bool:
    """Loads the policy's own (MTP) heads from a checkpoint's tensors. Returns whether it did.

    vLLM leaves these heads out when it reloads a policy. Nothing is loaded if the engine does not draft with them, or if
    `tensors` do not include them.
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
