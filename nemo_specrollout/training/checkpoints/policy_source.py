# SPDX-License-Identifier: Apache-2.0
"""Finds the policy in a folder that a training run left, and converts it into a Hugging Face folder."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from safetensors.torch import save_file

from nemo_specrollout.training.checkpoints.megatron_checkpoint import (
    hf_tensors,
    read_local,
    read_torch,
    read_torch_dist,
)
from nemo_specrollout.training.checkpoints.policy_shape import PolicyShape

Kind = Literal["hugging_face", "torch_dist", "torch", "local"]

ACCEPTED = (
    "a Hugging Face folder (config.json and *.safetensors), a Megatron-Core checkpoint (torch_dist or torch), "
    "a NeMo-RL step folder of a Megatron policy, or a checkpoint of a local run"
)
_TRACKER = "latest_checkpointed_iteration.txt"
"""File of a Megatron-Core checkpoint that names its latest iteration."""


@dataclass(frozen=True)
class PolicySource:
    """Policy that was found."""

    kind: Kind
    """Format of the files."""
    weights: Path
    """Folder of the files."""
    model_name: str | None = None
    """Hugging Face folder or hub name of the model that was trained; None if unknown."""
    tokenizer: Path | None = None
    """Folder of the run's own tokenizer; None if there is none."""


def policy_folder(checkpoint: Path, out: Path, hf_config: str | None = None) -> Path:
    """Returns a Hugging Face folder of the policy in `checkpoint`, which is converted if necessary.

    Args:
        checkpoint: Folder that a training run left.
        out: Folder for a converted policy, written completely or not at all.
        hf_config: Folder, or hub name in the local cache, with config.json and tokenizer. By default the model that the
            run's config.yaml or run_config.yaml names.

    A conversion takes twice the memory of the weights. Raises ValueError for a checkpoint that cannot be read or converted,
    and if it would be converted into a folder that exists.
    """
    source = find_policy(checkpoint)
    if source.kind == "hugging_face":
        if hf_config is not None:
            raise ValueError(f"{source.weights} has a config.json of its own: leave out --hf-config {hf_config}")
        return source.weights
    if out.exists():
        raise ValueError(f"{out} exists: name a folder that does not")
    config = _config_folder(source, hf_config)
    shape = PolicyShape.from_hf(json.loads((config / "config.json").read_text()))
    readers = {"torch_dist": read_torch_dist, "torch": read_torch, "local": read_local}
    tensors = hf_tensors(readers[source.kind](source.weights), shape, source.weights)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    for file in _companion_files(config, source.tokenizer):
        shutil.copy(file, temporary)
    os.rename(temporary, out)
    return out


def find_policy(folder: Path) -> PolicySource:
    """Returns the policy in a folder, by its files alone. Raises ValueError with what was found and what is accepted."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give {ACCEPTED}")
    if folder.name.startswith("tmp_step_"):
        raise ValueError(f"{folder} was never finished by NeMo-RL: give a step_N folder")
    for sub in (folder / "policy" / "weights", folder / "model" / "consolidated"):
        if sub.is_dir():
            return find_policy(sub)
    if (folder / _TRACKER).is_file():
        return find_policy(_latest_iteration(folder))
    kind = _kind_of(folder)
    return PolicySource(kind, folder) if kind == "hugging_face" else _with_run_config(PolicySource(kind, folder))


def _latest_iteration(folder: Path) -> Path:
    text = (folder / _TRACKER).read_text().strip()
    latest = folder / (f"iter_{int(text):07d}" if text.isdigit() else text)
    if text != "release" and not text.isdigit():
        raise ValueError(f"{folder / _TRACKER} says {text!r}: it should name an iteration")
    if not latest.is_dir():
        raise ValueError(f"{folder} is incomplete: {_TRACKER} names {text}, but there is no {latest.name}")
    return latest


def _kind_of(folder: Path) -> Kind:
    has_safetensors = any(folder.glob("*.safetensors"))
    if has_safetensors and (folder / "config.json").is_file():
        return "hugging_face"
    if (folder / "metadata.json").is_file():
        return "torch_dist"
    if any(folder.glob("mp_rank_*")):
        return "torch"
    if any(folder.glob("rank_*_of_*.pt")):
        return "local"
    raise ValueError(f"{folder} {_what_is_wrong(folder, has_safetensors)}: give {ACCEPTED}")


def _what_is_wrong(folder: Path, has_safetensors: bool) -> str:
    found = [*folder.glob("step_*"), *folder.glob("checkpoints/step_*")]
    steps = sorted(found, key=lambda path: path.name.removeprefix("step_").zfill(9))
    if has_safetensors:
        return "has *.safetensors but no config.json"
    if (folder / "config.json").is_file():
        return "has a config.json but no *.safetensors"
    if (folder / ".metadata").is_file() or (folder / "model").is_dir():
        return "holds a DTensor policy, which NeMo-RL's examples/converters/convert_dcp_to_hf.py makes a folder of"
    if any(folder.glob("iter_*")):
        return f"has iterations but no {_TRACKER}, so name one of them"
    if steps:
        return f"holds several steps, so name one of them, such as {steps[-1]}"
    names = sorted(path.name for path in folder.iterdir())
    return f"holds {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}" if names else "is empty"


def _with_run_config(source: PolicySource) -> PolicySource:
    """Adds the model's name from the run's config, some folders up, or from Megatron Bridge's record."""
    for folder in (source.weights, *source.weights.absolute().parents[:3]):
        for name, keys in (("config.yaml", ("policy", "model_name")), ("run_config.yaml", ("model", "hf_model_id"))):
            if model_name := _value(folder / name, keys):
                tokenizer = folder / "policy" / "tokenizer"
                source = replace(source, model_name=source.model_name or model_name)
                source = replace(source, tokenizer=tokenizer) if tokenizer.is_dir() else source
    return source


def _value(file: Path, keys: tuple[str, ...]) -> str | None:
    if not file.is_file():
        return None
    try:
        value: Any = yaml.safe_load(file.read_text())
    except yaml.YAMLError:
        return None
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _config_folder(source: PolicySource, hf_config: str | None) -> Path:
    """Returns the folder of config.json and tokenizer: the given one, else the one that the run started from."""
    name = hf_config or source.model_name
    if name is None:
        raise ValueError(f"{source.weights} does not say which model it is of: give --hf-config FOLDER")
    folder = Path(name) if Path(name).is_dir() else _cached(name)
    if folder is None or not (folder / "config.json").is_file():
        raise ValueError(
            f"{name} is neither a folder with a config.json nor a model in the local Hugging Face cache: "
            "give --hf-config FOLDER"
        )
    return folder


def _cached(name: str) -> Path | None:
    """Returns the folder of a hub model in the local cache, without using the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=["*.json", "*.txt", "*.jinja"]))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _companion_files(*folders: Path | None) -> Iterator[Path]:
    """Yields config and tokenizer files. Files of a later folder replace files of an earlier one."""
    for folder in folders:
        for pattern in ("*.json", "*.txt", "*.jinja"):
            files = folder.glob(pattern) if folder is not None else ()
            yield from (file for file in files if not file.name.endswith(".index.json"))
