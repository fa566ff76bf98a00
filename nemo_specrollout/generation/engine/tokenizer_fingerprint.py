# SPDX-License-Identifier: Apache-2.0
"""Computes a fingerprint of an engine's tokenizer, so that no engine uses token ids that another tokenizer has made."""

import hashlib
from pathlib import Path
from typing import Any

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tiktoken.model")
"""Names of the files that determine a tokenizer's token ids."""


def tokenizer_fingerprint(model_config: Any) -> bytes:
    """Returns 16 bytes that differ between tokenizers, for the tokenizer in vLLM's model config.

    If the tokenizer is a folder, the bytes are computed from its files, so copies of it have the same fingerprint. If the
    tokenizer is only a name, they are computed from the name. In both cases they also depend on the size of the vocabulary.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(str(model_config.get_vocab_size()).encode())
    name = str(model_config.tokenizer or model_config.model)
    folder = Path(name)
    if not folder.is_dir():
        digest.update(name.encode())
        return digest.digest()
    for file in _FILES:
        path = folder / file
        if path.is_file():
            digest.update(file.encode())
            digest.update(path.read_bytes())
    return digest.digest()
