# SPDX-License-Identifier: Apache-2.0
"""What a folder with an EAGLE-3 head says of itself, and whether it fits a policy; without building the head, and
without torch where only the config and the headers are read.

Two layouts are read: that of `speculators` (a nested `transformer_layer_config`) and the flat one of vLLM and ModelOpt
(`midlayer.*`). Tensor names are given in the first.

Shapes: H hidden size, A auxiliary layers, V the policy's vocabulary, D the head's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from nemo_specrollout.config.model_folder import read_object, size_in, tensor_shapes

if TYPE_CHECKING:
    import torch

LAYER_IDS_FIELD = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = "speculators"
FLAT = "flat"
MODEL_TYPES = ("qwen3", "llama")
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class PolicyFacts:
    """What must agree between a policy and its head, from the policy's config.json."""

    folder: Path
    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    is_tied: bool
    """The LM head is the embedding."""


@dataclass(frozen=True)
class HeadFacts:
    """A head folder's config and the headers of its tensors. `layer_ids` is empty if the config has none."""

    folder: Path
    layout: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    layer_ids: tuple[int, ...]
    has_attention_bias: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    shapes: Mapping[str, tuple[int, ...]]
    """Of every tensor, by its name in `speculators`."""

    @property
    def has_reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that the config asks for. `embed_tokens` and `t2d` may be there besides."""
        hidden, num_aux = self.hidden_size, len(self.layer_ids)
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, num_aux * hidden),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }
        for layer in range(self.num_layers):
            shapes |= self._layer_shapes(layer)
        if self.has_reduced_vocab:
            shapes["d2t"] = (self.draft_vocab_size,)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (num_aux * hidden,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
        return shapes

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        width = hidden if layer else 2 * hidden
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in _LAYER_NORMS}
        if layer == 0:
            shapes["hidden_norm.weight"] = (hidden,)
        shapes |= {f"self_attn.{p}_proj.weight": (rows, width) for p, rows in (("q", query), ("k", key), ("v", key))}
        shapes |= {
            "self_attn.o_proj.weight": (hidden, query),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if self.model_type == "qwen3":
            shapes |= {f"self_attn.{p}_norm.weight": (self.head_dim,) for p in "qk"}
        if self.has_attention_bias:
            shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", query), ("k", key), ("v", key))}
            shapes["self_attn.o_proj.bias"] = (hidden,)
        return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


def check_head(folder: Path, policy_folder: Path, read_tensors: bool = True) -> HeadFacts:
    """The facts of a head that fits the policy and is whole. Raises ValueError with the field, its value and the fix.

    Configs and headers cost milliseconds; `read_tensors` also looks for NaN, infinity, all-zero tensors and a wrong
    vocabulary map, at the speed of the disk.
    """
    facts, policy = read_head_facts(folder), read_policy_facts(policy_folder)
    check_fit(facts, policy)
    _check_tensors(facts)
    if read_tensors:
        check_values(facts, read_head_tensors(facts))
    return facts


def misfit(head: str, policy: str) -> str | None:
    """Why a head cannot be refreshed for a policy, as far as both are folders here and their headers tell."""
    if not (Path(head).is_dir() and Path(policy).is_dir()):
        return None
    try:
        check_head(Path(head), Path(policy), read_tensors=False)
    except ValueError as error:
        return str(error)
    return None


def read_policy_facts(folder: Path) -> PolicyFacts:
    """Raises ValueError if the folder has no readable config.json, or one that lacks a field."""
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
    """Reads the config and the headers of the tensors. Raises ValueError for what is no EAGLE-3 head or is truncated."""
    config, where = _read_config(folder, "head"), folder / "config.json"
    is_nested = "transformer_layer_config" in config
    layer = _block(config, "transformer_layer_config", folder) if is_nested else config
    eagle = _block(config, "eagle_config", folder)
    kind = config.get("speculators_model_type") if is_nested else "eagle3"
    model_type = layer.get("model_type", "llama")
    if kind != "eagle3" or model_type not in MODEL_TYPES:
        what = f"speculators_model_type {kind!r}" if kind != "eagle3" else f"model_type {model_type!r}"
        raise ValueError(f"{folder}: {what}; heads are EAGLE-3 of model_type {' or '.join(MODEL_TYPES)}")
    num_heads = size_in(layer, "num_attention_heads", where)
    hidden_size, vocab_size = size_in(layer, "hidden_size", where), size_in(layer, "vocab_size", where)
    return HeadFacts(
        folder,
        SPECULATORS if is_nested else FLAT,
        model_type,
        hidden_size,
        size_in(layer, "intermediate_size", where),
        num_layers=size_in(layer, "num_hidden_layers", where),
        num_heads=num_heads,
        num_kv_heads=size_in(layer, "num_key_value_heads", where, default=num_heads),
        head_dim=size_in(layer, "head_dim", where, default=hidden_size // num_heads),
        vocab_size=vocab_size,
        draft_vocab_size=size_in(config, "draft_vocab_size", where, default=vocab_size),
        max_position_embeddings=size_in(layer, "max_position_embeddings", where),
        layer_ids=_layer_ids(config.get(LAYER_IDS_FIELD) or eagle.get(LAYER_IDS_FIELD) or [], folder),
        has_attention_bias=bool(layer.get("attention_bias", False)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        shapes=_read_shapes(folder),
    )


def read_head_tensors(facts: HeadFacts) -> "dict[str, torch.Tensor]":
    """Every tensor of the head, by its name in `speculators`."""
    tensors: dict[str, torch.Tensor] = {}
    for file in _tensor_files(facts.folder):
        with safe_open(file, "pt") as opened:
            tensors |= {_plain_name(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def check_fit(facts: HeadFacts, policy: PolicyFacts) -> None:
    """Raises ValueError where the head's config does not fit the policy."""
    where = f"{facts.folder}/config.json"
    for name in ("hidden_size", "vocab_size"):
        head, wanted = getattr(facts, name), getattr(policy, name)
        if head != wanted:
            raise ValueError(f"{where}: {name} {head}, the policy's is {wanted}; use a head made for this policy")
    if facts.max_position_embeddings < policy.max_position_embeddings:
        raise ValueError(
            f"{where}: max_position_embeddings {facts.max_position_embeddings} is less than the policy's "
            f"{policy.max_position_embeddings}; vLLM would shorten every context: set it to the policy's"
        )
    if not 0 < facts.draft_vocab_size <= facts.vocab_size:
        raise ValueError(f"{where}: draft_vocab_size {facts.draft_vocab_size}; it must be 1 to {facts.vocab_size}")
    check_layer_ids(facts.layer_ids, policy.num_layers, where)


def check_layer_ids(layer_ids: tuple[int, ...], num_layers: int, where: str) -> None:
    """Raises ValueError unless the ids are distinct layers of the policy."""
    if not layer_ids:
        raise ValueError(f"{where}: {LAYER_IDS_FIELD} is absent, and vLLM would guess; write the ids it was trained on")
    if len(set(layer_ids)) < len(layer_ids) or min(layer_ids) < 0 or max(layer_ids) >= num_layers:
        ids = list(layer_ids)
        raise ValueError(f"{where}: {LAYER_IDS_FIELD} {ids}; name distinct layers of the policy, 0 to {num_layers - 1}")


def check_values(facts: HeadFacts, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Raises ValueError for tensors that cannot be a head's: not finite, all zero, or no map into the vocabulary."""
    import torch

    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{facts.folder}: {name} has NaN or infinite values; go back to an earlier head")
        if not tensor.any() and not name.endswith(".bias"):
            raise ValueError(
                f"{facts.folder}: {name} is all zero; it was never loaded or trained, write the head again"
            )
    if "d2t" not in tensors:
        return
    ids_D = tensors["d2t"] + torch.arange(facts.draft_vocab_size)
    if len(ids_D.unique()) < len(ids_D) or int(ids_D.min()) < 0 or int(ids_D.max()) >= facts.vocab_size:
        raise ValueError(f"{facts.folder}: d2t + index must be distinct ids below {facts.vocab_size}; write d2t again")
    if "t2d" in tensors and tensors["t2d"].nonzero().flatten().tolist() != sorted(ids_D.tolist()):
        raise ValueError(f"{facts.folder}: t2d and d2t name different tokens; write both again")


def _check_tensors(facts: HeadFacts) -> None:
    expected, found = facts.expected_shapes(), facts.shapes
    optional: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (facts.vocab_size, facts.hidden_size)}
    if facts.has_reduced_vocab:
        optional["t2d"] = (facts.vocab_size,)
    missing, surplus = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys() - optional.keys())
    if missing or surplus:
        raise ValueError(f"{facts.folder}: tensors missing {missing}, surplus {surplus}; write the head again")
    for name, shape in found.items():
        wanted = expected.get(name, optional.get(name))
        if shape == wanted:
            continue
        if name == "fc.weight" and shape[1] % facts.hidden_size == 0:
            used = shape[1] // facts.hidden_size
            raise ValueError(
                f"{facts.folder}/config.json: {LAYER_IDS_FIELD} {list(facts.layer_ids)}, but fc.weight uses {used} layers; "
                f"name {used} ids"
            )
        raise ValueError(f"{facts.folder}: {name} is {list(shape)}, its config asks for {list(wanted or ())}")


def _read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {_plain_name(n): shape for n, shape in tensor_shapes(_tensor_files(folder)).items()}


def _tensor_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors file; save the head in that format")
    return files


def _plain_name(name: str) -> str:
    """The name in `speculators` of a tensor of either layout."""
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
        raise ValueError(f"{folder}/config.json: {LAYER_IDS_FIELD} is {value!r}; it must be a list of layers' numbers")
    return tuple(value)
