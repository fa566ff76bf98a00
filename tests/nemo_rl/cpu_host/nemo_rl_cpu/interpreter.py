# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, which runs the kernels of a vLLM that takes no other bodies for them."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

INTERPRETED = Path(__file__).resolve().parents[3] / "interpreted"


def complete(gpu_worker: ModuleType) -> None:
    """Adds what the interpreter lacks for vLLM's kernels, where TRITON_INTERPRET asks for it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.path.append(str(INTERPRETED))
        importlib.import_module("interpreting")
