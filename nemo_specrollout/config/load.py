# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML config as NeMo-RL does: `defaults:` inheritance, interpolation, `key=value` overrides."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_specrollout.config.strict import ConfigError


def load_config(path: Path, overrides: list[str] = ()) -> dict[str, Any]:  # type: ignore[assignment]
    """The resolved tree of the file at `path`, with its `defaults` beneath and `overrides` on top.

    `defaults` names a file, or a list of them, relative to the file that has it; later ones win. A leading `+` of an
    override, which NeMo-RL asks for with new keys, is accepted. Raises ConfigError.
    """
    try:
        tree = _load_with_defaults(path, ())
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist([_checked(o) for o in overrides]))
        resolved = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
    assert isinstance(resolved, dict)
    return resolved  # type: ignore[return-value]


def _checked(override: str) -> str:
    if not override.partition("=")[0].strip("+") or "=" not in override:
        raise ConfigError(f"override {override!r}: expected key=value, e.g. grpo.max_num_steps=3")
    return override.removeprefix("++").removeprefix("+")


def _load_with_defaults(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `defaults` leads back to this file")
    tree = OmegaConf.load(path)
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of sections at the top")
    parents = tree.pop("defaults", [])
    names = [parents] if isinstance(parents, str) else parents
    if not isinstance(names, list | ListConfig) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{path}: defaults: expected a file or a list of files, got {parents!r}")
    layers = [_load_with_defaults(path.parent / name, (*seen, path.resolve())) for name in names]
    merged = OmegaConf.merge(*layers, tree)
    assert isinstance(merged, DictConfig)
    return merged
