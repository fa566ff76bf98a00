# SPDX-License-Identifier: Apache-2.0
"""Compares Triton kernels, interpreted or compiled for an absent GPU, with their numba bodies, in separate processes.

Those processes set up Triton and torch in ways that this one cannot. The tests themselves are in `interpreted` and `fake_gpu`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("triton")
vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.integration


INTERPRETED, COMPILED = {"TRITON_INTERPRET": "1"}, {"TRITON_INTERPRET": "0"}
CHECKS = [
    "step_checks", "step_counts", "whole_steps", "row_checks", "wait_checks", "warm_up_checks", "graph_checks",
    "compiled_kernels", "training_step",
]  # fmt: skip
FAKE_GPU = [f"fake_gpu/{name}.py" for name in CHECKS]
MODULES = {
    "vllm's, for batches and drafters": (["interpreted/batch_kernels.py"], INTERPRETED),
    "vllm's, for sampling": (["interpreted/sampling_kernels.py"], INTERPRETED),
    "ours": (["interpreted/own_kernels.py", "interpreted/row_kernels.py", "interpreted/ahead_kernel.py"], INTERPRETED),
    "ours, in any order": (["interpreted/program_orders.py"], INTERPRETED),
    "ours, on a GPU that is not there": (FAKE_GPU, COMPILED),
}
"""Test modules and environment by name.

`ours, in any order` interleaves the programs of our kernels, and finds races between them.
`ours, on a GPU that is not there` checks that no step waits for the device, compiles a kernel, or has more launches than
recorded. It also checks that vLLM replays full CUDA graphs for decode steps, and that our kernels, compiled for an H100, have
not grown, and that a training step of the local runner mixes no tensors of the CPU and of the GPU."""


def run(modules: list[str], environment: dict[str, str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs pytest on test modules of this folder in a process of their own, and returns the finished process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    command += [f"tests/{module}" for module in modules]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "TRITON_CACHE_DIR": str(cache)}
    settings = {**os.environ, **quiet, **environment}
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("name", MODULES)
def test_kernels(tmp_path: Path, name: str) -> None:
    if name == "vllm's, for batches and drafters" and not vllm.__version__.startswith("0.32."):
        pytest.skip("compared with vLLM 0.32's kernels")
    if name == "vllm's, for sampling":
        pytest.importorskip("vllm.triton_utils.dispatcher")
    done = run(*MODULES[name], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
