# SPDX-License-Identifier: Apache-2.0
"""Names and layouts of a Qwen3's weights: Hugging Face <-> Megatron-Core, bit-exact both ways.

A `Weight` pairs one Megatron parameter with the Hugging Face tensors it is made of; its layout cuts them into
tensor-parallel shards and puts shards together again. Layouts only slice, concatenate and reshape.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Layout(Protocol):
    """How full Hugging Face tensors lie in one Megatron parameter that is split over ranks."""

    def shard(self, full: list[Tensor], rank: int, size: int) -> Tensor:
        """Rank `rank`'s part of the parameter, of `size` ranks."""
        ...

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        """The full Hugging Face tensors from all ranks' parts, in rank order."""
        ...


@dataclass(frozen=True)
class Replicated:
    """One tensor, the same on every rank: the norms."""

    def shard(self, full: list[Tensor], rank: int, size: int) -> Tensor:
        return full[0]

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """One tensor cut along `dim`: 0 for column-parallel layers and the vocabulary, 1 for row-parallel layers."""

    dim: int

    def shard(self, full: list[Tensor], rank: int, size: int) -> Tensor:
        return full[0].chunk(size, self.dim)[rank]

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        return [torch.cat(shards, self.dim)]


@dataclass(frozen=True)
class FusedGateUp:
    """gate_proj and up_proj stacked *within each rank*: rank r holds [gate_r; up_r]."""

    def shard(self, full: list[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat([x.chunk(size)[rank] for x in full])

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        gates, ups = zip(*(x.chunk(2) for x in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]


@dataclass(frozen=True)
class FusedQkv:
    """q, k and v interleaved by query group: [q heads of group 0, k 0, v 0, q heads of group 1, ...]."""

    num_groups: int
    heads_per_group: int
    head_dim: int

    def shard(self, full: list[Tensor], rank: int, size: int) -> Tensor:
        grouped = torch.cat([x.unflatten(0, (self.num_groups, -1)) for x in full], 1)
        return grouped.chunk(size)[rank].flatten(0, 1)

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        grouped = torch.cat(shards).unflatten(0, (self.num_groups, -1))
        rows = [self.heads_per_group * self.head_dim, self.head_dim, self.head_dim]
        return [x.flatten(0, 1) for x in grouped.split(rows, 1)]


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter and the Hugging Face tensors it holds."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout


def weights_of(model: GPTModel) -> list[Weight]:
    """Every weight of the model, in Hugging Face's order of layers."""
    layers = [weight for i in range(model.config.num_layers) for weight in _layer_weights(model, i)]
    head = [] if model.share_embeddings_and_output_weights else [Weight("output_layer.weight", (LM_HEAD,), Split(0))]
    return [
        Weight("embedding.word_embeddings.weight", (EMBEDDING,), Split(0)),
        *layers,
        Weight("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
        *head,
    ]


def _layer_weights(model: GPTModel, layer: int) -> list[Weight]:
    c, ours, theirs = model.config, f"decoder.layers.{layer}.", f"model.layers.{layer}."
    qkv = FusedQkv(c.num_query_groups, c.num_attention_heads // c.num_query_groups, c.kv_channels)
    table: list[tuple[str, tuple[str, ...], Layout]] = [
        ("input_layernorm", ("input_layernorm",), Replicated()),
        ("self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv),
        ("self_attention.q_layernorm", ("self_attn.q_norm",), Replicated()),
        ("self_attention.k_layernorm", ("self_attn.k_norm",), Replicated()),
        ("self_attention.linear_proj", ("self_attn.o_proj",), Split(1)),
        ("pre_mlp_layernorm", ("post_attention_layernorm",), Replicated()),
        ("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), FusedGateUp()),
        ("mlp.linear_fc2", ("mlp.down_proj",), Split(1)),
    ]
    return [
        Weight(f"{ours}{megatron}.weight", tuple(f"{theirs}{name}.weight" for name in hf), layout)
        for megatron, hf, layout in table
    ]


@torch.no_grad()
def load_hf(model: GPTModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy full Hugging Face tensors into this rank's shard of the model.

    Raises:
        ValueError: a tensor is missing, is not one of the model's, or has another shape; it is named.
    """
    weights, parameters = weights_of(model), dict(model.named_parameters())
    _check_names({name for weight in weights for name in weight.hf}, tensors)
    rank, size = _rank_and_size()
    for weight in weights:
        _check_shapes(weight, tensors, parameters[weight.megatron].shape, size)
        parameters[weight.megatron].copy_(weight.layout.shard([tensors[name] for name in weight.hf], rank, size))


@torch.no_grad()
def export_hf(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor), copies. With several ranks, all must iterate together."""
    parameters = dict(model.named_parameters())
    for weight in weights_of(model):
        full = weight.layout.unshard(_gather(parameters[weight.megatron].detach(), weight.layout))
        for name, tensor in zip(weight.hf, full, strict=True):
            yield name, tensor.clone(memory_format=torch.contiguous_format)


def _check_names(wanted: set[str], tensors: Mapping[str, Tensor]) -> None:
    given = set(tensors)
    if LM_HEAD not in wanted and {LM_HEAD, EMBEDDING} <= given and torch.equal(tensors[LM_HEAD], tensors[EMBEDDING]):
        # Some checkpoints with tied embeddings store the head all the same.
        given.remove(LM_HEAD)
    if missing := sorted(wanted - given):
        raise ValueError(f"missing tensors: {', '.join(missing)}: the checkpoint does not fit its config.json")
    if surplus := sorted(given - wanted):
        raise ValueError(f"surplus tensors: {', '.join(surplus)}: the checkpoint does not fit its config.json")


def _check_shapes(weight: Weight, tensors: Mapping[str, Tensor], shard_shape: torch.Size, size: int) -> None:
    wanted = weight.layout.unshard([torch.empty(shard_shape, device="meta")] * size)
    for name, like in zip(weight.hf, wanted, strict=True):
        if (given := tuple(tensors[name].shape)) != tuple(like.shape):
            raise ValueError(f"{name}: shape {given}, but config.json makes it {tuple(like.shape)}")


def _gather(shard: Tensor, layout: Layout) -> list[Tensor]:
    _, size = _rank_and_size()
    if size == 1 or isinstance(layout, Replicated):
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards


def _rank_and_size() -> tuple[int, int]:
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
