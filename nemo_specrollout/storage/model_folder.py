# SPDX-License-Identifier: Apache-2.0
"""Reads facts about a model from the files of its Hugging Face folder, without transformers."""

import hashlib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from nemo_specrollout.storage.files import read_regular
from nemo_specrollout.storage.text_files import parse_json

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
Tensor = TypeVar("Tensor")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth")
"""Patterns for files of weights in other formats than safetensors. This module does not read tensor shapes from them."""
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "n_predict")
"""Keys of a config.json whose value is the number of a model's layers for multi-token prediction (MTP)."""
_MTP_BY_TYPE = ("dots3_note", "longcat_flash", "step3p", "minimax_m3", "mimo_v2", "gemma4")
"""Prefixes of `model_type`. vLLM assumes that models of these types have MTP layers, even if config.json does not say so."""


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError with the file's name and the fault if the file has no object."""
    try:
        read = parse_json(read_regular(file).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; copy the folder again") from error
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({str(error)[:100]}); copy or write it again") from error
    if not isinstance(read, dict):
        raise ValueError(f"{file}: not a JSON object but {reprlib.repr(read)}; copy or write it again")
    return read


def size_in(config: Mapping[str, Any], name: str, where: object, default: int | None = None) -> int:
    """Returns the value of the key `name` in a config.json, which must be a whole number of at least 1.

    If the value is absent or null and a `default` is given, returns the default. Otherwise raises ValueError if the value is
    wrong or missing. The message begins with `where`.
    """
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}; it must be a whole number, at least 1")
    return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the block of a config.json about the language model, or all of it if there is no such block."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def tokenizer_fingerprint(folder: Path) -> str:
    """Returns a hash of the tokens of a model's tokenizer and their ids, or "" if the folder has no vocabulary."""
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if not vocabulary:
        return ""
    added = sorted((t["id"], t["content"]) for t in tokenizer.get("added_tokens", []))
    pairs = sorted(vocabulary.items()) if isinstance(vocabulary, dict) else vocabulary
    return hashlib.blake2b(json.dumps([pairs, added]).encode(), digest_size=16).hexdigest()


def stop_token_ids(folder: Path) -> list[int]:
    """Returns the ids of the tokens that end a text of the model in `folder`, or an empty list if none are known.

    They come from generation_config.json. If it has none, they come from config.json. If this has none either, the end-of-text
    token of the tokenizer is the only one. Raises ValueError if an `eos_token_id` in one of the config files is neither a
    token id nor a list of token ids.
    """
    config = _read(folder / "config.json")
    ids = list[int]()
    generation = _read(folder / "generation_config.json")
    for block, name in ((generation, "generation_config"), (config, "config"), (text_config(config), "config")):
        found = block.get("eos_token_id")
        if found is None:
            continue
        named = found if isinstance(found, list) else [found]
        if not all(type(i) is int and i >= 0 for i in named):
            raise ValueError(f"{folder}/{name}.json: eos_token_id is {found!r}; it must be a token id, or a list")
        ids = ids or named
    if ids:
        return ids
    tokenizer, settings = (_read(folder / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    eos = settings.get("eos_token") or _read(folder / "special_tokens_map.json").get("eos_token")
    eos = eos.get("content") if isinstance(eos, Mapping) else eos
    return [token["id"] for token in tokenizer.get("added_tokens") or () if token["content"] == eos][-1:]


def longest_text(folder: Path) -> int | None:
    """Returns the number of tokens of the longest text for which a model was made, or None if config.json does not say it."""
    return text_config(_read(folder / "config.json")).get("max_position_embeddings")


def rope_of(config: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """Returns the block of a config.json about rotary position embeddings (RoPE), or {} if there is none.

    Raises ValueError if the value is not a block of keys. The message begins with `where`.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(value := config.get(name) or {}, Mapping):
            raise ValueError(f"{where}: {name} is {value!r}; it must be a block of keys")
        if value:
            return value
    return {}


def num_positions(config: Mapping[str, Any], where: object) -> int | None:
    """Returns the number of tokens of the longest text that a config.json allows, or None if it does not say.

    The number includes YaRN's extension. Raises ValueError if a value has a wrong type. The message begins with `where`.
    """
    rope = rope_of(config, where)
    is_yarn = "yarn" in (rope.get("rope_type"), rope.get("type"))
    scaled = int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or 0)) if is_yarn else 0
    written = size_in(config, "max_position_embeddings", where, default=0)
    return max(written, scaled) or None


def layer_number(tensor: str) -> int | None:
    """Returns the number of the layer to which a tensor belongs, by the tensor's name, or None if it belongs to no layer."""
    found = _LAYER.search(tensor)
    return None if found is None else int(found[1])


def has_mtp_layers(config: Mapping[str, Any]) -> bool:
    """Tells whether a model has layers for multi-token prediction (MTP), by its config.json and vLLM's rules."""
    blocks = (config, text_config(config), config.get("mtp_config") or {})
    counts = (block.get(name) for block in blocks if isinstance(block, Mapping) for name in _MTP_LAYERS)
    is_by_type = any(str(block.get("model_type", "")).startswith(_MTP_BY_TYPE) for block in blocks[:2])
    return is_by_type or any(isinstance(count, int) and count > 0 for count in counts)


def has_mtp_tensors(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Tells whether one of the tensors in `names` belongs to a layer for multi-token prediction (MTP).

    A tensor belongs to such a layer if its name says so, or if its layer comes after the last layer of the language model in
    `config`.
    """
    last = text_config(config).get("num_hidden_layers")
    for name in names:
        layer = layer_number(name)
        is_beyond = layer is not None and isinstance(last, int) and layer >= last
        if is_beyond or "mtp" in name or "nextn" in name:
            return True
    return False


def tensor_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that have a model's weights.

    They are the files that the folder's index of tensors names, as in vLLM. Without an index, they are all *.safetensors
    files. Raises ValueError if the index cannot be read, or if it names a missing file.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    names = read_object(index).get("weight_map")
    files = sorted({folder / str(name) for name in names.values()}) if isinstance(names, Mapping) else []
    absent = next((file.name for file in files if not file.is_file()), None)
    if absent or not files:
        raise ValueError(f"{index}: {absent or 'its weight_map'} is missing; copy the missing file to the folder")
    return files


def with_tied_lm_head(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns `tensors` of the model in `folder`, with a tensor for the LM head even if it is tied to the embedding.

    If it is tied, the model has only a tensor for the embedding. This tensor is then also returned under the LM head's name.
    vLLM 0.29 and later need this, because they reload each layer separately. Without it, the LM head would keep its old
    weights. A model without a tensor for the LM head counts as tied, unless its config.json says that it is not.
    """
    found = list(tensors)
    names = dict(found)
    config = read_object(folder / "config.json")
    is_tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    if is_tied is not False and EMBEDDING in names and LM_HEAD not in names:
        found.append((LM_HEAD, names[EMBEDDING]))
    return found


def check_model(folder: Path, policy: Path, kind: str = "") -> None:
    """Raises ValueError if vLLM cannot load the model in `folder`, or if this model cannot draft for the policy.

    Args:
        folder: the Hugging Face folder of the model.
        policy: the Hugging Face folder of the policy.
        kind: the type of the drafter, or empty if the model is the policy itself.
    """
    try:
        size = _vocab_size(folder)
        _ = stop_token_ids(folder)
        shapes = check_tensors(folder)
        if not kind:
            _check_embedding(folder, shapes.get(EMBEDDING))
        if kind not in ("draft_model", "remote") or not policy.is_dir():
            return
        wanted = _vocab_size(policy)
        knows_the_tokens = size == wanted
        if kind == "remote":
            own, other = tokenizer_fingerprint(folder), tokenizer_fingerprint(policy)
            # A remote drafter sends token ids, so it may have another number of embedding rows, of which those beyond the
            # tokenizer's tokens are padding. The number of rows is only compared if a folder has no vocabulary.
            knows_the_tokens = own == other if own and other else knows_the_tokens
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{folder}: a value of its JSON files has a wrong type ({error}); copy them again") from error
    if not knows_the_tokens:
        fault = "has another tokenizer" if size == wanted else f"knows {size} tokens, the policy {wanted}"
        raise ValueError(f"{folder} {fault}; name a model of the policy's family, or remote if padding differs")


def check_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's tensors by name, or {} if the weights are in another format than safetensors.

    Raises ValueError if files are missing or incomplete, or if they do not fit the folder's index or config.json.
    """
    files = tensor_files(folder)
    if not files and not any(any(folder.glob(pattern)) for pattern in _OTHER_FORMATS):
        raise ValueError(f"{folder}: no *.safetensors file; copy the weights to the folder")
    shapes = tensor_shapes(files)
    index = folder / "model.safetensors.index.json"
    listed = read_object(index)["weight_map"] if index.exists() else {}
    if missing := sorted(listed.keys() - shapes.keys()):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ValueError(f"{index}: no file has the tensor {missing[0]}{more}; copy the folder again")
    config = text_config(read_object(folder / "config.json"))
    sizes = {name: size_in(config, name, folder / "config.json", default=0) for name in _SIZES}
    num_layers = 1 + max((layer for name in shapes if (layer := layer_number(name)) is not None), default=-1)
    if 0 < num_layers < sizes["num_hidden_layers"]:
        text = f"there are {num_layers} layers of the {sizes['num_hidden_layers']} in config.json"
        raise ValueError(f"{folder}: {text}; copy the folder again")
    return shapes


def _check_embedding(folder: Path, shape: tuple[int, ...] | None) -> None:
    """Raises ValueError if the shape of a model's embedding differs from the sizes in its config.json.

    `shape` is None if the model has no tensor with the usual name of the embedding.
    """
    config = text_config(read_object(folder / "config.json"))
    rows = tuple(size_in(config, name, folder / "config.json", default=0) for name in ("vocab_size", "hidden_size"))
    if shape is not None and all(rows) and shape != rows:
        text = f"{EMBEDDING} is {list(shape)}, config.json makes it {list(rows)}"
        raise ValueError(f"{folder}: {text}; copy the folder again")


def _vocab_size(folder: Path) -> Any:
    """Returns the value of `vocab_size` in a model's config.json, without checking it."""
    return text_config(read_object(folder / "config.json")).get("vocab_size")


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors in safetensors files, by name. Raises ValueError if a file is incomplete."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, "np") as opened:
                shapes |= {n: tuple(opened.get_slice(n).get_shape()) for n in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a whole safetensors file ({error}); copy or write it again") from error
    return shapes


def _read(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}
