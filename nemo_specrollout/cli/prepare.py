# SPDX-License-Identifier: Apache-2.0
"""What every command does first: read the config, check it against the machine, say what is wrong in a sentence."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.run import RunConfig, read_run_config
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.config.versions import unsupported_version, vllm_version
from nemo_specrollout.generation.arguments import with_specrollout

_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@dataclass(frozen=True)
class Prepared:
    """A config that can run here: as a tree, as a record, and the keys in it that have no effect."""

    tree: dict[str, Any]
    config: RunConfig
    ignored: list[str]
    model_config: dict[str, Any]


def prepare(path: Path, overrides: list[str]) -> Prepared:
    """Reads and checks a config without torch or vllm. Raises ConfigError."""
    tree = load_config(path, overrides)
    config, ignored = read_run_config(tree)
    model_config = _check_model(Path(config.policy.model_name), config)
    _check_engine(config)
    return Prepared(tree, config, ignored, model_config)


def _check_model(folder: Path, config: RunConfig) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(f"policy.model_name: folder {folder} does not exist; name a Hugging Face folder")
    for name in _MODEL_FILES:
        if not (folder / name).is_file():
            raise ConfigError(f"policy.model_name: {folder} has no {name}")
    model: dict[str, Any] = json.loads((folder / "config.json").read_text())
    _check_vocabulary(folder, model["vocab_size"])
    longest = model.get("max_position_embeddings")
    if longest is not None and config.policy.max_total_sequence_length > longest:
        raise ConfigError(
            f"policy.max_total_sequence_length: {config.policy.max_total_sequence_length} is beyond the model's "
            f"max_position_embeddings {longest}; lower it"
        )
    return model


def _check_vocabulary(folder: Path, vocab_size: int) -> None:
    """A tokenizer may have fewer ids than the model (padding), never more."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = list(tokenizer["model"]["vocab"].values()) + [t["id"] for t in tokenizer.get("added_tokens", [])]
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"policy.model_name: the tokenizer of {folder} has token id {max(ids)}, but the model's vocabulary ends at "
            f"{vocab_size - 1}; the two do not belong together"
        )


def _check_engine(config: RunConfig) -> None:
    version = vllm_version()
    if version is None:
        raise ConfigError("vLLM is not installed; `make setup` installs the CPU build")
    if (message := unsupported_version(version)) is not None:
        raise ConfigError(message)
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("megatron-core is not installed; `make setup` installs it")
    generation = config.policy.generation
    try:
        with_specrollout(generation.vllm_kwargs, generation.specrollout, "cpu")
    except ValueError as error:
        raise ConfigError(f"policy.generation.{error}") from error
