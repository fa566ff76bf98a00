# SPDX-License-Identifier: Apache-2.0
"""Folders with checksums that detect damage."""

import hashlib
import json
from pathlib import Path

from nemo_specrollout.storage.files import sync, write_atomically

CHECKSUMS = "checksums.json"


class DamagedFolder(ValueError):
    """Error for a folder whose files differ from what was written. The message names the file and the fault."""


def seal_folder(folder: Path) -> None:
    """Writes `checksums.json` with size and SHA-256 of each file in `folder`. When it returns, all files are on disk."""
    sums = {}
    for file in sorted(folder.iterdir()):
        sync(file)
        sums[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    write_atomically(folder / CHECKSUMS, json.dumps(sums, indent=1))


def check_seal(folder: Path) -> None:
    """Raises DamagedFolder unless all files that `seal_folder` has recorded still have the same content. Reads all of them."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in sums.items()}
        if any(Path(name).name != name or "\0" in name or not name.isprintable() for name in expected):
            raise ValueError("a name in it is not a plain file name")
    except OSError as error:
        raise DamagedFolder(f"{folder} has no readable {CHECKSUMS} ({error.strerror})") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DamagedFolder(f"{folder / CHECKSUMS} is damaged") from error
    if not expected:
        raise DamagedFolder(f"{folder / CHECKSUMS} names no file")
    for name, (size, digest) in expected.items():
        try:
            found = (folder / name).stat().st_size
            if found != size:
                raise DamagedFolder(f"{folder / name} has {found} bytes of {size}")
            if _sha256(folder / name) != digest:
                raise DamagedFolder(f"{folder / name} is not what was written: its checksum differs")
        except OSError as error:
            raise DamagedFolder(f"{folder / name} cannot be read ({error.strerror})") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
