# SPDX-License-Identifier: Apache-2.0
"""Kernels, in processes of their own: Triton's, interpreted or compiled for a GPU that is not there, and their numba bodies.

Triton and torch are set up there as they cannot be here. The tests themselves are in `interpreted` and `fake_gpu`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("triton")
vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.integration

INTERPRETED, COMPILED = {"TRITON_INTERPRET": "1"}, {"TRITON_INTERPRET": "0"}
FAKE_GPU = [f"fake_gpu/{name}.py" for name in ("step_checks", "graph_checks", "compiled_kernels")]
MODULES = {
    "vllm's, for batches and drafters": (["interpreted/batch_kernels.py"], INTERPRETED),
    "vllm's, for sampling": (["interpreted/sampling_kernels.py"], INTERPRETED),
    "ours": (["interpreted/own_kernels.py"], INTERPRETED),
    "ours, on a GPU that is not there": (FAKE_GPU, COMPILED),
}
"""`ours, on a GPU that is not there`: no step of ours waits for the device or launches more than it did, vLLM replays full
CUDA graphs for decode steps, and our kernels, compiled for an H100, are no longer than they were."""


def run(modules: list[str], environment: dict[str, str], cache: Path) -> subprocess.CompletedProcess[str]:
    """What pytest says of test modules of this folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    command += [f"tests/{module}" for module in modules]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "TRITON_CACHE_DIR": str(cache)}
    settings = {**os.environ, **quiet, **environment}
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, "Future[subprocess.CompletedProcess[str]]"]]:
    """The runs of those modules that are asked for, two at a time: most of it is numba that compiles."""
    wanted = [name for name in MODULES if any(f"[{name}]" in item.name for item in request.session.items)]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, *MODULES[name], tmp_path_factory.mktemp("triton")) for name in wanted}


@pytest.mark.parametrize("name", MODULES)
def test_kernels(runs: dict[str, "Future[subprocess.CompletedProcess[str]]"], name: str) -> None:
    if name == "vllm's, for batches and drafters" and not vllm.__version__.startswith("0.32."):
        pytest.skip("compared with vLLM 0.32's kernels")
    if name == "vllm's, for sampling":
        pytest.importorskip("vllm.triton_utils.dispatcher")
    done = runs[name].result()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_an_engine_makes_the_same_tokens_by_vllms_kernels_and_by_our_bodies() -> None:
    """A head, text drafts and random budgets, more than a thousand tokens."""
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
