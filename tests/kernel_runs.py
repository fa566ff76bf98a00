# SPDX-License-Identifier: Apache-2.0
"""The pytest processes behind `test_kernels.py`. They start with the session and use the core that other tests leave idle."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INTERPRETED, COMPILED = {"TRITON_INTERPRET": "1"}, {"TRITON_INTERPRET": "0"}
CHECKS = [
    "step_checks", "whole_steps", "row_checks", "wait_checks", "warm_up_checks", "graph_checks", "compiled_kernels"
]  # fmt: skip
FAKE_GPU = [f"fake_gpu/{name}.py" for name in CHECKS]
MODULES = {
    "vllm's, for batches and drafters": (["interpreted/batch_kernels.py"], INTERPRETED),
    "vllm's, for sampling": (["interpreted/sampling_kernels.py"], INTERPRETED),
    "ours": (["interpreted/own_kernels.py", "interpreted/row_kernels.py"], INTERPRETED),
    "ours, in any order": (["interpreted/program_orders.py"], INTERPRETED),
    "ours, on a GPU that is not there": (FAKE_GPU, COMPILED),
}
"""Test modules and environment by name.

`ours, in any order` interleaves the programs of our kernels, and finds races between them.
`ours, on a GPU that is not there` checks that no step waits for the device, compiles a kernel, or has more launches than
recorded. It also checks that vLLM replays full CUDA graphs for decode steps, and that our kernels, compiled for an H100, have
not grown."""


def run(modules: list[str], environment: dict[str, str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs pytest on test modules of this folder, and returns the finished process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    command += [f"tests/{module}" for module in modules]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "TRITON_CACHE_DIR": str(cache)}
    settings = {**os.environ, **quiet, **environment}
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="session", autouse=True)
def kernel_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, "Future[subprocess.CompletedProcess[str]]"]]:
    """Starts the runs of the selected modules, one at a time, and yields their futures by name."""
    items = [item.name for item in request.session.items if item.path.name == "test_kernels.py"]
    wanted = [name for name in MODULES if any(f"[{name}]" in item for item in items)]
    pool = ThreadPoolExecutor(1)
    yield {name: pool.submit(run, *MODULES[name], tmp_path_factory.mktemp("triton")) for name in wanted}
    pool.shutdown(cancel_futures=True)
