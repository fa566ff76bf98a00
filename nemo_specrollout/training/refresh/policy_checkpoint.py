# SPDX-License-Identifier: Apache-2.0
"""Finds the policy that a training run left, as a Hugging Face folder. NeMo-RL's converters make one of its checkpoints."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from nemo_specrollout.config.load import NEMO_RL_DIR
from nemo_specrollout.config.nemo_rl_tree import DEFAULT_NEMO_RL_DIR, nemo_rl_checkout

ACCEPTED = "a Hugging Face folder (config.json with *.safetensors or pytorch_model.bin), or a step_N folder of NeMo-RL"


def hf_folder(checkpoint: Path) -> Path | None:
    """Returns the Hugging Face folder in `checkpoint`; None if NeMo-RL must convert its weights first.

    Raises ValueError for a folder that holds no policy.
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
        return None
    found = [*checkpoint.glob("step_*"), *checkpoint.glob("checkpoints/step_*")]
    steps = sorted(found, key=lambda path: path.name.removeprefix("step_").zfill(9))
    which = f"; name one of its steps, such as {steps[-1]}" if steps else ""
    raise ValueError(f"{checkpoint} holds no policy: give {ACCEPTED}{which}")


def convert(step: Path, out: Path) -> None:
    """Has NeMo-RL's converter, in NeMo-RL's environment, write the policy of a step folder to `out` completely or not at all.

    For a Megatron policy it needs a GPU. Raises ValueError, with the command, if there is no environment or it fails.
    """
    unfinished = out.with_name(f".{out.name}.tmp")
    checkout = nemo_rl_checkout() or Path(os.environ.get(NEMO_RL_DIR) or DEFAULT_NEMO_RL_DIR)
    command = _converter(step.absolute(), unfinished.absolute(), checkout.absolute())
    manual = f"convert it in NeMo-RL's environment, and give DIR as --policy: {shlex.join([*command[:-1], 'DIR'])}"
    if shutil.which("uv") is None or not (checkout / "examples" / "converters").is_dir():
        raise ValueError(f"{step} is a checkpoint of NeMo-RL, and its checkout or uv is not here: {manual}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    # These belong to the Python that runs now. uv has its own.
    kept = {name: v for name, v in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH")}
    done = subprocess.run(command, env=kept, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode or not (unfinished / "config.json").is_file():
        shutil.rmtree(unfinished, ignore_errors=True)
        last = next(reversed((done.stderr or done.stdout).strip().splitlines()), f"exit code {done.returncode}")
        raise ValueError(f"{step}: NeMo-RL's converter failed ({last}); {manual}")
    for file in (step / "policy" / "tokenizer").glob("*"):
        shutil.copy(file, unfinished)
    os.rename(unfinished, out)


def _converter(step: Path, out: Path, checkout: Path) -> list[str]:
    """Returns the command that converts a step folder. Its last word is the folder that it writes."""
    weights = step / "policy" / "weights"
    iteration = next(reversed(sorted(weights.glob("iter_*"))), None)
    if iteration is None:
        extra, script, source = [], "convert_dcp_to_hf.py", ["--dcp-ckpt-path", str(weights)]
    else:
        extra, script = ["--extra", "mcore"], "convert_megatron_to_hf.py"
        source = ["--megatron-ckpt-path", str(iteration)]
    converter = str(checkout / "examples" / "converters" / script)
    run = ["uv", "run", "--project", str(checkout), *extra, "python", converter]
    return [*run, "--config", str(step / "config.yaml"), *source, "--hf-ckpt-path", str(out)]
