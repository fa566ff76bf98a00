# SPDX-License-Identifier: Apache-2.0
"""What tells the tokenizer of an engine from others, so that no texts of another one are read as its own."""

import hashlib
from pathlib import Path
from typing import Any

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tiktoken.model")
"""Files that a tokenizer's token ids follow from."""


def tokenizer_fingerprint(model_config: Any) -> bytes:
    """Returns 16 bytes that differ between tokenizers, from vLLM's model config.

    They follow from the files of the tokenizer where it is a folder, so copies of it have the same. Where it is only a
    name, they follow from the name. The size of the vocabulary counts in any case.
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
