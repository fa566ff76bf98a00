# SPDX-License-Identifier: Apache-2.0
"""A folder to which a draft model's trainer publishes weights, and which drafters watch. Does not load torch.

Each publication is a subfolder whose name ends in its number, such as `version_12` or `step-300`. The one with the largest
number is the newest. A trainer should write a publication under a name that begins with a dot, which drafters ignore, and
rename it when it is complete.
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_specrollout.storage import model_folder as folders
from nemo_specrollout.storage.files import sync, sync_folder

NUM_KEPT = 3
"""Number of newest publications that `publish` keeps. A drafter may still be reading the one before the newest."""
_NUMBERED = re.compile(r"[^.].*?([0-9]{1,18})|([0-9]{1,18})", re.DOTALL)
_OWN_NAME = "version_"

Stamp = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and modification time of each file of a publication."""


@dataclass(frozen=True)
class Publication:
    """A checkpoint in such a folder, with the stamp of its files when it was found."""

    number: int
    path: Path
    stamp: Stamp


def publications(folder: Path) -> list[Publication]:
    """Returns the publications in `folder`, the newest first, or none if the folder does not exist yet."""
    found = []
    try:
        for entry in os.scandir(folder):
            match = _NUMBERED.fullmatch(entry.name)
            if match is not None and entry.is_dir():
                found.append(Publication(int(match[1] or match[2]), Path(entry.path), stamp_of(Path(entry.path))))
    except OSError:
        return []  # a network disk may be unavailable for a while
    return sorted(found, key=lambda p: (p.number, p.path.name), reverse=True)


def stamp_of(path: Path) -> Stamp:
    """Returns the stamp of a publication's files, which changes while somebody writes there."""
    try:
        stats = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


def check_like(folder: Path, shapes: Mapping[str, tuple[int, ...]], place: str = "") -> list[Path]:
    """Returns the files of a checkpoint's tensors. Raises ValueError unless they have exactly these names and shapes.

    `place` says where the folder was looked for, such as " on the drafter's machine".
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder{place}; name one that the drafter can read")
    files = folders.tensor_files(folder)
    if not files:
        raise ValueError(f"{folder} is not a checkpoint of the draft model: it has no *.safetensors file")
    if odd := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{folder}: {odd[0]} is not a file; copy the folder again")
    found = folders.tensor_shapes(files)
    for name in sorted(shapes.keys() | found.keys()):
        if found.get(name) != shapes.get(name):
            facts = f"{name} has shape {found.get(name, 'none')}, and the draft model's has {shapes.get(name, 'none')}"
            raise ValueError(f"{folder} is not a checkpoint of the draft model: {facts}")
    return files


def publish(weights: Path, into: Path, number: int) -> Path:
    """Copies the checkpoint in `weights` into `into` atomically, and removes all but the newest publications.

    Returns the new subfolder. Only publications that earlier calls of this function have made are removed. Raises OSError, and
    ValueError if another publication has a larger number or the same, because drafters would not load the new one.
    """
    newest = next(iter(publications(into)), None)
    if newest is not None and newest.number >= number:
        raise ValueError(f"{number} is not larger than {newest.number}, which {newest.path} has; give a larger number")
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"{_OWN_NAME}{number}"
    new = into / f".{path.name}.{os.getpid()}"
    try:
        new.mkdir()
        files = [*folders.tensor_files(weights), *weights.glob("*.json")]
        for file in files:
            shutil.copyfile(file, new / file.name)
            sync(new / file.name)
        sync_folder(new)
        os.rename(new, path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync_folder(into)
    own = [p.path for p in publications(into) if p.path.name == f"{_OWN_NAME}{p.number}"]
    for old in own[NUM_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return path
