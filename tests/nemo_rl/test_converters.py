# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's own converters, by the commands that `refresh-draft` gives, on checkpoints that NeMo-RL's code wrote."""

import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from nemo_rl_host import HERE, Host
from safetensors.torch import load_file

from nemo_specrollout.storage.policy_checkpoint import hf_folder

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def steps(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a step folder of each kind of policy."""
    folder = tmp_path_factory.mktemp("steps")
    host.run(HERE / "converting.py", host.tiny / "policy", folder)
    return folder


@pytest.mark.parametrize("kind", ["megatron", "dtensor"])
def test_a_converted_checkpoint_has_the_policy_s_tensors(
    kind: str, steps: Path, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`uv` here enters the environment of this host, where CUDA is stood in for."""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in host.environment.items() if name != "PATH")
    enter = f'{variables} exec {host.environment["NEMO_RL_PYTHON"]} {HERE / "converting.py"} "$@"'
    (tmp_path / "uv").write_text(f'#!/bin/sh\nwhile [ "$1" != python ]; do shift; done; shift\n{enter}\n')
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{host.environment['PATH']}")
    with pytest.raises(ValueError, match="is a checkpoint of NeMo-RL") as refused:
        hf_folder(steps / kind / "step_1")
    *command, place = shlex.split(str(refused.value).rpartition("name DIR instead: ")[2])
    assert place == "DIR"
    subprocess.run([*command, str(tmp_path / "policy")], cwd=host.environment["NEMO_RL_SRC"], check=True)
    folder = hf_folder(tmp_path / "policy")
    file = folder / "pytorch_model.bin"
    made = torch.load(file, weights_only=True) if file.is_file() else load_file(folder / "model.safetensors")
    policy = load_file(host.tiny / "policy" / "model.safetensors")
    assert made.keys() == policy.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in policy.items())
    assert (folder / "tokenizer.json").is_file()
