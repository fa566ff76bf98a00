# SPDX-License-Identifier: Apache-2.0
"""A quantization method with which the draft head of a CPU engine computes in bfloat16, while its policy is in float32.

It is used on CPUs that have instructions for bfloat16. No token depends on the head, so its precision does not matter for
them.
"""

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

BFLOAT16_HEAD = "specrollout_bfloat16"
"""vLLM's name for the quantization method."""


def multiplies_bfloat16() -> bool:
    """Returns whether this CPU has instructions that multiply bfloat16."""
    can = torch.cpu.get_capabilities()
    return bool(can.get("amx_bf16") or can.get("avx512_bf16"))


def quantize_head(vllm_config: Any) -> None:
    """Makes the engine's EAGLE-3 head compute in bfloat16, if the policy is in float32 and the CPU multiplies bfloat16."""
    block, policy = (vllm_config.additional_config or {}).get("specrollout", {}), vllm_config.model_config
    has_head = any(drafter["type"] == "eagle3" for drafter in block.get("drafters", ()))
    if has_head and policy.dtype == torch.float32 and multiplies_bfloat16():
        head = vllm_config.speculative_config.draft_model_config
        head.quantization, head.hf_overrides = (
            BFLOAT16_HEAD,
            {},
        )  # vLLM 0.25 quantizes no model with a callable override


class _InBfloat16(QuantizeMethodBase):
    """Mixin for vLLM's classes that compute a layer. Weights and products are in bfloat16.

    Inputs and outputs keep the policy's dtype.
    """

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *sizes, torch.bfloat16, **attributes)  # type: ignore[safe-super]

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        half_bias = None if bias is None else bias.bfloat16()
        return super().apply(layer, x.bfloat16(), half_bias).to(x.dtype)  # type: ignore[safe-super]


class _Linear(_InBfloat16, UnquantizedLinearMethod):
    """Computes a linear layer in bfloat16."""


class _LMHead(_InBfloat16, UnquantizedEmbeddingMethod):
    """Computes an LM head in bfloat16."""


@register_quantization_config(BFLOAT16_HEAD)
class Bfloat16Head(QuantizationConfig):
    """Config object through which vLLM uses this module's quantization method for a draft head in bfloat16.

    The method applies to all linear layers of the head including its LM head, but not to the embedding, which is the policy's.
    """

    def get_name(self) -> str:  # type: ignore[override]
        return BFLOAT16_HEAD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Bfloat16Head":
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, ParallelLMHead):
            return _LMHead()
        return _Linear() if isinstance(layer, LinearBase) else None
