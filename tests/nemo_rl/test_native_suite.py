# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own unit tests of what we touch, with our package installed and `install` called."""

import re
from pathlib import Path

import pytest
from nemo_rl_host import Host

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(1800)]

# Tests of generation, drafts, losses and config that need no GPU.
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


# NeMo-RL's tests of the SingleController and its rollouts.
CONTROLLER_FILES = [
    "experience/test_failures.py",
    "experience/test_rollout_generation_failures.py",
    "experience/test_rollout_manager.py",
    "experience/test_rollout_redispatch.py",
    "single_controller",
]


def outcomes(host: Host, files: list[str], *plugin: str, config: str = "base.yaml") -> tuple[int, set[str]]:
    """Returns the number of NeMo-RL's tests that pass, and the names of the others."""
    tests = Path(host.environment["NEMO_RL_SRC"]) / "tests" / "unit"
    paths = [str(tests / name) for name in files]
    command = [
        "-m",
        "pytest",
        *plugin,
        "--noconftest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "--maxfail=10000",
        "-rfE",
        *paths,
    ]
    output = host.run(*command, may_fail=True, more={"NEMO_RL_CPU_INSTALLED": config})
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None, output[-3000:]
    return int(passed[1]), set(re.findall(r"^(?:FAILED|ERROR) \S*/(tests/unit/\S+)", output, re.MULTILINE))


def test_nemo_rl_s_own_tests_pass_with_ours_installed(host: Host) -> None:
    passed, others = outcomes(host, FILES, "-p", "installed")
    assert passed > 100 and not others


def test_those_of_the_single_controller_pass_as_they_do_without(host: Host) -> None:
    """Some of them need what this machine has not, with or without ours."""
    natively = outcomes(host, CONTROLLER_FILES)
    installed = outcomes(host, CONTROLLER_FILES, "-p", "installed", config="single_controller.yaml")
    assert natively[0] > 100 and installed == natively
