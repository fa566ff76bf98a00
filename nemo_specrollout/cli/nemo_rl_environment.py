# SPDX-License-Identifier: Apache-2.0
"""Runs a command of this package in the Python environment of NeMo-RL's driver, which `uv` makes and enters."""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.nemo_rl_tree import DEFAULT_NEMO_RL_DIR, nemo_rl_checkout
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.nemo_rl.code_folder import NUMBA_CACHE, PYTHONPATH, code_folder, pythonpath_with


def entry(arguments: Sequence[str], folder: Path) -> tuple[list[str], Mapping[str, str]]:
    """Returns a command line that runs `nemo-specrollout` with `arguments` in NeMo-RL's Python, and its environment variables.

    It prints the command line, and copies this package into `folder`, where NeMo-RL's Python environments find it. Raises
    ConfigError if NeMo-RL's checkout or `uv` is missing.
    """
    project = _checkout()
    if shutil.which("uv") is None:
        raise ConfigError(
            f"uv is not on PATH; it makes and enters the environments of NeMo-RL in {project}: install it (pip install uv), "
            "or run in NeMo-RL's container"
        )
    command = ["uv", "run", "--project", str(project), "python", "-m", "nemo_specrollout", *arguments]
    print(f"entering NeMo-RL's environment, which uv makes first if it is missing: {shlex.join(command)}", flush=True)
    # These belong to the Python that runs now, and uv sets its own.
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
    own = {PYTHONPATH: pythonpath_with(code_folder(folder)), NEMO_RL_DIR: str(project)}
    return command, {**NUMBA_CACHE, **kept, **own}


def _checkout() -> Path:
    path = nemo_rl_checkout()
    if path is None or not (path / "nemo_rl").is_dir():
        named = os.environ.get(NEMO_RL_DIR) or DEFAULT_NEMO_RL_DIR
        raise ConfigError(
            f"NeMo-RL is not in this Python environment, and {named} is no checkout of it; set {NEMO_RL_DIR} to the folder of "
            "your checkout, or run in NeMo-RL's container"
        )
    return path.absolute()
