# SPDX-License-Identifier: Apache-2.0
"""Widens a policy and its EAGLE-3 head, so that a forward pass costs as much as a larger model's and computes the same.

The larger model has the small one inside. Its other numbers cannot reach a logit, for the following reasons:

- The first numbers of a hidden state are the small model's, and the others are zero. RMSNorm divides by a mean over more
  numbers, so its weights are scaled by sqrt(small / large), and its epsilon by small / large.
- A matrix has the small matrix at the inputs and outputs of the small model. Its other outputs get zeros from those inputs,
  so they are zero. Inputs that are always zero may have any weights. These are random, because a GPU multiplies zeros
  faster.
- A query head that is added to a group of the small model reads values that are not zero. So its outputs have zero weights.
- New layers come after the old ones, and add zeros to the residual stream. So a head reads the same layers as before.

In exact arithmetic, logits are equal. In floating point, sums have another order, and scaled norms are rounded. Norms of
single attention heads (Qwen3's) share the model's epsilon, but are not widened. So they change by about epsilon divided by
their mean square.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

RANDOM_STD = 0.02
"""Standard deviation of random weights, as of a model before its training."""
WEIGHTS = "model.safetensors"
_SCALED = ("input_layernorm", "post_attention_layernorm", "norm", "hidden_norm")
"""Last parts of tensor names. Tensors with such a name are weights of norms of hidden states, and are scaled."""
_KEPT = ("q_norm", "k_norm", "d2t", "t2d")
"""Last parts of tensor names. Tensors with such a name stay as they are."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer that a widening changes, by their names in a config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """Returns the shape in a config.json."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})

    @property
    def heads_per_group(self) -> int:
        """Number of query heads that share a key and value head."""
        return self.num_attention_heads // self.num_key_value_heads


QWEN3_8B = Shape(4096, 12_288, 36, 64, 16)
"""Qwen3-8B's sizes, with 64 heads of 64 instead of 32 of 128, and 16 key and value heads of 64 instead of 8."""


@dataclass(frozen=True)
class _Axis:
    """Where the rows or the columns of a small tensor are in the widened tensor."""

    size: int
    used: Tensor
    """Indices of the small tensor's rows or columns, int64."""
    live: Tensor
    """Indices of rows or columns whose activations may differ from zero, int64. They include all of `used`."""


class Widening:
    """Widens a small model's config and tensors to the shape of a larger one. Immutable.

    Example: `Widening(config, QWEN3_8B).tensor("model.norm.weight", weight)`.
    """

    def __init__(self, config: Mapping[str, Any], target: Shape) -> None:
        """Computes where the small model's numbers are in the larger model. `config` is the small model's or a head's.

        Raises ValueError if `target` is too small.
        """
        source = Shape.of(config)
        too_small = [name for name, size in asdict(source).items() if getattr(target, name) < size]
        if too_small or target.heads_per_group < source.heads_per_group:
            what = ", ".join(too_small) or "heads in a group"
            raise ValueError(f"a model cannot be widened to fewer {what}: {source} to {target}")
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.source = source
        self.target = target
        self._factor = source.hidden_size / target.hidden_size
        hidden = torch.arange(source.hidden_size)
        ffn = torch.arange(source.intermediate_size)
        group, place = (
            torch.arange(source.num_attention_heads).div(source.heads_per_group, rounding_mode="floor"),
            (torch.arange(source.num_attention_heads) % source.heads_per_group),
        )
        heads = _spread(group * target.heads_per_group + place, head_dim)
        in_live_groups = _spread(torch.arange(source.num_key_value_heads * target.heads_per_group), head_dim)
        values = torch.arange(source.num_key_value_heads * head_dim)
        self._axes = {
            "hidden": _Axis(target.hidden_size, hidden, hidden),
            "ffn": _Axis(target.intermediate_size, ffn, ffn),
            "queries": _Axis(target.num_attention_heads * head_dim, heads, in_live_groups),
            "values": _Axis(target.num_key_value_heads * head_dim, values, values),
        }
        self._matrices: dict[str, tuple[str, str]] = {
            "q_proj": ("queries", "hidden"),
            "k_proj": ("values", "hidden"),
            "v_proj": ("values", "hidden"),
            "o_proj": ("hidden", "queries"),
            "gate_proj": ("ffn", "hidden"),
            "up_proj": ("ffn", "hidden"),
            "down_proj": ("hidden", "ffn"),
            "fc": ("hidden", "hidden"),
        }

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config of the widened model, or of the layer of a widened head."""
        wide = {**config, **asdict(self.target), "rms_norm_eps": config["rms_norm_eps"] * self._factor}
        if layer_types := config.get("layer_types"):
            added = self.target.num_hidden_layers - len(layer_types)
            wide["layer_types"] = [*layer_types, *layer_types[-1:] * added]
        return wide

    def tensor(self, name: str, small: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the widened form of the tensor `small`, on the same device. Raises ValueError for an unknown name."""
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in _KEPT:
            return small
        if kind in _SCALED:
            return self._norm(small)
        if kind == "embed_tokens":
            wide = small.new_zeros(len(small), self.target.hidden_size)
            wide[:, : small.shape[1]] = small
            return wide
        if kind == "lm_head":
            wide = self._random(len(small), self.target.hidden_size, like=small, generator=generator)
            wide[:, : small.shape[1]] = small
            return wide
        if kind in self._matrices and name.endswith(".weight"):
            return self._matrix(kind, small, generator)
        raise ValueError(f"{name}: nothing is known of how to widen this tensor")

    def new_layer(self, like: Mapping[str, Tensor], generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Returns the tensors of a new layer, which adds zeros to the residual stream.

        `like` has a layer of the small model.
        """
        return {name: self.tensor(name, torch.zeros_like(small), generator) for name, small in like.items()}

    def _norm(self, small: Tensor) -> Tensor:
        wide = small.new_ones(self.target.hidden_size)
        wide[: len(small)] = (small.float() * self._factor**0.5).to(small.dtype)
        return wide

    def _matrix(self, kind: str, small: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns the widened form of the matrix `small`. `kind` is the last part of its name, such as "q_proj".

        In a head, a matrix may read several hidden states in a row. The columns for the first state come first.
        """
        rows, columns = (self._axes[axis] for axis in self._matrices[kind])
        repeats = small.shape[1] // len(columns.used)
        used, live = (
            torch.cat([places + i * columns.size for i in range(repeats)]).to(small.device)
            for places in (columns.used, columns.live)
        )
        wide = self._random(rows.size, columns.size * repeats, like=small, generator=generator)
        wide[:, live] = 0
        wide[rows.used.to(small.device)[:, None], used] = small
        return wide

    @staticmethod
    def _random(rows: int, columns: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
        return like.new_empty(rows, columns).normal_(std=RANDOM_STD, generator=generator)


def _spread(heads: Tensor, head_dim: int) -> Tensor:
    """Returns the indices that these attention heads take in a row or column, with `head_dim` of them for each head, int64."""
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def widened(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Shape, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors of a widened policy, made on `device` one at a time. `tensors` are the small policy's.

    Raises ValueError if `target` is too small, and for a tensor with an unknown name.
    """
    widening = Widening(config, target)
    generator = torch.Generator(device).manual_seed(0)
    last = f"model.layers.{widening.source.num_hidden_layers - 1}."
    for name, small in tensors.items():
        yield name, widening.tensor(name, small.to(device), generator)
    like = {name.removeprefix(last): small for name, small in tensors.items() if name.startswith(last)}
    for number in range(widening.source.num_hidden_layers, target.num_hidden_layers):
        for name, small in like.items():
            zeros = torch.zeros_like(small, device=device)
            yield f"model.layers.{number}.{name}", widening.tensor(name, zeros, generator)


def write_head(source: Path, target: Shape, out: Path) -> None:
    """Writes the EAGLE-3 head in `source`, widened for a policy of the shape `target`. `out` appears only when it is complete.

    The head's layer gets the policy's sizes, as is usual for heads of large models. The head's vocabulary stays, because an
    added token would need a logit of minus infinity.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    layer = config["transformer_layer_config"]
    of_head = Shape(**{**asdict(target), "num_hidden_layers": layer["num_hidden_layers"]})
    widening = Widening(layer, of_head)
    config["transformer_layer_config"] = widening.config(layer)
    tensors = {name: widening.tensor(name, small).contiguous() for name, small in load_file(source / WEIGHTS).items()}
    _write_folder(out, config, lambda folder: save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"}))


def write_policy(source: Path, target: Shape, out: Path) -> None:
    """Writes the policy in `source`, widened to the shape `target`, with its tokenizer.

    `out` appears only when it is complete.
    """
    _write_like(source, target, out, lambda folder: _save_policy(source, target, folder))


def write_description(source: Path, target: Shape, out: Path, marker: str) -> None:
    """Writes a widened policy without its weights. The file `marker` names the policy from which the weights can be made.

    An engine that makes the weights itself (`lab/gpu/widened_loader.py`) saves 15 GB on a disk.
    """
    described = json.dumps({"source": str(source.resolve()), "target": asdict(target)})
    _write_like(source, target, out, lambda folder: (folder / marker).write_text(described, encoding="utf-8"))


def read_policy(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns config and tensors of a policy's folder."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), load_file(folder / WEIGHTS)


def _save_policy(source: Path, target: Shape, folder: Path) -> None:
    tensors = {name: wide.contiguous() for name, wide in widened(*read_policy(source), target)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _write_like(source: Path, target: Shape, out: Path, write: Callable[[Path], object]) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    others = [file for file in source.iterdir() if file.is_file() and file.name not in (WEIGHTS, "config.json")]

    def write_all(folder: Path) -> None:
        for file in others:
            shutil.copy(file, folder / file.name)
        write(folder)

    _write_folder(out, Widening(config, target).config(config), write_all)


def _write_folder(out: Path, config: Mapping[str, Any], write: Callable[[Path], object]) -> None:
    """Writes a folder beside `out`, and renames it to `out` when it is complete."""
    scratch = out.with_name(f".{out.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write(scratch)
    shutil.rmtree(out, ignore_errors=True)
    scratch.rename(out)
