# SPDX-License-Identifier: Apache-2.0
"""What the files of a Hugging Face folder say of a model, read without transformers; of a hub's name, nothing."""

import hashlib
import json
from pathlib import Path
from typing import Any


def tokenizer_fingerprint(folder: Path) -> str:
    """A hash of the tokenizer's vocabulary, tokens and ids; empty where there is none. What else differs between tokenizers
    of one family, e.g. the chat template, does not count."""
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if not vocabulary:
        return ""
    added = sorted((t["id"], t["content"]) for t in tokenizer.get("added_tokens", []))
    pairs = sorted(vocabulary.items()) if isinstance(vocabulary, dict) else vocabulary
    return hashlib.blake2b(json.dumps([pairs, added]).encode(), digest_size=16).hexdigest()


def stop_token_ids(folder: Path) -> list[int]:
    """The ids that end a text."""
    for name in ("generation_config.json", "config.json"):
        ids = _read(folder / name).get("eos_token_id")
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []


def longest_text(folder: Path) -> int | None:
    """Tokens of the longest text that the model was made for."""
    return _read(folder / "config.json").get("max_position_embeddings")


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
