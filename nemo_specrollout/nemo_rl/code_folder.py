# SPDX-License-Identifier: Apache-2.0
"""A folder that holds this package's code alone, by which Python environments without the package find it.

NeMo-RL runs its driver and its actors in environments of their own. Each gets the folder through PYTHONPATH. A folder such
as `site-packages` will not do: it would replace the packages of those environments.
"""

import hashlib
import os
import shutil
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGE = "nemo_specrollout"
PYTHONPATH = "PYTHONPATH"
NUMBA_CACHE = {"NUMBA_CACHE_DIR": f"/tmp/nemo_specrollout_numba_{os.getuid()}"}
"""Keeps engines from writing compiled kernels beside the code, on a shared disk, all at once."""


def copy_code(folder: Path) -> None:
    """Makes `folder` a copy of the code, as a whole: another process sees all of it or the former content."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.copytree(_ROOT / _PACKAGE, temporary / _PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.replace(temporary, folder)
    except OSError:
        shutil.rmtree(temporary)
        if not folder.is_dir():  # no other process has made the same copy meanwhile
            raise


def code_folder(parent: Path) -> Path:
    """Returns a folder in `parent` that holds the code alone. It is named after its content, so a later version keeps it."""
    folder = parent / f"addon-{_fingerprint()}"
    if not folder.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        copy_code(folder)
    return folder


def is_on_pythonpath() -> bool:
    """Returns whether PYTHONPATH names the folder from which this code runs, so that child processes find it."""
    return _ROOT in (Path(entry).absolute() for entry in os.environ.get(PYTHONPATH, "").split(os.pathsep) if entry)


def pythonpath_with(folder: Path) -> str:
    """Returns PYTHONPATH with `folder` in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(PYTHONPATH)]))


def _fingerprint() -> str:
    """Returns 12 hexadecimal digits that depend on names and content of all files."""
    digest = hashlib.sha256()
    for file in sorted((_ROOT / _PACKAGE).rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]
