# SPDX-License-Identifier: Apache-2.0
"""Old names of vLLM's modules for NeMo-RL's HTTP server, which is written for the vLLM that NeMo-RL pins."""

import importlib
import sys

from nemo_specrollout.config.known_traps import MOVED_MODULES


def lend_old_names() -> None:
    """Makes the modules of `MOVED_MODULES` importable by their old names in this process, if this vLLM lacks the old names.

    A vLLM that has an old name keeps its own module. One that has neither name is left alone, so that the server's own
    import says what is missing.
    """
    for old, new in MOVED_MODULES.items():
        if not _can_import(old) and _can_import(new):
            sys.modules[old] = sys.modules[new]


def _can_import(name: str) -> bool:
    """Returns whether a module is found, and imports it. Raises ImportError if one that it imports itself is missing."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False
    return True
