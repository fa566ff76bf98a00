# SPDX-License-Identifier: Apache-2.0
"""Digests of a drafter's weights, by which an engine sees whether acceptance rates were learned with the same weights."""

import hashlib
from pathlib import Path

_SAMPLES = 32
"""Number of equal parts of a file at whose ends samples are read. Training changes all numbers of a head, so a few samples
tell two heads apart."""
_SAMPLE_BYTES = 4096


def weights_digest(model: str | Path) -> str:
    """Returns a digest of the weights in a folder, or of the string `model` if there is no such folder, as for a Hub name.

    The digest covers the files' names, their sizes, and samples of their content. It does not cover all content, because even
    a small model has gigabytes. If a folder cannot be read, the digest is that of the string.
    """
    digest = hashlib.sha256()
    folder = Path(model)
    try:
        files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
        for file in files:
            _add(digest, file)
    except OSError:
        digest = hashlib.sha256(str(model).encode())
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}\n".encode())
    with file.open("rb") as content:
        for sample in range(_SAMPLES + 1):
            content.seek(max(size - _SAMPLE_BYTES, 0) * sample // _SAMPLES)
            digest.update(content.read(_SAMPLE_BYTES))
