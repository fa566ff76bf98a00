# SPDX-License-Identifier: Apache-2.0
"""Reads facts about a model from the files of its Hugging Face folder, without transformers."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from nemo_specrollout.storage.files import read_regular

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
Tensor = TypeVar("Tensor")


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError, which names the file and its fault."""
    try:
        read = json.loads(read_regular(file).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; copy the folder again") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({str(error)[:100]}); copy or write it again") from error
    if not isinstance(read, dict):
        raise ValueError(f"{file}: not a JSON object but {str(read)[:40]!r}; copy or write it again")
    return read


def size_in(config: Mapping[str, Any], name: str, where: object, default: int | None = None) -> int:
    """Returns the whole number, at least 1, at `name`; `default`, if given, for null. Raises ValueError about `where`."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}; it must be a whole number, at least 1")
    return value


def tokenizer_fingerprint(folder: Path) -> str:
    """Returns a hash of the tokenizer's tokens and their ids; empty if the folder has no vocabulary."""
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if not vocabulary:
        return ""
    added = sorted((t["id"], t["content"]) for t in tokenizer.get("added_tokens", []))
    pairs = sorted(vocabulary.items()) if isinstance(vocabulary, dict) else vocabulary
    return hashlib.blake2b(json.dumps([pairs, added]).encode(), digest_size=16).hexdigest()


def stop_token_ids(folder: Path) -> list[int]:
    """Returns the ids that end a text, from generation_config.json if it exists. Raises ValueError if they are not ids."""
    file = folder / "generation_config.json"
    file = file if file.is_file() else folder / "config.json"
    found = _read(file).get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{file}: eos_token_id is {found!r}; it must be a token id, or a list of them")
    return list(ids)


def longest_text(folder: Path) -> int | None:
    """Returns the length in tokens of the longest text that the model was made for, if its config says so."""
    return _read(folder / "config.json").get("max_position_embeddings")


def with_tied_lm_head(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns the tensors, with the embedding also under the LM head's name if the model of `folder` ties the two.

    vLLM >= 0.29 reloads each layer by itself: without the second name, the LM head would keep its old weights.
    """
    found = list(tensors)
    names = dict(found)
    if _read(folder / "config.json").get("tie_word_embeddings") and EMBEDDING in names and LM_HEAD not in names:
        found.append((LM_HEAD, names[EMBEDDING]))
    return found


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors in safetensors files, by name. Raises ValueError for an incomplete file."""
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
