# SPDX-License-Identifier: Apache-2.0
"""Compares the tokens of an engine whose Triton kernels are interpreted with the tokens of one with numba bodies."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton")
pytestmark = pytest.mark.integration


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
