# SPDX-License-Identifier: Apache-2.0
"""Compares Triton kernels, interpreted or compiled for an absent GPU, with their numba bodies, in separate processes.

Those processes set up Triton and torch in ways that this one cannot. The tests themselves are in `interpreted` and `fake_gpu`.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import Future

import pytest
from conftest import ROOT
from kernel_runs import MODULES

pytest.importorskip("triton")
vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", MODULES)
def test_kernels(kernel_runs: dict[str, "Future[subprocess.CompletedProcess[str]]"], name: str) -> None:
    if name == "vllm's, for batches and drafters" and not vllm.__version__.startswith("0.32."):
        pytest.skip("compared with vLLM 0.32's kernels")
    if name == "vllm's, for sampling":
        pytest.importorskip("vllm.triton_utils.dispatcher")
    done = kernel_runs[name].result()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_an_engine_makes_the_same_tokens_with_either_kernels() -> None:
    """Compares more than a thousand tokens, with a head, text drafts and random budgets."""
    command = [sys.executable, "tests/interpreted/engine_tokens.py"]
    said = []
    for interpret in ("1", "0"):
        settings = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=1500, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append({name: rest for name, _, rest in (line.partition(" ") for line in done.stdout.splitlines())})
    tokens = json.loads(said[0]["TOKENS"])
    assert said[0]["TOKENS"] == said[1]["TOKENS"]
    assert sum(len(ids) for rollouts in tokens.values() for ids in rollouts) > 1000
    assert int(said[0]["ACCEPTED"]) > 200
