# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's modules importable by old names. NeMo-RL's HTTP server uses these, because NeMo-RL pins an older vLLM."""

import importlib
import sys

from nemo_specrollout.config.known_traps import MOVED_MODULES


def lend_old_names() -> None:
    """Makes the modules of `MOVED_MODULES` importable by their old names in this process, if this vLLM lacks the old names.

    If this vLLM has an old name, its own module stays. If it has neither the old nor the new name, nothing is done. Then the
    server's own import fails with an error that names the missing module.
    """
    for old, new in MOVED_MODULES.items():
        if not _can_import(old) and _can_import(new):
            sys.modules[old] = sys.modules[new]


def _can_import(name: str) -> bool:
    """Imports a module and returns whether it was found. Raises ImportError if a module that it needs is missing."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False
    return True
