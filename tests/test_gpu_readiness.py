# SPDX-License-Identifier: Apache-2.0
"""Separate memory of host and device, as on a GPU.

`test_kernels.py` checks steps, launches, graphs and compiled kernels; `test_nemo_rl_engine.py` what workers import.
"""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from lab.local.engine import RolloutEngine
from lab.local.random_budgets import RANDOM
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.generation.engine.requests import RolloutRequest

pytest.importorskip("triton")
pytestmark = pytest.mark.integration


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
