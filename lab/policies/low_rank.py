# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes of a model's linear layers (LoRA, arXiv 2106.09685).

They are trained beside frozen weights, kept in a small file, and added to the weights of a Hugging Face folder.

Shapes: R rows (outputs), C columns (inputs), r rank.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

DOWN, UP = "down", "up"


class LowRankLinear(nn.Module):
    """A frozen linear layer plus a low-rank product `up @ down`, which starts as zero and is trained in float32."""

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        bound = 1.0 / math.sqrt(linear.in_features)
        self.down_rC = nn.Parameter((torch.rand(rank, linear.in_features, generator=generator) * 2 - 1) * bound)
        self.up_Rr = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.down_rC.to(x.dtype))
        return self.linear(x) + F.linear(low, self.up_Rr.to(x.dtype))


def add_low_rank(model: nn.Module, rank: int, seed: int) -> dict[str, LowRankLinear]:
    """Freezes the model and puts a `LowRankLinear` around each linear layer of its decoder. Returns them by name."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in name]
    added = {}
    for name, linear in found:
        parent, _, child = name.rpartition(".")
        added[name] = LowRankLinear(linear, rank, generator)
        setattr(model.get_submodule(parent), child, added[name])
    return added


def save_low_rank(layers: Mapping[str, LowRankLinear], path: Path) -> None:
    """Writes the trained factors of each layer to the file `path`, in bfloat16."""
    factors = {}
    for name, layer in layers.items():
        factors[f"{name}.{DOWN}"] = layer.down_rC.detach().bfloat16().contiguous()
        factors[f"{name}.{UP}"] = layer.up_Rr.detach().bfloat16().contiguous()
    save_file(factors, path, metadata={"format": "pt"})


def merge_low_rank(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a model with the low-rank changes in the file `path` added. Each tensor keeps its dtype.

    Raises ValueError for a change of a layer that is not among the tensors.
    """
    factors = load_file(path)
    merged = dict(tensors)
    for layer in sorted({name.rpartition(".")[0] for name in factors}):
        weight = f"{layer}.weight"
        if weight not in merged:
            raise ValueError(f"{path}: changes {weight}, which the model does not have; use the file of this model")
        change = factors[f"{layer}.{UP}"].float() @ factors[f"{layer}.{DOWN}"].float()
        merged[weight] = (merged[weight].float() + change).to(merged[weight].dtype)
    return merged
