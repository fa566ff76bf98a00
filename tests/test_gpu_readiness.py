# SPDX-License-Identifier: Apache-2.0
"""Checks of GPU behaviour without a GPU: imports of the workers, and separate memory of host and device.

`test_kernels.py` checks steps, launches, graphs and compiled kernels.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import ROOT

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.requests import RolloutRequest

pytest.importorskip("triton")
pytestmark = pytest.mark.integration

IMPORTS = """
import pkgutil, sys
import torch
parts = {name: getattr(torch.cuda, name) for name in ("Event", "Stream", "current_stream", "synchronize")}
pin_memory = torch.Tensor.pin_memory

from nemo_specrollout.generation import compat
compat.device_type = lambda: "cuda"
import nemo_specrollout.drafters, nemo_specrollout.generation, nemo_specrollout.sampling
for package in (nemo_specrollout.drafters, nemo_specrollout.generation, nemo_specrollout.sampling):
    for module in pkgutil.iter_modules(package.__path__):
        if module.name == "vllm_worker" or module.name.endswith("_triton"):
            __import__(f"{package.__name__}.{module.name}")

assert "nemo_specrollout.generation.vllm_worker" in sys.modules
assert not [name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")]
assert all(getattr(torch.cuda, name) is part for name, part in parts.items())
assert torch.Tensor.pin_memory is pin_memory
"""


def test_gpu_workers_leave_torch_as_it_is() -> None:
    """vLLM's CPU worker replaces parts of torch.cuda in its process, so no module for a GPU may import it."""
    run = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_host_and_device_need_not_share_memory(start_engine: Callable[..., RolloutEngine], tiny_model: Path) -> None:
    """vLLM's CPU runner shares one memory between host and device. Here the device has a copy, updated when vLLM says so."""
    requests = [RolloutRequest([5 + i, 6, 7, 6, 7], i, s) for i in range(3) for s in range(3)]
    plain = start_engine(tiny_model, SpecrolloutConfig(drafters=())).generate(requests, temperature=0.3)
    from vllm.v1.worker.cpu import shm  # noqa: F401 - replaces UvaBuffer once more when first imported
    from vllm.v1.worker.gpu import buffer_utils

    with mock.patch.object(buffer_utils, "UvaBuffer", buffer_utils.NonUvaBuffer):
        drafting = start_engine(tiny_model, SpecrolloutConfig(budget=RANDOM))
        drafted = drafting.generate(requests, temperature=0.3)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    stats = drafting.stats()
    assert stats is not None
    assert np.sum(stats.accepted) > 20
