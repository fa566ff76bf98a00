# SPDX-License-Identifier: Apache-2.0
"""Computes digests of drafters' weights, which tell an engine whether acceptance rates were learned with the same weights."""

import hashlib
from pathlib import Path

_SAMPLES = 32
"""Number of equal parts into which a file of weights is divided. A sample of the file is read where each part begins or ends.

Training changes all weights of a model, so a few samples tell two models apart.
"""
_SAMPLE_BYTES = 4096


def weights_digest(model: str | Path) -> str:
    """Returns a digest of the weights in the folder `model`, as a hexadecimal text.

    The digest covers the names and sizes of the files, and samples of their content. To read all content would take long,
    because even a small model has gigabytes. If `model` is no folder that can be read, but for example a name on the Hugging
    Face Hub, the digest is that of this name.
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
