# SPDX-License-Identifier: Apache-2.0
"""Conversion of weights between Hugging Face tensors and a running Megatron-Core model, by the table in `training`."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from nemo_specrollout.training.checkpoints.weight_map import (
    EMBEDDING,
    LM_HEAD,
    FusedQkv,
    Layout,
    Replicated,
    Weight,
    weight_table,
)


def weights_of(model: GPTModel) -> list[Weight]:
    """Returns every weight of the model, in Hugging Face's order of layers."""
    c = model.config
    qkv = FusedQkv(c.num_query_groups, c.num_attention_heads // c.num_query_groups, c.kv_channels)
    return weight_table(c.num_layers, qkv, model.share_embeddings_and_output_weights, c.qk_layernorm)


@torch.no_grad()
def load_hf(model: GPTModel, tensors: Mapping[str, Tensor]) -> None:
    """Copies full Hugging Face tensors into this rank's shard of the model.

    Raises:
        ValueError: A tensor is missing, does not belong to the model, or has another shape. The message names it.
    """
    weights, parameters = weights_of(model), dict(model.named_parameters())
    _check_names({name for weight in weights for name in weight.hf}, tensors)
    rank, size = _rank_and_size()
    for weight in weights:
        _check_shapes(weight, tensors, parameters[weight.megatron].shape, size)
        parameters[weight.megatron].copy_(weight.layout.shard([tensors[name] for name in weight.hf], rank, size))


@torch.no_grad()
def export_hf(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, full float32 tensor): copies. With several ranks, all must iterate together."""
    parameters = dict(model.named_parameters())
    for weight in weights_of(model):
        full = weight.layout.unshard(_gather(parameters[weight.megatron].detach(), weight.layout))
        for name, tensor in zip(weight.hf, full, strict=True):
            yield name, tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _check_names(wanted: set[str], tensors: Mapping[str, Tensor]) -> None:
    given = set(tensors)
    if LM_HEAD not in wanted and {LM_HEAD, EMBEDDING} <= given and torch.equal(tensors[LM_HEAD], tensors[EMBEDDING]):
        # Some checkpoints with tied embeddings store the LM head, too.
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
