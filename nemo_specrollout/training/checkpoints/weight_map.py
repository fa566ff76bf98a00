# SPDX-License-Identifier: Apache-2.0
"""Names and layouts of the weights of a Qwen3 or a Llama, in Hugging Face and in Megatron-Core.

A `Weight` pairs one Megatron parameter with the Hugging Face tensors that it consists of. Its layout cuts the tensors into
tensor-parallel shards and joins shards again. Layouts only slice, concatenate and reshape, so both ways are bit-exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_specrollout.config.model_folder import EMBEDDING, LM_HEAD
from nemo_specrollout.training.checkpoints.policy_shape import PolicyShape

MEGATRON_EMBEDDING, MEGATRON_LM_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Replicated:
    """One tensor that is the same on every rank, such as a norm."""

    def shard(self, full: list[Tensor], rank: int, size: int) -> Tensor:
        return full[0]

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """One tensor that is cut along a dimension."""

    dim: int
    """0 for column-parallel layers and the vocabulary, 1 for row-parallel layers."""

    def shard(self, full: list[Tensor], rank: int, size: int) -> Tensor:
        return full[0].chunk(size, self.dim)[rank]

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        return [torch.cat(shards, self.dim)]


@dataclass(frozen=True)
class FusedGateUp:
    """gate_proj and up_proj, stacked within each rank: rank r has [gate_r; up_r]."""

    def shard(self, full: list[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat([x.chunk(size)[rank] for x in full])

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        gates, ups = zip(*(x.chunk(2) for x in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]


@dataclass(frozen=True)
class FusedQkv:
    """q, k and v, interleaved by query group: [q heads of group 0, k 0, v 0, q heads of group 1, ...]."""

    num_groups: int
    """Number of key and value heads."""
    heads_per_group: int
    """Query heads of a group."""
    head_dim: int
    """Width of a head."""

    def shard(self, full: list[Tensor], rank: int, size: int) -> Tensor:
        grouped = torch.cat([x.unflatten(0, (self.num_groups, -1)) for x in full], 1)
        return grouped.chunk(size)[rank].flatten(0, 1)

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        grouped = torch.cat(shards).unflatten(0, (self.num_groups, -1))
        rows = [self.heads_per_group * self.head_dim, self.head_dim, self.head_dim]
        return [x.flatten(0, 1) for x in grouped.split(rows, 1)]


Layout = Replicated | Split | FusedGateUp | FusedQkv
"""Arrangement of full Hugging Face tensors in one Megatron parameter. `shard` returns the part of one of `size` ranks, and
`unshard` the full tensors from the parts of all ranks."""


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter with the Hugging Face tensors that it holds."""

    megatron: str
    """Name in Megatron-Core."""
    hf: tuple[str, ...]
    """Names in Hugging Face."""
    layout: Layout
    """Arrangement of the tensors in the parameter."""


def weights_of_shape(shape: PolicyShape) -> list[Weight]:
    """Returns every weight of a policy of this shape, in Hugging Face's order of layers."""
    qkv = FusedQkv(shape.num_query_groups, shape.num_heads // shape.num_query_groups, shape.head_dim)
    head = [] if shape.tied else [Weight(MEGATRON_LM_HEAD, (LM_HEAD,), Split(0))]
    return [
        Weight(MEGATRON_EMBEDDING, (EMBEDDING,), Split(0)),
        *(weight for layer in range(shape.num_layers) for weight in _layer_weights(layer, qkv, shape.has_qk_norm)),
        Weight("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
        *head,
    ]


def _layer_weights(layer: int, qkv: FusedQkv, has_qk_norm: bool) -> list[Weight]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    table: list[tuple[str, tuple[str, ...], Layout]] = [
        ("input_layernorm", ("input_layernorm",), Replicated()),
        ("self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv),
        ("self_attention.linear_proj", ("self_attn.o_proj",), Split(1)),
        ("pre_mlp_layernorm", ("post_attention_layernorm",), Replicated()),
        ("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), FusedGateUp()),
        ("mlp.linear_fc2", ("mlp.down_proj",), Split(1)),
    ]
    if has_qk_norm:
        table += [
            ("self_attention.q_layernorm", ("self_attn.q_norm",), Replicated()),
            ("self_attention.k_layernorm", ("self_attn.k_norm",), Replicated()),
        ]
    return [
        Weight(f"{ours}{megatron}.weight", tuple(f"{theirs}{name}.weight" for name in hf), layout)
        for megatron, hf, layout in table
    ]
