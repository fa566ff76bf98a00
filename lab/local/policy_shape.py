# SPDX-License-Identifier: Apache-2.0
"""Reads the sizes of a Qwen3 or Llama model from its config.json, and maps its weights between Hugging Face and Megatron-Core.

Only functions that take tensors import torch.
"""

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_specrollout.storage.model_folder import EMBEDDING, LM_HEAD, size_in

if TYPE_CHECKING:
    from torch import Tensor

MODEL_TYPES = ("qwen3", "llama")
"""Values of `model_type` that are supported."""
_FILE = "config.json"


@dataclass(frozen=True)
class Weight:
    """A parameter of Megatron-Core, and the Hugging Face tensors of which it consists.

    Conversion is bit-exact in both directions.
    """

    megatron: str
    """Name in Megatron-Core."""
    hf: Mapping[str, tuple[int, ...]]
    """Name and shape of each Hugging Face tensor."""
    num_groups: int = 1
    """Number of groups in which the rows of several tensors alternate. For example, rows of queries, keys and values alternate
    by query group: [q heads of group 0, k 0, v 0, q heads of group 1, ...]."""

    def joined(self, tensors: "list[Tensor]") -> "Tensor":
        """Returns the Megatron-Core parameter that consists of these Hugging Face tensors."""
        import torch

        if len(tensors) == 1:
            return tensors[0]
        return torch.cat([x.unflatten(0, (self.num_groups, -1)) for x in tensors], 1).flatten(0, 1)

    def split(self, parameter: "Tensor") -> "list[Tensor]":
        """Returns the Hugging Face tensors of which a Megatron-Core parameter consists."""
        if len(self.hf) == 1:
            return [parameter]
        rows_of_group = [shape[0] // self.num_groups for shape in self.hf.values()]
        return [x.flatten(0, 1) for x in parameter.unflatten(0, (self.num_groups, -1)).split(rows_of_group, 1)]


@dataclass(frozen=True)
class PolicyShape:
    """Sizes of a policy's network that the local trainer supports."""

    num_layers: int
    """Number of decoder layers."""
    hidden_size: int
    """Width of the hidden states."""
    ffn_hidden_size: int
    """Inner width of the feed-forward network."""
    num_heads: int
    """Number of query heads."""
    num_query_groups: int
    """Number of key and value heads."""
    head_dim: int
    """Width of an attention head."""
    vocab_size: int
    """Number of token ids."""
    max_positions: int
    """Longest context in tokens."""
    norm_eps: float
    """Epsilon of the RMS norms."""
    rotary_base: float
    """Base of the rotary embedding's frequencies."""
    is_tied: bool
    """Whether the LM head is the embedding."""
    has_qk_norm: bool
    """Whether queries and keys are normed in each head, as in Qwen3."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> "PolicyShape":
        """Returns the sizes in a config.json. Raises ValueError if the local trainer does not support the model."""
        _refuse_unsupported(hf_config)
        hidden_size = size_in(hf_config, "hidden_size", _FILE)
        num_heads = size_in(hf_config, "num_attention_heads", _FILE)
        num_query_groups = size_in(hf_config, "num_key_value_heads", _FILE)
        if num_heads % num_query_groups:
            raise ValueError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_query_groups}"
            )
        return cls(
            num_layers=size_in(hf_config, "num_hidden_layers", _FILE),
            hidden_size=hidden_size,
            ffn_hidden_size=size_in(hf_config, "intermediate_size", _FILE),
            num_heads=num_heads,
            num_query_groups=num_query_groups,
            head_dim=size_in(hf_config, "head_dim", _FILE, default=hidden_size // num_heads),
            vocab_size=size_in(hf_config, "vocab_size", _FILE),
            max_positions=size_in(hf_config, "max_position_embeddings", _FILE),
            norm_eps=_positive(hf_config, "rms_norm_eps"),
            rotary_base=_positive(_rope_parameters(hf_config), "rope_theta"),
            is_tied=bool(hf_config.get("tie_word_embeddings", False)),
            has_qk_norm=hf_config["model_type"] == "qwen3",
        )

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every Hugging Face tensor, by name."""
        return {name: shape for weight in self.weights() for name, shape in weight.hf.items()}

    def weights(self) -> list[Weight]:
        """Returns every weight, in Hugging Face's order of layers."""
        vocabulary = (self.vocab_size, self.hidden_size)
        norm = (self.hidden_size,)
        return [
            Weight("embedding.word_embeddings.weight", {EMBEDDING: vocabulary}),
            *(weight for layer in range(self.num_layers) for weight in self._layer_weights(layer)),
            Weight("decoder.final_layernorm.weight", {"model.norm.weight": norm}),
            *([] if self.is_tied else [Weight("output_layer.weight", {LM_HEAD: vocabulary})]),
        ]

    def _layer_weights(self, layer: int) -> list[Weight]:
        hidden = self.hidden_size
        ffn = self.ffn_hidden_size
        dim = self.head_dim
        queries = self.num_heads * dim
        keys = self.num_query_groups * dim
        qkv = {f"self_attn.{x}_proj": (rows, hidden) for x, rows in (("q", queries), ("k", keys), ("v", keys))}
        weights = [
            Weight("input_layernorm", {"input_layernorm": (hidden,)}),
            Weight("self_attention.linear_qkv", qkv, num_groups=self.num_query_groups),
            Weight("self_attention.linear_proj", {"self_attn.o_proj": (hidden, queries)}),
            Weight("pre_mlp_layernorm", {"post_attention_layernorm": (hidden,)}),
            Weight("mlp.linear_fc1", {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}),
            Weight("mlp.linear_fc2", {"mlp.down_proj": (hidden, ffn)}),
        ]
        if self.has_qk_norm:
            weights += [Weight(f"self_attention.{x}_layernorm", {f"self_attn.{x}_norm": (dim,)}) for x in "qk"]
        return [
            replace(
                weight,
                megatron=f"decoder.layers.{layer}.{weight.megatron}.weight",
                hf={f"model.layers.{layer}.{name}.weight": shape for name, shape in weight.hf.items()},
            )
            for weight in weights
        ]


def _positive(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"config.json: {name} is {reprlib.repr(value)}; it must be a number above 0")
    return float(value)


def _rope_parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings, from `rope_parameters` (transformers 5) or from the older keys."""
    found = {"rope_theta": hf_config.get("rope_theta", 10000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        block = hf_config.get(name) or {}
        if not isinstance(block, Mapping):
            raise ValueError(f"config.json: {name} is {block!r}; it must be a block of keys")
        found |= block
    return found


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
        ("quantization_config", hf_config.get("quantization_config"), None),
    ]
    for field, value, supported in wanted:
        if value != supported:
            raise ValueError(f"config.json: {field}={value!r} is not supported: use a model with {field}={supported!r}")
