# SPDX-License-Identifier: Apache-2.0
"""A policy as a Hugging Face folder, from whatever folder a training run left: recognised by its files, then converted."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from nemo_specrollout.training.checkpoints.policy_shape import PolicyShape

Kind = Literal["hugging_face", "torch_dist", "torch", "local"]

ACCEPTED = (
    "a Hugging Face folder (config.json and *.safetensors), a Megatron-Core checkpoint (torch_dist or torch), "
    "a NeMo-RL step folder of a Megatron policy, or a checkpoint of a local run"
)
_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class PolicySource:
    """A policy that was found. `weights`: the folder of its files. `model_name`: the Hugging Face folder or hub name it
    was trained from, None if nothing tells. `tokenizer`: a folder of the run's own tokenizer, None if there is none."""

    kind: Kind
    weights: Path
    model_name: str | None = None
    tokenizer: Path | None = None


def policy_folder(checkpoint: Path, out: Path, hf_config: str | None = None) -> Path:
    """A Hugging Face folder of the policy in `checkpoint`: that folder itself, or `out`, written whole or not at all.

    `hf_config`: a folder, or a hub name in the local cache, with config.json and the tokenizer; None: what the run's
    config.yaml or run_config.yaml names. Raises ValueError, in a sentence, for what cannot be read or converted.
    """
    source = find_policy(checkpoint)
    if source.kind == "hugging_face":
        if hf_config is not None:
            raise ValueError(f"{source.weights} has a config.json of its own: leave out --hf-config {hf_config}")
        return source.weights
    export_policy(source, out, hf_config)
    return out


def find_policy(folder: Path) -> PolicySource:
    """What policy a folder holds, by its files alone. Raises ValueError saying what was found and what is accepted."""
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
    """Add what the run's own config tells: `policy.model_name`, some folders up, or Megatron Bridge's record."""
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


def export_policy(source: PolicySource, out: Path, hf_config: str | None = None) -> None:
    """Write a Megatron or local checkpoint as the Hugging Face folder `out`, whole or not at all; host memory twice the
    weights. Raises ValueError where `out` exists, and for weights that are damaged or do not fit the config."""
    from safetensors.torch import save_file

    from nemo_specrollout.training.checkpoints import megatron_checkpoint as checkpoint

    if out.exists():
        raise ValueError(f"{out} exists: name a folder that does not")
    config = _config_folder(source, hf_config)
    shape = PolicyShape.from_hf(json.loads((config / "config.json").read_text()))
    readers = {
        "torch_dist": checkpoint.read_torch_dist, "torch": checkpoint.read_torch, "local": checkpoint.read_local,
    }  # fmt: skip
    tensors = checkpoint.hf_tensors(readers[source.kind](source.weights), shape, source.weights)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    for file in _companion_files(config, source.tokenizer):
        shutil.copy(file, temporary)
    os.rename(temporary, out)


def _config_folder(source: PolicySource, hf_config: str | None) -> Path:
    """The folder of config.json and tokenizer: the one given, else the one that the run was started from."""
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
    """A hub model's folder in the local cache; the network is not asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=["*.json", "*.txt", "*.jinja"]))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _companion_files(*folders: Path | None) -> Iterator[Path]:
    """Config and tokenizer files; a later folder's replace an earlier one's."""
    for folder in folders:
        for pattern in ("*.json", "*.txt", "*.jinja"):
            files = folder.glob(pattern) if folder is not None else ()
            yield from (file for file in files if not file.name.endswith(".index.json"))
