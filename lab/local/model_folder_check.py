# SPDX-License-Identifier: Apache-2.0
"""Checks the JSON files, the tokenizer and the tensor headers of a Hugging Face folder. Does not load torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.local.policy_shape import PolicyShape
from nemo_specrollout.storage.model_folder import read_object, size_in, stop_token_ids, tensor_shapes

MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")
"""Files that a complete folder has."""
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "n_predict")
"""Keys of a config.json that count a model's layers for multi-token prediction."""


def check_model_folder(folder: Path) -> dict[str, Any]:
    """Returns the config.json of a folder with complete files that belong together.

    Raises ValueError with file, fault and fix.
    """
    for name in MODEL_FILES:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}; copy the whole folder")
    config = read_object(folder / "config.json")
    for name in ("vocab_size", "num_hidden_layers", "hidden_size", "max_position_embeddings"):
        size_in(config, name, folder / "config.json")
    _check_tokenizer(folder, config["vocab_size"])
    for token in stop_token_ids(folder):
        if token >= config["vocab_size"]:
            raise ValueError(
                f"{folder}/generation_config.json: eos_token_id {token} is beyond the vocabulary of {config['vocab_size']}"
            )
    tensor_shapes(sorted(folder.glob("*.safetensors")))
    return config


def check_trainable(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError unless the local trainer supports the model and the tensors are the ones of its config."""
    try:
        shape = PolicyShape.from_hf(config)
    except ValueError as error:
        raise ValueError(f"{folder}/{error}") from error
    found = tensor_shapes(sorted(folder.glob("*.safetensors")))
    if shape.num_layers > len(found):  # a huge number would take long to expand into names
        raise ValueError(
            f"{folder}: config.json has {shape.num_layers} layers, but there are {len(found)} tensors in all"
        )
    expected = shape.hf_shapes()
    missing = sorted(expected.keys() - found.keys())
    surplus = sorted(found.keys() - expected.keys() - {"lm_head.weight"})
    if missing or surplus:
        fault = f"no tensor {missing[0]}" if missing else f"a tensor too many, {surplus[0]}"
        raise ValueError(f"{folder}: there is {fault}; config.json and model.safetensors do not belong together")
    for name, size in expected.items():
        if found[name] != size:
            raise ValueError(f"{folder}: {name} is {list(found[name])}, but config.json makes it {list(size)}")


def has_mtp_layers(config: Mapping[str, Any]) -> bool:
    """Returns whether a model's config.json says that it has layers for multi-token prediction."""
    inner = config.get("text_config")
    blocks = (config, inner if isinstance(inner, Mapping) else {})
    return any(isinstance(b.get(name), int) and b[name] > 0 for b in blocks for name in _MTP_LAYERS)


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.encode("1 + 2 = \N{GREEK SMALL LETTER PI}")  # some fail on characters that they do not know
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of the library are no subclass of Exception
        raise ValueError(f"{file}: no tokenizer ({str(error)[:100]}); copy it again") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=0)
    if largest >= vocab_size:  # fewer ids than the model has are fine: the rest is padding
        raise ValueError(
            f"the tokenizer of {folder} has token id {largest}, but the model's vocabulary ends at {vocab_size - 1}; the two "
            "do not belong together"
        )
    settings = folder / "tokenizer_config.json"
    pad = read_object(settings).get("pad_token") if settings.is_file() else None
    pad = pad.get("content") if isinstance(pad, Mapping) else pad
    if not isinstance(pad, str) or pad not in vocabulary:
        raise ValueError(
            f"{settings}: pad_token is {pad!r}, which is no token; name one, e.g. the one that ends a text"
        )
