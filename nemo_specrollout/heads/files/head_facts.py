# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the folder of an EAGLE-3 head, which has a config.json and files of tensors.

The config has one of two layouts. In the layout of `speculators`, the key `transformer_layer_config` describes the decoder
layer. In the flat layout of vLLM and ModelOpt, the top level of the config describes it, and the layer's tensors are called
`midlayer.*`. This module returns the tensor names of the first layout for both. Only functions that read tensors load torch.

Shapes: D tokens that the head can draft.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from nemo_specrollout.storage.model_folder import num_positions, read_object, size_in, tensor_files, tensor_shapes

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

LAYER_IDS_FIELD = "eagle_aux_hidden_state_layer_ids"
MODEL_TYPES = ("qwen3", "llama")
"""Values of `model_type` that a head's decoder layer may have."""


@dataclass(frozen=True)
class PolicyFacts:
    """Properties of a policy, from its config.json, with which a head must agree."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    """Longest context in tokens."""
    is_untied: bool
    """True if the config says that the LM head is not tied to the embedding. False if it says the opposite or nothing."""


@dataclass(frozen=True)
class HeadFacts:
    """Properties of a head, from its config.json and the headers of its tensors."""

    folder: Path
    layer: Mapping[str, Any]
    """Config of the head's decoder layer, whose `model_type` is one of `MODEL_TYPES`."""
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    layer_ids: tuple[int, ...]
    """Policy layers whose inputs the head reads. Empty if the config does not name them at its top level, which is the only
    place where every part of vLLM looks for them."""
    flags: Mapping[str, bool]
    """Yes-or-no options of the architecture, by their names in `speculators`."""
    shapes: Mapping[str, Shape]

    @property
    def has_reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    @property
    def model_type(self) -> str:
        return self.layer.get("model_type", "llama")


def read_policy_facts(folder: Path) -> PolicyFacts:
    """Returns what a policy's config.json says about the properties with which a head must agree.

    Raises ValueError if the file cannot be read or lacks a field.
    """
    whole = _read_config(folder, "policy")
    where = folder / "config.json"
    config = _block(whole, "text_config", folder) or whole
    ties = [block.get("tie_word_embeddings") for block in (whole, config)]
    return PolicyFacts(
        hidden_size=size_in(config, "hidden_size", where),
        vocab_size=size_in(config, "vocab_size", where),
        num_layers=size_in(config, "num_hidden_layers", where),
        max_position_embeddings=_longest_text(config, folder),
        is_untied=False in ties and True not in ties,
    )


def read_head_facts(folder: Path) -> HeadFacts:
    """Returns the properties of the head in `folder`, from its config.json and the headers of its tensor files.

    Raises ValueError if a file is truncated or if the head is not an EAGLE-3 head.
    """
    config = _read_config(folder, "head")
    where = folder / "config.json"
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
    vocab_size = size_in(layer, "vocab_size", where)
    flags = {
        "norm_before_residual": bool(config.get("norm_before_residual", not is_flat)),
        "norm_before_fc": bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        "fc_norm": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False)),
    }
    shapes = {_speculators_name(n): shape for n, shape in tensor_shapes(_tensor_files(folder)).items()}
    hidden_size = size_in(layer, "hidden_size", where)
    drafted = size_in(config, "draft_vocab_size", where, vocab_size)
    ids = config.get(LAYER_IDS_FIELD) or ()
    length = _longest_text(layer, folder)
    return HeadFacts(folder, layer, hidden_size, vocab_size, drafted, length, tuple(ids), flags, shapes)


def read_head_tensors(folder: Path, framework: str = "pt", only: tuple[str, ...] = ("",)) -> "dict[str, torch.Tensor]":
    """Returns a head's tensors by their names in `speculators`, as numpy arrays if the framework is `np`.

    By default all tensors are read. `only` limits them to the tensors whose names in the files end in one of its strings.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in _tensor_files(folder):
        with safe_open(file, framework) as opened:
            names = [name for name in opened.keys() if name.endswith(only)]  # noqa: SIM118
            tensors |= {_speculators_name(name): opened.get_tensor(name) for name in names}
    return tensors


def check_head(folder: Path, policy_folder: Path, length: int | None = None, *, read_tensors: bool = True) -> HeadFacts:
    """Checks that a head is complete and fits the policy and texts of `length` tokens, and returns the head's properties.

    `length` is None if it is not known. Raises ValueError if a check fails. If `read_tensors` is false, the weights are not
    read, so the check takes only milliseconds.
    """
    facts = read_head_facts(folder)
    policy = read_policy_facts(policy_folder)
    if not facts.layer_ids:
        facts = replace(facts, layer_ids=nested_layer_ids(facts.layer.get("eagle_config"), policy.num_layers))
    _check_fit(facts, policy, length)
    _check_shapes(facts)
    if read_tensors:
        check_values(facts, read_head_tensors(folder))
    else:
        _check_maps(facts, read_head_tensors(folder, "np", ("d2t", "t2d")))
    return facts


def misfit(head: str, policy: str, length: int | None = None) -> str | None:
    """Returns why a head does not fit a policy or texts of `length` tokens, or None if it fits.

    If `head` or `policy` is not a local folder, nothing can be checked, and the result is None too.
    """
    if Path(head).is_dir() and Path(policy).is_dir():
        try:
            check_head(Path(head), Path(policy), length, read_tensors=False)
        except ValueError as error:
            return str(error)
    return None


def nested_layer_ids(eagle_config: Mapping[str, Any] | None, num_layers: int) -> tuple[int, ...]:
    """Returns the ids of the policy layers whose inputs a head reads, from the `eagle_config` nested in the head's config.

    If `eagle_config` has no ids, returns vLLM's default, or () if the policy has too few layers for it. The default is also
    returned for SpecForge's default ids. SpecForge names the layers that output the states, and vLLM the layers that read
    them. So SpecForge's default ids are one smaller than vLLM's, and mean the same states.
    """
    ids = tuple((eagle_config or {}).get(LAYER_IDS_FIELD) or ())
    default = (2, num_layers // 2, num_layers - 3)
    default_outputs = tuple(i - 1 for i in default)
    if ids and ids != default_outputs:
        return ids
    return default if num_layers >= 7 else ()


def check_layer_ids(layer_ids: tuple[int, ...], num_layers: int, where: str) -> None:
    """Raises ValueError unless `layer_ids` are distinct layers of a policy that has `num_layers` layers.

    The text of the error begins with `where`.
    """
    if not layer_ids:
        raise ValueError(f"{where}: {LAYER_IDS_FIELD} is absent, and vLLM would guess; write the ids of its training")
    if len(set(layer_ids)) < len(layer_ids) or min(layer_ids) < 0 or max(layer_ids) >= num_layers:
        ids = list(layer_ids)
        raise ValueError(f"{where}: {LAYER_IDS_FIELD} {ids}; name distinct layers of the policy, 0 to {num_layers - 1}")


def check_values(facts: HeadFacts, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Raises ValueError if a head's tensor is all zero or has values that are not finite, or if a vocabulary map is invalid.

    The vocabulary maps `d2t` and `t2d` say which of the policy's tokens the head can draft.
    """
    import torch

    for name, tensor in ((n, t) for n, t in tensors.items() if t.is_floating_point()):
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{facts.folder}: {name} has NaN or infinite values; go back to an earlier head")
        if not tensor.any() and not name.endswith(".bias"):
            raise ValueError(f"{facts.folder}: {name} is all zero, never loaded or trained; write the head again")
    _check_maps(facts, tensors)


def _check_maps(facts: HeadFacts, tensors: Mapping[str, Any]) -> None:
    """Raises ValueError if a head's vocabulary maps `d2t` and `t2d` are invalid. They may be torch tensors or numpy arrays.

    The maps say which of the policy's tokens the head can draft.
    """
    import numpy as np

    index_D = np.arange(facts.draft_vocab_size)
    ids_D = index_D + np.asarray(tensors.get("d2t", 0)).astype(np.int64)
    if len(np.unique(ids_D)) < len(ids_D) or ids_D.min() < 0 or ids_D.max() >= facts.vocab_size:
        raise ValueError(f"{facts.folder}: d2t + index must be distinct ids below {facts.vocab_size}; write d2t again")
    if not facts.has_reduced_vocab and (ids_D != index_D).any():
        raise ValueError(f"{facts.folder}: d2t permutes the whole vocabulary; put lm_head's rows in the policy's order")
    if "t2d" in tensors and np.flatnonzero(tensors["t2d"]).tolist() != sorted(ids_D.tolist()):
        raise ValueError(f"{facts.folder}: t2d and d2t name different tokens; write both again")


def _check_fit(facts: HeadFacts, policy: PolicyFacts, length: int | None) -> None:
    """Raises ValueError if the head's config does not fit the policy's config or texts of `length` tokens."""
    where = f"{facts.folder}/config.json"
    for name in ("hidden_size", "vocab_size"):
        head = getattr(facts, name)
        wanted = getattr(policy, name)
        if head != wanted:
            raise ValueError(f"{where}: {name} {head}, the policy's is {wanted}; use a head made for this policy")
    if length is not None and facts.max_position_embeddings < length:
        text = f"{facts.max_position_embeddings} is less than max_model_len {length}; raise it, or lower max_model_len"
        raise ValueError(f"{where}: max_position_embeddings {text}")
    if facts.draft_vocab_size > facts.vocab_size:
        raise ValueError(f"{where}: draft_vocab_size {facts.draft_vocab_size}; it must be 1 to {facts.vocab_size}")
    check_layer_ids(facts.layer_ids, policy.num_layers, where)


def _check_shapes(facts: HeadFacts) -> None:
    """Raises ValueError if a tensor that the config requires is missing, if one is not allowed, or if a shape is wrong."""
    required = _required_shapes(facts)
    found = facts.shapes
    optional: dict[str, Shape] = {"embed_tokens.weight": (facts.vocab_size, facts.hidden_size)}
    optional |= {"t2d": (facts.vocab_size,), "d2t": (facts.draft_vocab_size,)}
    missing = sorted(required.keys() - found.keys())
    surplus = sorted(found.keys() - required.keys() - optional.keys())
    if missing or surplus:
        raise ValueError(f"{facts.folder}: tensors missing {missing}, surplus {surplus}; write the head again")
    for name, shape in found.items():
        wanted = (required | optional)[name]
        if shape == wanted:
            continue
        if name == "fc.weight" and shape[1] % facts.hidden_size == 0:
            used = shape[1] // facts.hidden_size
            text = f"{LAYER_IDS_FIELD} {list(facts.layer_ids)}, but fc.weight uses {used} layers; name {used} ids"
            raise ValueError(f"{facts.folder}/config.json: {text}")
        raise ValueError(f"{facts.folder}: {name} is {list(shape)}, its config asks for {list(wanted)}")


def _required_shapes(facts: HeadFacts) -> dict[str, Shape]:
    """Returns the shapes of the tensors that a head of this config must have."""
    hidden = facts.hidden_size
    num_aux = len(facts.layer_ids)
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, num_aux * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (facts.draft_vocab_size, hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    num_layers = size_in(facts.layer, "num_hidden_layers", facts.folder / "config.json")
    types = facts.layer.get("layer_types")
    if types and not (isinstance(types, list) and len(types) == num_layers and all(isinstance(t, str) for t in types)):
        raise ValueError(f"{facts.folder}/config.json: layer_types must name the type of each of {num_layers} layers")
    for layer in range(num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(facts, layer == 0).items()}
    if facts.has_reduced_vocab:
        shapes["d2t"] = (facts.draft_vocab_size,)
    if facts.flags["norm_before_fc"]:
        shapes["input_norm.weight"] = (num_aux * hidden,)
    if facts.flags["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
    return shapes


def _layer_shapes(facts: HeadFacts, is_first: bool) -> dict[str, Shape]:
    """Returns the shapes of the tensors of a decoder layer by name.

    The head's first layer has inputs of twice the width, because it reads an embedding beside the hidden state.
    """

    def size(name: str, default: int | None = None) -> int:
        return size_in(facts.layer, name, facts.folder / "config.json", default)

    hidden = facts.hidden_size
    inner = size("intermediate_size")
    num_heads = size("num_attention_heads")
    head_dim = size("head_dim", default=hidden // num_heads)
    width = 2 * hidden if is_first else hidden
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


def _longest_text(config: Mapping[str, Any], folder: Path) -> int:
    """Returns the length in tokens of the longest text that a model's config allows, including an extension by YaRN."""
    where = folder / "config.json"
    length = num_positions(config, where)
    return size_in(config, "max_position_embeddings", where) if length is None else length


def _tensor_files(folder: Path) -> list[Path]:
    files = tensor_files(folder)
    if not files:
        raise ValueError(f"{folder}: no *.safetensors file; save the head in that format")
    return files


def _speculators_name(name: str) -> str:
    """Returns the name that a tensor has in `speculators`. `name` is its name in a file of either layout."""
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
