# SPDX-License-Identifier: Apache-2.0
"""Reads the folder of an EAGLE-3 head: its config, the headers of its tensors, and the tensors.

Two layouts are read: the one of `speculators`, with a nested `transformer_layer_config`, and the flat one of vLLM and
ModelOpt, with `midlayer.*`. Tensor names are given in the first. Only `read_head_tensors` loads torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from nemo_specrollout.config.model_folder import read_object, size_in, tensor_shapes

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

LAYER_IDS_FIELD = "eagle_aux_hidden_state_layer_ids"
"""Key of the auxiliary layers in a head's config."""
MODEL_TYPES = ("qwen3", "llama")
"""Kinds of decoder layer that a head may have."""


@dataclass(frozen=True)
class PolicyFacts:
    """Properties of a policy, from its config.json, with which a head must agree."""

    folder: Path
    """Folder of the policy."""
    hidden_size: int
    """Width of the hidden states."""
    vocab_size: int
    """Number of token ids."""
    num_layers: int
    """Number of decoder layers."""
    max_position_embeddings: int
    """Longest context, tokens."""
    is_tied: bool
    """Whether the LM head is the embedding."""


@dataclass(frozen=True)
class HeadFacts:
    """Properties of a head, from its config.json and the headers of its tensors."""

    folder: Path
    """Folder of the head."""
    is_flat: bool
    """Whether the folder has the flat layout of vLLM and ModelOpt."""
    model_type: str
    """Kind of decoder layer, one of `MODEL_TYPES`."""
    hidden_size: int
    """Width of the hidden states, which the head shares with the policy."""
    intermediate_size: int
    """Inner width of the feed-forward network."""
    num_layers: int
    """Number of the head's own decoder layers."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """Width of an attention head."""
    vocab_size: int
    """Number of the policy's token ids."""
    draft_vocab_size: int
    """Number of token ids that the head can draft."""
    max_position_embeddings: int
    """Longest context, tokens."""
    layer_ids: tuple[int, ...]
    """Layers of the policy whose inputs the head reads; empty if the config has none."""
    has_attention_bias: bool
    """Whether the attention's projections have biases."""
    flags: Mapping[str, bool]
    """Switches of the architecture, by their names in `speculators`."""
    shapes: Mapping[str, Shape]
    """Shape of every tensor in the folder."""

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether the head can draft only some of the policy's tokens."""
        return self.draft_vocab_size != self.vocab_size

    def expected_shapes(self) -> dict[str, Shape]:
        """Returns the shapes of the tensors that the config requires; `optional_shapes` has the others."""
        hidden, num_aux = self.hidden_size, len(self.layer_ids)
        shapes: dict[str, Shape] = {
            "fc.weight": (hidden, num_aux * hidden),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
            "layers.0.hidden_norm.weight": (hidden,),
        }
        for layer in range(self.num_layers):
            shapes |= {f"layers.{layer}.{name}": s for name, s in self._layer_shapes(is_first=layer == 0).items()}
        if self.has_reduced_vocab:
            shapes["d2t"] = (self.draft_vocab_size,)
        if self.flags["norm_before_fc"]:
            shapes["input_norm.weight"] = (num_aux * hidden,)
        if self.flags["fc_norm"]:
            shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
        return shapes

    def optional_shapes(self) -> dict[str, Shape]:
        """Returns the shapes of the tensors that a folder may have besides."""
        t2d: dict[str, Shape] = {"t2d": (self.vocab_size,)} if self.has_reduced_vocab else {}
        return {"embed_tokens.weight": (self.vocab_size, self.hidden_size), **t2d}

    def _layer_shapes(self, is_first: bool) -> dict[str, Shape]:
        """Returns the shapes of a decoder layer. The first reads an embedding beside the hidden state."""
        hidden, inner = self.hidden_size, self.intermediate_size
        width = 2 * hidden if is_first else hidden
        rows = {"q": self.num_heads * self.head_dim, **dict.fromkeys("kv", self.num_kv_heads * self.head_dim)}
        shapes: dict[str, Shape] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            **{f"self_attn.{p}_proj.weight": (n, width) for p, n in rows.items()},
            "self_attn.o_proj.weight": (hidden, rows["q"]),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if self.model_type == "qwen3":
            shapes |= {f"self_attn.{p}_norm.weight": (self.head_dim,) for p in "qk"}
        if self.has_attention_bias:
            shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in {**rows, "o": hidden}.items()}
        return shapes


def read_policy_facts(folder: Path) -> PolicyFacts:
    """Reads a policy's config.json. Raises ValueError if it cannot be read or lacks a field."""
    whole, where = _read_config(folder, "policy"), folder / "config.json"
    config = _block(whole, "text_config", folder) or whole
    return PolicyFacts(
        folder,
        hidden_size=size_in(config, "hidden_size", where),
        vocab_size=size_in(config, "vocab_size", where),
        num_layers=size_in(config, "num_hidden_layers", where),
        max_position_embeddings=size_in(config, "max_position_embeddings", where),
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


def read_head_facts(folder: Path) -> HeadFacts:
    """Reads the config and the tensors' headers. Raises ValueError if the folder is no EAGLE-3 head or is truncated."""
    config, where = _read_config(folder, "head"), folder / "config.json"
    is_flat = "transformer_layer_config" not in config
    layer = config if is_flat else _block(config, "transformer_layer_config", folder)
    eagle = _block(config, "eagle_config", folder)
    kind = "eagle3" if is_flat else config.get("speculators_model_type")
    model_type = layer.get("model_type", "llama")
    if kind != "eagle3" or model_type not in MODEL_TYPES:
        found = f"speculators_model_type {kind!r}" if kind != "eagle3" else f"model_type {model_type!r}"
        raise ValueError(f"{folder}: {found}; heads are EAGLE-3 of model_type {' or '.join(MODEL_TYPES)}")

    def size(name: str, default: int | None = None) -> int:
        return size_in(layer, name, where, default)

    flags = {
        n: bool(config.get(n, False)) for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    flags["norm_before_fc"] = bool(eagle.get("norm_before_fc", flags["norm_before_fc"]))
    return HeadFacts(
        folder,
        is_flat,
        model_type,
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=size("num_attention_heads"),
        num_kv_heads=size("num_key_value_heads", default=size("num_attention_heads")),
        head_dim=size("head_dim", default=size("hidden_size") // size("num_attention_heads")),
        vocab_size=size("vocab_size"),
        draft_vocab_size=size_in(config, "draft_vocab_size", where, default=size("vocab_size")),
        max_position_embeddings=size("max_position_embeddings"),
        layer_ids=_layer_ids(config.get(LAYER_IDS_FIELD) or eagle.get(LAYER_IDS_FIELD) or [], folder),
        has_attention_bias=bool(layer.get("attention_bias", False)),
        flags=flags,
        shapes={_speculators_name(n): shape for n, shape in tensor_shapes(_tensor_files(folder)).items()},
    )


def read_head_tensors(facts: HeadFacts) -> "dict[str, torch.Tensor]":
    """Returns every tensor of the head by name."""
    tensors: dict[str, torch.Tensor] = {}
    for file in _tensor_files(facts.folder):
        with safe_open(file, "pt") as opened:
            tensors |= {_speculators_name(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _tensor_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors file; save the head in that format")
    return files


def _speculators_name(name: str) -> str:
    """Returns the name in `speculators` of a tensor of either layout."""
    name = name.removeprefix("model.").removeprefix("eagle_module.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _read_config(folder: Path, what: str) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no {what} folder, it has no config.json; give its path")
    return read_object(path)


def _block(config: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{folder}/config.json: {name} is {value!r}; it must be a block of keys")
    return value


def _layer_ids(value: Any, folder: Path) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise ValueError(f"{folder}/config.json: {LAYER_IDS_FIELD} is {value!r}; it must be a list of layer numbers")
    return tuple(value)
