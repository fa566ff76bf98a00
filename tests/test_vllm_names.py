# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that we use exists and fits in the source of a version, which need not be installed.

`VLLM_SOURCE` names the folder of an unpacked wheel. Without it the installed vLLM's source is read, but not imported.
"""

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from vllm_names import SIGNATURES, Use, VllmName, vllm_names

from lab.vllm_on_cpu.kernels import bodies
from lab.vllm_on_cpu.kernels.kernel_launch import parameters
from nemo_specrollout.doctor.vllm_imports import VllmSource
from nemo_specrollout.installed.python_source import installed_source

pytestmark = pytest.mark.unit
GPU_FOLDER = "vllm/v1/worker/gpu"
FEWEST = {
    Use.IMPORTED: 51,
    Use.OF_MODULE: 12,
    Use.OF_OBJECT: 131,
    Use.SET: 12,
    Use.OVERRIDDEN: 16,
    Use.CALLED: len(SIGNATURES),
    Use.STOOD_IN_FOR: 34,
    Use.ABSTRACT: 0,
}
"""Smallest number of names for each use, over the supported versions. Fewer mean that the search itself is broken."""


@pytest.fixture(scope="module")
def folder() -> Path:
    named = os.environ.get("VLLM_SOURCE")
    found = Path(named) if named else installed_source("vllm")
    if found is None:
        pytest.skip("vLLM is not installed, and VLLM_SOURCE names no folder")
    return found


@pytest.fixture(scope="module")
def names(folder: Path) -> list[VllmName]:
    return vllm_names(VllmSource(folder), ROOT / "lab" / "vllm_on_cpu")


@pytest.mark.parametrize("use", Use)
def test_every_name_exists_in_this_vllm(names: list[VllmName], use: Use) -> None:
    found = [n for n in names if n.use is use]
    assert len(found) >= FEWEST[use]
    changes = [f"{n.name}: {n.change}" for n in found if n.change]
    assert not changes, "\n".join(changes)


def test_cpu_bodies_take_the_parameters_of_their_kernels(folder: Path) -> None:
    """A version without a CPU build may fail here: only its kernels on a GPU are used."""
    source, changes = VllmSource(folder), []
    for name, body in bodies().items():
        kernel = (source.find(name) or ("", None))[1]
        if isinstance(kernel, ast.FunctionDef):
            wanted = [a.arg for a in (*kernel.args.posonlyargs, *kernel.args.args, *kernel.args.kwonlyargs)]
            if wanted != list(parameters(body)):
                changes.append(f"{name}: it takes {', '.join(wanted)}")
    assert not changes, "\n".join(changes)


def test_missing_and_changed_names_are_found(changed_vllm: Callable[..., Path]) -> None:
    """One difference of each kind: names, parameters, results, abstract methods, attributes that are set."""
    gumbel, verifier = f"{GPU_FOLDER}/sample/gumbel.py", f"{GPU_FOLDER}/spec_decode/rejection_sampler_utils.py"
    outputs, sampler = "vllm/v1/outputs.py", f"{GPU_FOLDER}/sample/sampler.py"
    manager, runner = f"{GPU_FOLDER}/spec_decode/adaptive_verification.py", f"{GPU_FOLDER}/model_runner.py"
    output, results = "class AsyncModelRunnerOutput(ABC):\n", "    ) -> tuple[torch.Tensor, torch.Tensor"
    budget = "draft_tokens: dict[str, list[int]],\n    ) -> int:"
    folder = changed_vllm(
        (gumbel, "def gumbel_sample(", "def gumbel_samples("),
        (verifier, "    draft_sampled: torch.Tensor", "    drafts: torch.Tensor"),
        (outputs, output, f"{output}    @abstractmethod\n    def new(self): ...\n"),
        (sampler, f"return_logprobs: bool = False,\n{results}", f"return_logprobs: bool,\n{results}, torch.Tensor"),
        (manager, budget, budget.replace("draft_tokens", "drafts")),
        (runner, "self.rejection_sampler", "self.verifier"),
    )
    changes = {(n.name.rpartition(".")[2], n.use): n.change for n in vllm_names(VllmSource(folder)) if n.change}
    assert changes.pop(("gumbel_sample", Use.CALLED)) == "absent"
    assert changes.pop(("gumbel_sample", Use.OF_MODULE)) == "absent"
    assert ", draft_logits, drafts, " in changes.pop(("rejection_sample", Use.CALLED))
    assert changes.pop(("new", Use.ABSTRACT)) == "abstract: WatchedOutput lacks it"
    assert changes.pop(("sample", Use.STOOD_IN_FOR)) == "changed: it returns " + ", ".join(["torch.Tensor"] * 3)
    assert changes.pop(("get_num_tokens", Use.STOOD_IN_FOR)) == "changed: it takes num_tokens_per_req, drafts"
    assert changes.pop(("rejection_sampler", Use.SET)) == "absent"
    assert changes.pop(("rejection_sampler", Use.OF_OBJECT)) == "absent"
    assert not changes
