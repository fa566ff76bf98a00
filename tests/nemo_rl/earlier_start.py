# SPDX-License-Identifier: Apache-2.0
"""What a second start of a run finds: the checkpoints of an earlier start, and what its engines had learned, whole or damaged."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

LEARNED = "specrollout_learned"
"""The folder beside the checkpoints, as `nemo_rl/installation.py` names it."""


def put_earlier_start(checkpoints: Path, folder: Path, damage: str | None) -> None:
    """Copies `checkpoints` of an earlier start to `folder`, and damages what its engines have learned, by a name in `DAMAGES`.

    Without `damage` it stays whole. Raises FileNotFoundError if there is nothing to damage.
    """
    shutil.copytree(checkpoints, folder)
    if damage is None:
        return
    files = sorted(path for path in (folder / LEARNED).rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{folder / LEARNED} has no file, although engines should have learned something")
    for file in files:
        DAMAGES[damage](file)


def _cut_short(file: Path) -> None:
    """As a crash or a full disk leaves a file that nobody renames into place."""
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


def _overwrite(file: Path) -> None:
    """Other bytes of the same length: a disk's fault, or a file of something else."""
    file.write_bytes(random.Random(0).randbytes(file.stat().st_size))


def _turn_bytes(file: Path) -> None:
    """Every fifth byte another: the lengths and much of the text still read."""
    whole = bytearray(file.read_bytes())
    for place in range(0, len(whole), 5):
        whole[place] ^= 1
    file.write_bytes(bytes(whole))


def _empty(file: Path) -> None:
    """What is left of a file that was opened and never written."""
    file.write_bytes(b"")


def _make_folder(file: Path) -> None:
    """Nothing can be read there, and nothing written either."""
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut_short": _cut_short,
    "overwritten": _overwrite,
    "turned": _turn_bytes,
    "emptied": _empty,
    "a_folder": _make_folder,
}
"""What may befall every file of the folder between two starts."""
