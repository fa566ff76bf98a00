# SPDX-License-Identifier: Apache-2.0
"""Our own Triton kernels, interpreted, do what their numba bodies do. How long they are: `test_gpu_readiness.py`."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton")
pytestmark = pytest.mark.integration


def run_modules(*modules: str, **environment: str) -> None:
    """Runs the tests of modules in a process of their own, since Triton and torch are not there what they are here."""
    files = [f"tests/{module}" for module in modules]
    command = [sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider", "--noconftest"]
    settings = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", **environment}
    run = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_kernels_do_what_their_numba_bodies_do() -> None:
    run_modules("interpreted/own_kernels.py", TRITON_INTERPRET="1")
