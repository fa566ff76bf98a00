# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that we import, override or read exists in the source of a version, which need not be installed.

`VLLM_SOURCE` names the folder of an unpacked wheel. Without it the installed vLLM's source is read, but not imported.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_specrollout.generation.vllm_names import SIGNATURES, Use, VllmName, vllm_names
from nemo_specrollout.generation.vllm_source import VllmSource, installed_source

pytestmark = pytest.mark.unit
GPU_FOLDER = "vllm/v1/worker/gpu"
FEWEST = {Use.IMPORTED: 31, Use.OF_MODULE: 11, Use.OF_OBJECT: 61, Use.OVERRIDDEN: 9, Use.CALLED: len(SIGNATURES)}
"""Smallest number of names for each use. Fewer mean that the search itself is broken."""


@pytest.fixture(scope="module")
def folder() -> Path:
    named = os.environ.get("VLLM_SOURCE")
    found = Path(named) if named else installed_source()
    if found is None:
        pytest.skip("vLLM is not installed, and VLLM_SOURCE names no folder")
    return found


@pytest.fixture(scope="module")
def names(folder: Path) -> list[VllmName]:
    return vllm_names(VllmSource(folder))


@pytest.mark.parametrize("use", Use)
def test_every_name_exists_in_this_vllm(names: list[VllmName], use: Use) -> None:
    found = [n for n in names if n.use is use]
    assert len(found) >= FEWEST[use]
    assert not [n for n in found if n.change]


def test_missing_and_changed_names_are_found(changed_vllm: Callable[..., Path]) -> None:
    gumbel, verifier = f"{GPU_FOLDER}/sample/gumbel.py", f"{GPU_FOLDER}/spec_decode/rejection_sampler_utils.py"
    folder = changed_vllm(
        (gumbel, "def gumbel_sample(", "def gumbel_samples("),
        (verifier, "    draft_sampled: torch.Tensor", "    drafts: torch.Tensor"),
    )
    changes = {(n.name.rpartition(".")[2], n.use): n.change for n in vllm_names(VllmSource(folder)) if n.change}
    assert changes.pop(("gumbel_sample", Use.CALLED)) == "absent"
    assert changes.pop(("gumbel_sample", Use.OF_MODULE)) == "absent"
    assert ", draft_logits, drafts, " in changes.pop(("rejection_sample", Use.CALLED))
    assert not changes
