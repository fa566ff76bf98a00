# SPDX-License-Identifier: Apache-2.0
"""A folder that has only the code of this package, from which Python environments without the package import it.

NeMo-RL runs its driver and its actors in environments of their own, which find the folder through PYTHONPATH. A folder such as
`site-packages` would not do, because the other packages in it would replace those of the environments.
"""

import errno
import hashlib
import os
import shutil
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGE = "nemo_specrollout"
PYTHONPATH = "PYTHONPATH"
NUMBA_CACHE = {"NUMBA_CACHE_DIR": f"/tmp/nemo_specrollout_numba_{os.getuid()}"}
"""Environment variables of engines, so that they do not all write compiled kernels beside the code on a shared disk."""


def copy_code(folder: Path) -> None:
    """Makes `folder` a copy of this package's code. Other processes see either all of the copy or what the folder held before.

    Raises OSError, for example on a full disk, and leaves no partial copy behind.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for file in _files():
            copy = temporary / file.relative_to(_ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    except OSError as error:
        has_come = error.errno in (errno.EEXIST, errno.ENOTEMPTY) and folder.is_dir()
        if not has_come:  # otherwise another process has made the same copy in the meantime
            raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def code_folder(parent: Path) -> Path:
    """Returns a folder in `parent` that has only this package's code, and makes it if it is not there.

    The folder's name has a hash of the code, so another version of the code gets another folder.
    """
    folder = parent / f"addon-{_fingerprint()}"
    if not folder.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        copy_code(folder)
    return folder


def is_on_pythonpath() -> bool:
    """Returns whether PYTHONPATH names the folder from which this code runs, so that child processes find it."""
    return _ROOT in (Path(entry).absolute() for entry in os.environ.get(PYTHONPATH, "").split(os.pathsep) if entry)


def pythonpath_with(folder: Path) -> str:
    """Returns the value of PYTHONPATH with `folder` in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(PYTHONPATH)]))


def _files() -> list[Path]:
    """Returns the files of the code, in a fixed order."""
    files = sorted((_ROOT / _PACKAGE).rglob("*"))
    return [file for file in files if file.is_file() and "__pycache__" not in file.parts]


def _fingerprint() -> str:
    """Returns 12 hexadecimal digits that depend on the names and the content of all files of the code."""
    digest = hashlib.sha256()
    for file in _files():
        digest.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]
