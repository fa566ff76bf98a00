# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML config as NeMo-RL does: `defaults:` inheritance, interpolation, `key=value` overrides."""

import operator
import warnings
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_specrollout.config.strict import ConfigError

# A block with this key, set to true, replaces that of its parents and is not merged with it. Top of a file only.
_REPLACES = "_override_"
NEMO_RL_DIR = "NEMO_RL_DIR"


def _larger(a: Any, b: Any) -> Any:
    return max(a, b)


# NeMo-RL's, e.g. ${mul:${policy.max_total_sequence_length}, 2}.
_RESOLVERS = {"add": operator.add, "mul": operator.mul, "div": operator.truediv, "max": _larger}


def load_config(path: Path, overrides: list[str] = ()) -> dict[str, Any]:  # type: ignore[assignment]
    """The resolved tree of the file at `path`, with its `defaults` beneath and `overrides` on top.

    `defaults` names a file, or a list of them, relative to the file that has it; later ones win. A leading `+` of an
    override, which NeMo-RL asks for with new keys, is accepted. Raises ConfigError.
    """
    _register_resolvers()
    try:
        tree = _load_with_defaults(path, ())
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist([_checked(o) for o in overrides]))
        resolved = OmegaConf.to_container(merged, resolve=True)
    except TypeError as error:  # of a section that is overridden by a list, say
        raise ConfigError(
            f"{path}: an override, or a file over its defaults, has another kind of value: {error}"
        ) from error
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
    assert isinstance(resolved, dict)
    return resolved  # type: ignore[return-value]


def _register_resolvers() -> None:
    with warnings.catch_warnings():
        # OmegaConf 2.4 renames this method to one that means something else in 2.3.
        warnings.simplefilter("ignore", UserWarning)
        for name, function in _RESOLVERS.items():
            if not OmegaConf.has_resolver(name):
                OmegaConf.register_new_resolver(name, function)


def _checked(override: str) -> str:
    if not override.partition("=")[0].strip("+") or "=" not in override:
        raise ConfigError(f"override {override!r}: expected key=value, e.g. grpo.max_num_steps=3")
    if "[" in override.partition("=")[0]:
        raise ConfigError(f"override {override!r}: an entry of a list cannot be changed by itself; give the whole list")
    return override.removeprefix("++").removeprefix("+")


def _load_with_defaults(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `defaults` leads back to this file")
    tree = OmegaConf.load(path)
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of sections at the top")
    merged = OmegaConf.create({})
    for parent in _parents(path, tree):
        merged = _merge(merged, _load_with_defaults(parent, (*seen, path.resolve())))
    return _merge(merged, tree)


def _parents(path: Path, tree: DictConfig) -> list[Path]:
    """The files that `defaults` of `tree`, read from `path`, names; takes the key out of `tree`."""
    written = str(OmegaConf.to_container(tree, resolve=False).get("defaults"))  # type: ignore[union-attr]
    parents = tree.pop("defaults", [])
    names = [parents] if isinstance(parents, str) else parents
    if not isinstance(names, list | ListConfig) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{path}: defaults: expected a file or a list of files, got {parents!r}")
    files = [path.parent / name for name in names]
    for file in files:
        if not file.is_file():
            hint = f"; set {NEMO_RL_DIR} to the folder of your copy of NeMo-RL" if NEMO_RL_DIR in written else ""
            raise ConfigError(f"{path}: defaults: {file} does not exist{hint}")
    return files


def _merge(below: DictConfig, above: DictConfig) -> DictConfig:
    """`above` over `below`, except for blocks that replace what is below."""
    for key in list(above):
        # Mandatory values (`???`) may come from a child; interpolations are resolved when all is merged.
        if OmegaConf.is_missing(above, key) or OmegaConf.is_interpolation(above, str(key)):
            continue
        block = above[key]
        if isinstance(block, DictConfig) and block.get(_REPLACES, False):
            block.pop(_REPLACES)
            below.pop(key, None)
    merged = OmegaConf.merge(below, above)
    assert isinstance(merged, DictConfig)
    return merged
