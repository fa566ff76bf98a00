# SPDX-License-Identifier: Apache-2.0
"""Policies in the folders that training runs leave."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import STEP_ADDER
from safetensors.torch import load_file

from nemo_specrollout.heads.training.head import create_head
from nemo_specrollout.storage.policy_checkpoint import hf_folder

pytestmark = pytest.mark.integration


def nemo_rl_step(folder: Path, is_megatron: bool) -> Path:
    """Writes a step folder as NeMo-RL does, with weights that nothing here reads."""
    weights = folder / "step_4" / "policy" / "weights"
    (weights / "iter_0000000" if is_megatron else weights / "model").mkdir(parents=True)
    (folder / "step_4" / "config.yaml").write_text("policy: {model_name: m}\n")
    return folder / "step_4"


def test_hugging_face_folders_are_used_as_they_are(tmp_path: Path) -> None:
    assert hf_folder(STEP_ADDER) == STEP_ADDER
    step = nemo_rl_step(tmp_path, is_megatron=False)
    consolidated = step / "policy" / "weights" / "model" / "consolidated"
    shutil.copytree(STEP_ADDER, consolidated)
    assert hf_folder(step) == consolidated


def test_weights_may_be_a_pytorch_file(tmp_path: Path) -> None:
    """NeMo-RL's converter of DTensor policies writes one."""
    shutil.copy(STEP_ADDER / "config.json", tmp_path)
    torch.save(load_file(STEP_ADDER / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert hf_folder(tmp_path) == tmp_path
    ours, theirs = create_head(tmp_path), create_head(STEP_ADDER)
    assert torch.equal(ours.teacher_VH, theirs.teacher_VH)
    assert all(torch.equal(value, theirs.learned()[name]) for name, value in ours.learned().items())


def test_folders_without_a_policy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is not a folder: give a Hugging Face folder"):
        hf_folder(tmp_path / "nothing")
    shutil.copy(STEP_ADDER / "config.json", tmp_path)
    with pytest.raises(ValueError, match="holds no policy: give a Hugging Face folder"):
        hf_folder(tmp_path)
    step = nemo_rl_step(tmp_path, is_megatron=True)
    with pytest.raises(ValueError, match=r"name one of its steps, such as .*step_4"):
        hf_folder(tmp_path)
    with pytest.raises(ValueError, match="convert it in the folder of NeMo-RL"):
        hf_folder(step)
    with pytest.raises(ValueError, match="never finished"):
        hf_folder(step.rename(tmp_path / "tmp_step_4"))


@pytest.mark.parametrize(
    ("is_megatron", "words"),
    [
        (True, "--extra mcore python examples/converters/convert_megatron_to_hf.py --config {step}/config.yaml "
               "--megatron-ckpt-path {step}/policy/weights/iter_0000000 --hf-ckpt-path DIR"),
        (False, "python examples/converters/convert_dcp_to_hf.py --config {step}/config.yaml "
                "--dcp-ckpt-path {step}/policy/weights --hf-ckpt-path DIR"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_nemo_rl_is_refused_with_a_command(is_megatron: bool, words: str, tmp_path: Path) -> None:
    step = nemo_rl_step(tmp_path, is_megatron)
    with pytest.raises(ValueError, match="is a checkpoint of NeMo-RL; convert it") as refused:
        hf_folder(step)
    assert words.format(step=step) in str(refused.value)
