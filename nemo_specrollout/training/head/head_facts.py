# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the folder of an EAGLE-3 head: its config, the headers of its tensors, and the tensors.

Two layouts are read: the one of `speculators`, with a nested `transformer_layer_config`, and the flat one of vLLM and
ModelOpt, with `midlayer.*`. Tensor names are given in the first. Only functions that read tensors load torch.

Shapes: D tokens that the head can draft.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from nemo_specrollout.storage.model_folder import read_object, size_in, tensor_shapes

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

LAYER_IDS_FIELD = "eagle_aux_hidden_state_layer_ids"
MODEL_TYPES = ("qwen3", "llama")
"""Kinds of decoder layer that a head may have."""


@dataclass(frozen=True)
class PolicyFacts:
    """Properties of a policy, from its config.json, with which a head must agree."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    """Longest context, tokens."""
    is_tied: bool
    """Whether the LM head is the embedding."""


@dataclass(frozen=True)
class HeadFacts:
    """Properties of a head, from its config.json and the headers of its tensors."""

    folder: Path
    layer: Mapping[str, Any]
    """Config of the head's decoder layer, which is of one of `MODEL_TYPES`."""
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    layer_ids: tuple[int, ...]
    """Layers of the policy whose inputs the head reads; empty if the config has none."""
    flags: Mapping[str, bool]
    """Switches of the architecture, by their names in `speculators`."""
    shapes: Mapping[str, Shape]

    @property
    def has_reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    @property
    def model_type(self) -> str:
        return self.layer.get("model_type", "llama")


def read_policy_facts(folder: Path) -> PolicyFacts:
    """Reads a policy's config.json. Raises ValueError if it cannot be read or lacks a field."""
    whole, where = _read_config(folder, "policy"), folder / "config.json"
    config = _block(whole, "text_config", folder) or whole
    return PolicyFacts(
        hidden_size=size_in(config, "hidden_size", where),
        vocab_size=size_in(config, "vocab_size", where),
        num_layers=size_in(config, "num_hidden_layers", where),
        max_position_embeddings=size_in(config, "max_position_embeddings", where),
        is_tied=bool(config.get("tie_word_embeddings")),
    )


def read_head_facts(folder: Path) -> HeadFacts:
    """Reads the config and the tensors' headers. Raises ValueError for a folder that is truncated or not an EAGLE-3 head."""
    config, where = _read_config(folder, "head"), folder / "config.json"
    is_flat = "transformer_layer_config" not in config
    layer = config if is_flat else _block(config, "transformer_layer_config", folder)
    eagle = _block(config, "eagle_config", folder)
    kind = "eagle3" if is_flat else config.get("speculators_model_type")
    model_type = layer.get("model_type", "llama")
    if kind != "eagle3" or model_type not in MODEL_TYPES:
        found = f"speculators_model_type {kind!r}" if kind != "eagle3" else f"model_type {model_type!r}"
        raise ValueError(f"{folder}: {found}; heads are EAGLE-3 of model_type {' or '.join(MODEL_TYPES)}")
    ids = config.get(LAYER_IDS_FIELD) or eagle.get(LAYER_IDS_FIELD) or []
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ValueError(f"{where}: {LAYER_IDS_FIELD} is {ids!r}; it must be a list of layer numbers")
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    flags = {name: bool(config.get(name)) for name in names}
    vocab_size = size_in(layer, "vocab_size", where)
    return HeadFacts(
        folder,
        layer,
        size_in(layer, "hidden_size", where),
        vocab_size,
        size_in(config, "draft_vocab_size", where, default=vocab_size),
        size_in(layer, "max_position_embeddings", where),
        tuple(ids),
        flags | {"norm_before_fc": bool(eagle.get("norm_before_fc", flags["norm_before_fc"]))},
        {_speculators_name(n): shape for n, shape in tensor_shapes(_tensor_files(folder)).items()},
    )


def read_head_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    tensors: dict[str, torch.Tensor] = {}
    for file in _tensor_files(folder):
        with safe_open(file, "pt") as opened:
            tensors |= {_speculators_name(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def check_head(folder: Path, policy_folder: Path, read_tensors: bool = True) -> HeadFacts:
    """Returns the facts of a head that fits the policy and is complete; raises ValueError for any other.

    Without `read_tensors`, only configs and headers are read, in milliseconds.
    """
    facts, policy = read_head_facts(folder), read_policy_facts(policy_folder)
    _check_fit(facts, policy)
    _check_shapes(facts)
    if read_tensors:
        check_values(facts, read_head_tensors(folder))
    return facts


def misfit(head: str, policy: str) -> str | None:
    """Returns why a head does not fit a policy, from their headers; None if it fits, or if either is not a folder here."""
    if Path(head).is_dir() and Path(policy).is_dir():
        try:
            check_head(Path(head), Path(policy), read_tensors=False)
        except ValueError as error:
            return str(error)
    return None


def check_layer_ids(layer_ids: tuple[int, ...], num_layers: int, where: str) -> None:
    """Raises ValueError, which begins with `where`, unless the ids are distinct layers of the policy."""
    if not layer_ids:
        raise ValueError(
            f"{where}: {LAYER_IDS_FIELD} is absent, and vLLM would guess; write the ids that the head was trained on"
        )
    if len(set(layer_ids)) < len(layer_ids) or min(layer_ids) < 0 or max(layer_ids) >= num_layers:
        ids = list(layer_ids)
        raise ValueError(f"{where}: {LAYER_IDS_FIELD} {ids}; name distinct layers of the policy, 0 to {num_layers - 1}")


def check_values(facts: HeadFacts, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Raises ValueError for tensors that are not finite, all zero, or no valid map of the vocabulary."""
    import torch

    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{facts.folder}: {name} has NaN or infinite values; go back to an earlier head")
        if not tensor.any() and not name.endswith(".bias"):
            raise ValueError(
                f"{facts.folder}: {name} is all zero, so it was never loaded or trained; write the head again"
            )
    if "d2t" not in tensors:
        return
    ids_D = tensors["d2t"] + torch.arange(facts.draft_vocab_size)
    if len(ids_D.unique()) < len(ids_D) or int(ids_D.min()) < 0 or int(ids_D.max()) >= facts.vocab_size:
        raise ValueError(f"{facts.folder}: d2t + index must be distinct ids below {facts.vocab_size}; write d2t again")
    if "t2d" in tensors and tensors["t2d"].nonzero().flatten().tolist() != sorted(ids_D.tolist()):
        raise ValueError(f"{facts.folder}: t2d and d2t name different tokens; write both again")


def _check_fit(facts: HeadFacts, policy: PolicyFacts) -> None:
    """Raises ValueError if the head's config does not fit the policy's."""
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
    if facts.draft_vocab_size > facts.vocab_size:
        raise ValueError(f"{where}: draft_vocab_size {facts.draft_vocab_size}; it must be 1 to {facts.vocab_size}")
    check_layer_ids(facts.layer_ids, policy.num_layers, where)


def _check_shapes(facts: HeadFacts) -> None:
    """Raises ValueError unless the tensors are the ones that the config requires or allows."""
    required, found = _required_shapes(facts), facts.shapes
    optional: dict[str, Shape] = {"embed_tokens.weight": (facts.vocab_size, facts.hidden_size)}
    if facts.has_reduced_vocab:
        optional["t2d"] = (facts.vocab_size,)
    missing, surplus = sorted(required.keys() - found.keys()), sorted(found.keys() - required.keys() - optional.keys())
    if missing or surplus:
        raise ValueError(f"{facts.folder}: tensors missing {missing}, surplus {surplus}; write the head again")
    for name, shape in found.items():
        wanted = (required | optional)[name]
        if shape == wanted:
            continue
        if name == "fc.weight" and shape[1] % facts.hidden_size == 0:
            used = shape[1] // facts.hidden_size
            raise ValueError(
                f"{facts.folder}/config.json: {LAYER_IDS_FIELD} {list(facts.layer_ids)}, but fc.weight uses {used} layers; "
                f"name {used} ids"
            )
        raise ValueError(f"{facts.folder}: {name} is {list(shape)}, its config asks for {list(wanted)}")


def _required_shapes(facts: HeadFacts) -> dict[str, Shape]:
    """Returns the shapes of the tensors that a head of this config must have."""
    hidden, num_aux = facts.hidden_size, len(facts.layer_ids)
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, num_aux * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (facts.draft_vocab_size, hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    for layer in range(size_in(facts.layer, "num_hidden_layers", facts.folder / "config.json")):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(facts, layer == 0).items()}
    if facts.has_reduced_vocab:
        shapes["d2t"] = (facts.draft_vocab_size,)
    if facts.flags["norm_before_fc"]:
        shapes["input_norm.weight"] = (num_aux * hidden,)
    if facts.flags["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
    return shapes


def _layer_shapes(facts: HeadFacts, is_first: bool) -> dict[str, Shape]:
    """Returns the shapes of a decoder layer. The first reads an embedding beside the hidden state."""

    def size(name: str, default: int | None = None) -> int:
        return size_in(facts.layer, name, facts.folder / "config.json", default)

    hidden, inner, num_heads = facts.hidden_size, size("intermediate_size"), size("num_attention_heads")
    head_dim, width = size("head_dim", default=hidden // num_heads), 2 * hidden if is_first else hidden
    keys = size("num_key_value_heads", default=num_heads) * head_dim
    rows = {"q": num_heads * head_dim, "k": keys, "v": keys}
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{p}_proj.weight": (n, width) for p, n in rows.items()},
        "self_attn.o_proj.weight": (hidden, rows["q"]),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if facts.model_type == "qwen3":
        shapes |= {f"self_attn.{p}_norm.weight": (head_dim,) for p in "qk"}
    if facts.layer.get("attention_bias"):
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in {**rows, "o": hidden}.items()}
    return shapes


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
