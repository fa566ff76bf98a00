# SPDX-License-Identifier: Apache-2.0
"""The bodies of vLLM's kernels for batches and drafters do what the kernels do (tests/interpreted)."""

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(
        not pytest.importorskip("vllm").__version__.startswith("0.32."), reason="compared with vLLM 0.32's kernels"
    ),
]


def test_bodies_do_what_the_kernels_do() -> None:
    """In a process of its own, where Triton interprets the kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    module = "tests/interpreted/batch_kernels.py"
    command = [sys.executable, "-m", "pytest", module, "-q", "-p", "no:cacheprovider", "--noconftest"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
