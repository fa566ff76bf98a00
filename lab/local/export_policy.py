# SPDX-License-Identifier: Apache-2.0
"""Writes the policy in a checkpoint of a local run as a Hugging Face folder, for `refresh-draft --policy` and vLLM.

python -m lab.local.export_policy RUN/checkpoints/step_N OUT
"""

import argparse
import shutil
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from lab.local.policy import STATE_FILE
from lab.local.policy_shape import PolicyShape
from lab.local.sealed_folder import check_seal
from nemo_specrollout.storage.model_folder import read_object


def export_policy(checkpoint: Path, out: Path) -> None:
    """Writes the policy's weights to `out`, with copies of the other files of the model that the run started from.

    Raises DamagedFolder if a file of the checkpoint is not what the run wrote, and FileExistsError if `out` exists.
    """
    check_seal(checkpoint)
    config = yaml.safe_load((checkpoint.absolute().parents[1] / "config.yaml").read_text())
    model = Path(config["policy"]["model_name"])
    state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)["model"]
    tensors = {
        name: tensor.contiguous()
        for weight in PolicyShape.from_hf(read_object(model / "config.json")).weights()
        for name, tensor in zip(weight.hf, weight.split(state[weight.megatron]), strict=True)
    }
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT")
    parsed = parser.parse_args()
    export_policy(parsed.checkpoint, parsed.out)
