# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's modules importable by old names, which NeMo-RL's HTTP server uses because NeMo-RL pins an older vLLM."""

import importlib
import sys

from nemo_specrollout.config.known_traps import MOVED_MODULES


def lend_old_names() -> None:
    """Makes the modules of `MOVED_MODULES` importable by their old names in this process, if this vLLM lacks the old names.

    A vLLM that has an old name keeps its own module. Where vLLM has neither name, nothing is done, so that the server's own
    import names what is missing.
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
