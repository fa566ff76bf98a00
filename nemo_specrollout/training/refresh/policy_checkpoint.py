# SPDX-License-Identifier: Apache-2.0
"""Finds the policy that a training run left, as a Hugging Face folder."""

import os
import shlex
from pathlib import Path

from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.nemo_rl_tree import DEFAULT_NEMO_RL_DIR, nemo_rl_checkout

ACCEPTED = "a Hugging Face folder (config.json with *.safetensors or pytorch_model.bin), or a step_N folder of NeMo-RL"


def hf_folder(checkpoint: Path) -> Path:
    """Returns the Hugging Face folder in `checkpoint`.

    Raises ValueError for a folder that holds no policy. For weights that NeMo-RL must convert first, it gives the command.
    """
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is not a folder: give {ACCEPTED}")
    if checkpoint.name.startswith("tmp_step_"):
        raise ValueError(f"{checkpoint} was never finished by NeMo-RL: give a step_N folder")
    for folder in (checkpoint, checkpoint / "policy" / "weights" / "model" / "consolidated"):
        has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
        if has_weights and (folder / "config.json").is_file():
            return folder
    if (checkpoint / "policy" / "weights").is_dir() and (checkpoint / "config.yaml").is_file():
        fix = "convert it in NeMo-RL's environment, and give DIR as --policy"
        raise ValueError(f"{checkpoint} is a checkpoint of NeMo-RL; {fix}: {_converter(checkpoint.absolute())}")
    found = [*checkpoint.glob("step_*"), *checkpoint.glob("checkpoints/step_*")]
    steps = sorted(found, key=lambda path: path.name.removeprefix("step_").zfill(9))
    which = f"; name one of its steps, such as {steps[-1]}" if steps else ""
    raise ValueError(f"{checkpoint} holds no policy: give {ACCEPTED}{which}")


def _converter(step: Path) -> str:
    """Returns the command that converts a step folder to the Hugging Face folder DIR. For Megatron it needs a GPU."""
    weights = step / "policy" / "weights"
    iteration = next(reversed(sorted(weights.glob("iter_*"))), None)
    if iteration is None:
        extra, script, source = [], "convert_dcp_to_hf.py", ["--dcp-ckpt-path", str(weights)]
    else:
        extra, script = ["--extra", "mcore"], "convert_megatron_to_hf.py"
        source = ["--megatron-ckpt-path", str(iteration)]
    checkout = (nemo_rl_checkout() or Path(os.environ.get(NEMO_RL_DIR) or DEFAULT_NEMO_RL_DIR)).absolute()
    run = ["uv", "run", "--project", str(checkout), *extra, "python", str(checkout / "examples/converters" / script)]
    return shlex.join([*run, "--config", str(step / "config.yaml"), *source, "--hf-ckpt-path", "DIR"])
