# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face config.json says about a Qwen3 or a Llama, checked, in Megatron-Core's words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL_TYPES = ("qwen3", "llama")


@dataclass(frozen=True)
class PolicyShape:
    """What the config.json of a Qwen3 or a Llama says about the network, checked."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rotary_base: float
    tied: bool
    """The LM head is the embedding."""
    has_qk_norm: bool
    """Queries and keys are normed in each head: True of Qwen3, False of Llama."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> "PolicyShape":
        """Read config.json's keys. Raises ValueError for a model that this trainer would silently get wrong."""
        _refuse_unsupported(hf_config)
        return cls(
            num_layers=hf_config["num_hidden_layers"],
            hidden_size=hf_config["hidden_size"],
            ffn_hidden_size=hf_config["intermediate_size"],
            num_heads=hf_config["num_attention_heads"],
            num_query_groups=hf_config["num_key_value_heads"],
            head_dim=hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"],
            vocab_size=hf_config["vocab_size"],
            max_positions=hf_config["max_position_embeddings"],
            norm_eps=hf_config["rms_norm_eps"],
            rotary_base=float(_rope_parameters(hf_config)["rope_theta"]),
            tied=bool(hf_config.get("tie_word_embeddings", False)),
            has_qk_norm=hf_config["model_type"] == "qwen3",
        )

    def check_divides(self, tensor_model_parallel_size: int) -> None:
        """Raise ValueError unless every split dimension divides by the number of tensor-parallel ranks."""
        for field in ("num_heads", "num_query_groups", "ffn_hidden_size", "vocab_size"):
            if (value := getattr(self, field)) % tensor_model_parallel_size:
                raise ValueError(
                    f"{field}={value} does not divide by tensor_model_parallel_size={tensor_model_parallel_size}: "
                    "choose a size that does"
                )


def _rope_parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings, from either spelling: `rope_parameters` (transformers 5) or the older flat keys."""
    flat = {"rope_theta": hf_config.get("rope_theta", 10000.0), **(hf_config.get("rope_scaling") or {})}
    return {**flat, **(hf_config.get("rope_parameters") or {})}


def _refuse_unsupported(hf_config: Mapping[str, Any]) -> None:
    rope = _rope_parameters(hf_config)
    if (model_type := hf_config.get("model_type")) not in MODEL_TYPES:
        raise ValueError(
            f"config.json: model_type={model_type!r} is not supported: use one of {', '.join(MODEL_TYPES)}"
        )
    wanted: list[tuple[str, Any, Any]] = [
        ("hidden_act", hf_config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", hf_config.get("attention_bias", False), False),
        ("mlp_bias", hf_config.get("mlp_bias", False), False),
        ("use_sliding_window", hf_config.get("use_sliding_window", False), False),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0),
    ]
    for field, value, supported in wanted:
        if value != supported:
            raise ValueError(f"config.json: {field}={value!r} is not supported: use a model with {field}={supported!r}")
