# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own unit tests of what we touch, with our package installed and `install` called."""

import re
from pathlib import Path

import pytest
from nemo_rl_host import Host

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(1800)]

# Those of generation, draft, loss and config that need no GPU.
FILES = [
    "algorithms/test_draft_loss_wrapper.py",
    "algorithms/test_loss_functions.py",
    "models/generation/test_fleet_health.py",
    "models/generation/test_vllm_backend.py",
    "models/generation/test_vllm_checkpoint_engine.py",
    "models/generation/test_vllm_refit_loader.py",
    "models/generation/test_vllm_shard_selection.py",
    "models/generation/test_vllm_spec_decode_clamp.py",
    "models/generation/test_vllm_utils.py",
    "models/generation/test_vllm_worker_helpers.py",
    "models/megatron/test_draft_grad_norm_group.py",
    "models/megatron/test_eagle_qkv_layout.py",
    "utils/test_config.py",
    "weight_sync",
]


def test_nemo_rl_s_own_tests_pass_with_ours_installed(host: Host) -> None:
    tests = Path(host.environment["NEMO_RL_SRC"]) / "tests" / "unit"
    paths = [str(tests / name) for name in FILES]
    output = host.run("-m", "pytest", "-p", "installed", "--noconftest", "-q", "-p", "no:cacheprovider", *paths)
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) > 100, output[-3000:]
