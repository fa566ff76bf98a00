# SPDX-License-Identifier: Apache-2.0
"""What a second start of a run finds: the checkpoints of an earlier one, and what its engines learned, whole or damaged."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

LEARNED = "specrollout_learned"
"""The folder beside the checkpoints, as `nemo_rl/installation.py` names it."""
ROWS = ".rows"
"""Ending of the files that say where the texts of the history stand."""
HEADER = 64
"""Bytes of the header of a file of the history: eight of its kind, then its format, then its tokenizer."""


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
    """As a crash or a full disk leaves a file. The history's rows tell of texts that are not there."""
    whole = file.read_bytes()
    file.write_bytes(whole if file.suffix == ROWS else whole[: len(whole) // 4])


def _overwrite(file: Path) -> None:
    """Other bytes of the same length: a disk's fault, or a file of something else."""
    file.write_bytes(random.Random(0).randbytes(file.stat().st_size))


def _turn_bits(file: Path) -> None:
    """A bit here and there is another, but headers and rows of the history are as they were."""
    whole = bytearray(file.read_bytes())
    for place in range(HEADER, len(whole) if file.suffix != ROWS else 0, 5):
        whole[place] ^= 1
    file.write_bytes(bytes(whole))


def _change_format(file: Path) -> None:
    """A version of this package wrote it whose files are different."""
    whole = file.read_bytes()
    of_json, of_history = whole.replace(b'"format": 1', b'"format": 9'), whole[:8] + bytes([9]) + whole[9:]
    changed = of_json if file.suffix == ".json" else of_history
    assert changed != whole, f"{file} has its format elsewhere"
    file.write_bytes(changed)


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
    "turned": _turn_bits,
    "other_format": _change_format,
    "emptied": _empty,
    "a_folder": _make_folder,
}
"""What may befall every file of the folder between two starts."""
