# SPDX-License-Identifier: Apache-2.0
"""Makes drafters without weights possible before vLLM 0.32, whose V2 model runner has no method for them.

Newer versions of vLLM need nothing of this module.

Shapes: B requests of the batch, K draft positions.
"""

import os
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.arguments import TEXT_METHOD

_LIFTED_REFUSALS = {"ngram/ngram_gpu speculative decoding", f"speculative method '{TEXT_METHOD}'"}
_config: Any = VllmConfig
_runner_module: Any = model_runner
_is_text_allowed = False
"""True if `allow_text_drafters` has already changed vLLM in this process."""


class TextSpeculator(BaseSpeculator):
    """The speculator of an engine without draft weights. The draft router replaces its `propose`, except in dummy runs."""

    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        shape = vllm_config.scheduler_config.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens
        self.draft_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.draft_logits = None
        self.model = torch.nn.Module()

    def init_cudagraph_manager(self, *args: Any) -> None:
        """Does nothing, because there is no network whose CUDA graphs could be captured."""

    def capture(self, *args: Any) -> None:
        """Does nothing, because there is no network whose CUDA graphs could be captured."""

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns zeros instead of draft tokens, int64 [B, K]."""
        return self.draft_tokens[: input_batch.num_reqs]


def allow_text_drafters() -> None:
    """Makes the V2 model runner accept vLLM's method for drafters without weights, which it refuses before 0.32.

    It must be called in each process that creates vLLM's config or a vLLM worker. It also sets an environment variable, so
    that processes which vLLM starts use the V2 model runner.
    """
    global _is_text_allowed  # noqa: PLW0603
    if compat.HAS_TEXT_METHOD or _is_text_allowed:
        return
    compat.require(_config, ["_get_v2_model_runner_unsupported_features"], "VllmConfig")
    compat.require(_runner_module, ["init_speculator"], _runner_module.__name__)
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    refuses = _config._get_v2_model_runner_unsupported_features
    init_speculator = _runner_module.init_speculator

    def refuses_less(self: Any) -> list[str]:
        found = refuses(self)
        is_ours = self.speculative_config is not None and self.speculative_config.method == TEXT_METHOD
        return [text for text in found if not (is_ours and text in _LIFTED_REFUSALS)]

    def init_any_speculator(vllm_config: Any, device: torch.device) -> Any:
        is_ours = vllm_config.speculative_config.method == TEXT_METHOD
        return (TextSpeculator if is_ours else init_speculator)(vllm_config, device)

    _config._get_v2_model_runner_unsupported_features = refuses_less
    _runner_module.init_speculator = init_any_speculator
    _is_text_allowed = True
