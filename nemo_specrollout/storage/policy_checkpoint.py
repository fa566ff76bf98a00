# SPDX-License-Identifier: Apache-2.0
"""Finds the policy's weights as a Hugging Face folder in a checkpoint of a training run."""

import shlex
from pathlib import Path

ACCEPTED = "a Hugging Face folder (config.json with *.safetensors or pytorch_model.bin), or a step_N folder of NeMo-RL"


def hf_folder(checkpoint: Path) -> Path:
    """Returns the folder with the policy's weights in Hugging Face's format, which is `checkpoint` itself or a folder in it.

    Raises ValueError if there is no such folder. If NeMo-RL's converter can make one, the message has the command.
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
        fix = "convert it in the folder of NeMo-RL, and name DIR instead"
        raise ValueError(f"{checkpoint} is a checkpoint of NeMo-RL; {fix}: {_converter(checkpoint.absolute())}")
    found = [*checkpoint.glob("step_*"), *checkpoint.glob("checkpoints/step_*")]
    steps = sorted(found, key=lambda path: path.name.removeprefix("step_").zfill(9))
    which = f"; name one of its steps, such as {steps[-1]}" if steps else ""
    raise ValueError(f"{checkpoint} holds no policy: give {ACCEPTED}{which}")


def _converter(step: Path) -> str:
    """Returns the shell command that converts the checkpoint `step` of NeMo-RL to a Hugging Face folder with the name DIR.

    The command for a Megatron checkpoint needs a GPU.
    """
    weights = step / "policy" / "weights"
    iteration = max(weights.glob("iter_*"), default=None)
    script = "dcp"
    source = ["--dcp-ckpt-path", str(weights)]
    if iteration is not None:
        script = "megatron"
        source = ["--megatron-ckpt-path", str(iteration)]
    python = ["uv", "run", *(["--extra", "mcore"] if iteration else []), "python"]
    command = [
        *python,
        f"examples/converters/convert_{script}_to_hf.py",
        "--config",
        str(step / "config.yaml"),
        *source,
    ]
    return shlex.join([*command, "--hf-ckpt-path", "DIR"])
