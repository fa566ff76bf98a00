# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with what the V2 model runner needs, which is bodies of Triton kernels and asynchronous scheduling."""

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform


class CpuPlatformForV2(CpuPlatform):
    """vLLM's CPU platform, changed for the V2 model runner. The plugin in `plugin.py` names it to vLLM."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Updates the config as vLLM does, but keeps the setting of asynchronous scheduling, which vLLM would switch off.

        Also lets a draft head compute in bfloat16 where that is possible.
        """
        asynchronous = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asynchronous
        from lab.vllm_on_cpu import bfloat16_head

        bfloat16_head.quantize_head(vllm_config)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replaces Triton kernels and functions of vLLM by those of this package. Each vLLM worker calls this hook."""
        from lab.vllm_on_cpu import bfloat16_head, kernels, recurrent  # noqa: F401 - the first registers a quantization

        kernels.register()
        recurrent.install()
        _norm_context_keys_by_layer()


def _norm_context_keys_by_layer() -> None:
    """Makes DFlash normalise each layer's context keys by that layer's weights. vLLM's CPU kernel uses the first layer's."""
    try:
        from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    except ImportError:  # before 0.32
        return

    def normalize(model: Any, keys_L: torch.Tensor) -> torch.Tensor:
        norms = [layer.self_attn.k_norm for layer in model.layers]
        return torch.stack([norm(keys.contiguous()) for norm, keys in zip(norms, keys_L, strict=True)])

    model_class: Any = DFlashQwen3Model
    model_class._normalize_context_k = normalize
