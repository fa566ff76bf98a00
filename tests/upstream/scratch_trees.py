# SPDX-License-Identifier: Apache-2.0
"""Scratch trees in which a patch is applied: the files that it touches are copies, all others are links to the originals.

Nothing is ever written into the original: folders above a touched file are made, and no `__pycache__` is linked.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[2] / "docs" / "upstream" / "patches"


class PatchError(Exception):
    """A patch does not apply; the text is what `git apply` says."""


def touched_files(patch: Path) -> list[str]:
    """Paths that a unified diff changes or adds, relative to the tree."""
    lines = patch.read_text().splitlines()
    return [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]


def make_tree(original: Path, touched: Sequence[str], scratch: Path) -> None:
    """Makes `scratch`, which must not exist: files of `touched` are copies, their neighbours at each level are links.

    Of `original` itself only the folders that `touched` names are there.
    """
    scratch.mkdir(parents=True)
    folders = sorted({parent for path in touched for parent in Path(path).parents if parent != Path(".")})
    for folder in folders:
        (scratch / folder).mkdir(exist_ok=True)
        if (original / folder).is_dir():
            _link_entries(original / folder, scratch / folder, {scratch / f for f in folders})
    for path in touched:
        if (original / path).is_file():
            (scratch / path).unlink()
            shutil.copyfile(original / path, scratch / path)


def _link_entries(original: Path, folder: Path, own: set[Path]) -> None:
    for entry in original.iterdir():
        place = folder / entry.name
        if entry.name != "__pycache__" and place not in own:
            place.symlink_to(entry)


def apply_patch(patch: Path, tree: Path, only: str | None = None) -> None:
    """Applies a patch of `PATCHES` in a scratch tree; `only` is a pattern of the paths to change, e.g. "tests/*".

    Raises:
        PatchError: The patch does not apply there.
    """
    command = ["git", "apply", "--whitespace=nowarn", *(["--include", only] if only else []), str(patch)]
    # Above the tree may be a repository; inside of one, git would look for the paths from its root.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=environment, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise PatchError(done.stderr.strip())
