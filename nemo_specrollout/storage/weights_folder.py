# SPDX-License-Identifier: Apache-2.0
"""Reads and writes a folder to which the trainer of a draft model publishes weights, and which remote drafters watch.

A publication is a checkpoint in a subfolder whose name ends in its number, such as `version_12` or `step-300`. The newest
publication is the one with the largest number. Drafters ignore subfolders whose name begins with a dot. So a trainer should
write a publication under such a name, and rename it when it is complete.
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
"""Number of publications that `publish` keeps. It is above 1 because a drafter may still read an older publication."""
_NUMBERED = re.compile(r"[^.].*?([0-9]{1,18})|([0-9]{1,18})", re.DOTALL)
_OWN_NAME = "version_"

Stamp = tuple[tuple[str, int, int], ...]
"""The name, the size in bytes and the modification time of each file of a publication."""


@dataclass(frozen=True)
class Publication:
    """A checkpoint of a draft model in a folder of publications. `stamp` describes its files at the time of the search."""

    number: int
    path: Path
    stamp: Stamp


def publications(folder: Path) -> list[Publication]:
    """Returns the publications in `folder`, the newest first. The list is empty if the folder cannot be read or is missing."""
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
    """Returns the names, sizes and modification times of a publication's files. They change while a file is still written."""
    try:
        stats = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


def check_like(folder: Path, shapes: Mapping[str, tuple[int, ...]], place: str = "") -> list[Path]:
    """Checks that the checkpoint in `folder` fits the draft model, and returns the checkpoint's safetensors files.

    Raises ValueError if the names and shapes of the checkpoint's tensors are not exactly those in `shapes`. `place` is a
    phrase for messages that says where the folder was looked for, such as " on the drafter's machine".
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
    """Copies the checkpoint in the folder `weights` to a new subfolder of `into`, and returns the subfolder.

    The subfolder appears only when it is complete. Old publications that this function has made are removed, except the newest
    ones (`NUM_KEPT`). Raises OSError if the copy fails. Raises ValueError if `into` already has a publication with this number
    or a larger one, because drafters would not load the new one.
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
