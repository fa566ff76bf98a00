# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML config as NeMo-RL does. A config inherits from the files in `defaults`, and the command line may override keys.

Every error is a ConfigError that names the file or the override, the line and column if they are known, and the usual fix.
"""

import errno
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_specrollout.config.interpolation import register_resolvers, resolved
from nemo_specrollout.config.merging import UNREADABLE, merged, problem
from nemo_specrollout.config.overrides import key_of, parse_override
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.storage.files import read_regular

NEMO_RL_DIR = "NEMO_RL_DIR"
"""Environment variable with the folder of NeMo-RL. The recipes of this package use it in `defaults`."""
_MAX_BYTES = 16 << 20
_SHOWN = 120
_REPLACES = "_override_"
"""If a block at the top of a file has this key set to true, it replaces the inherited block instead of merging with it."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the config at `path`, merges it with its `defaults`, applies `overrides`, and computes all of its expressions.

    Returns the config as nested dictionaries. The file overrides the files in its `defaults`, and later files in `defaults`
    override earlier ones. `overrides` are texts such as `grpo.max_num_steps=3` in NeMo-RL's grammar. Raises ConfigError if
    anything cannot be read, merged or computed.
    """
    return resolve_config(merge_config(path, overrides), path, overrides)


def merge_config(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Reads the config at `path` like `load_config`, but does not compute expressions such as ${oc.env:HOME}."""
    tree = _load_with_defaults(path, ())
    for override in overrides:
        parse_override(override).apply(tree)
    return tree


def resolve_config(tree: DictConfig, path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Computes the expressions in a config that `merge_config` has read, and returns it as nested dictionaries.

    Raises ConfigError if a value cannot be computed. The error names the override that has set the value, or else the file.
    """
    register_resolvers()
    try:
        return resolved(tree)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        own = [override for override in overrides if f"{key}.".startswith(f"{key_of(override)}.")]
        raise ConfigError(f"{f'override {own[-1]!r}' if own else path}: {problem(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: a value refers to itself by ${{...}}; write the value itself") from error


def new_keys(path: Path, overrides: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Returns those overrides that set a key which the config at `path` does not have, except overrides that begin with `+`.

    Each is returned as a tuple of three entries. They are the override, the first name in its key that the config lacks, and
    the names that the config has at the same level. Raises ConfigError if an override cannot be read or applied.
    """
    tree = _load_with_defaults(path, ())
    found = list[tuple[str, str, list[str]]]()
    for text in overrides:
        override = parse_override(text)
        node: Any = OmegaConf.to_container(tree, resolve=False)
        for name in override.key.split(".") if override.kind == "=" else ():
            if isinstance(node, dict) and name not in node:
                found.append((text, name, [str(key) for key in node]))
            node = node.get(name) if isinstance(node, dict) else None
        override.apply(tree)
    return found


def _load_with_defaults(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    tree = _read_yaml(path)
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `defaults` leads back to this file")
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of sections at the top")
    below = OmegaConf.create({})
    for parent in _parents(path, tree):
        below = _with_file(below, _load_with_defaults(parent, (*seen, path.resolve())), path)
    return _with_file(below, tree, path)


def _parents(path: Path, tree: DictConfig) -> list[Path]:
    """Returns the files in `defaults` of `tree`, which was read from `path`. Removes the key `defaults` from `tree`."""
    written = str(OmegaConf.to_container(tree, resolve=False).get("defaults"))  # type: ignore[union-attr]
    hint = f"; set {NEMO_RL_DIR} to the folder of your copy of NeMo-RL" if NEMO_RL_DIR in written else ""
    try:
        parents = tree.pop("defaults", [])
        names = list(parents) if isinstance(parents, list | ListConfig) else [parents]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: defaults: {problem(error)}{hint}") from error
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: defaults: expected a file or a list of files, got {parents!r}")
    files = [path.parent / name for name in names]
    if missing := [file for file in files if not os.path.isfile(file)]:
        raise ConfigError(f"{path}: defaults: {missing[0]} does not exist{hint}")
    return files


def _with_file(below: DictConfig, above: DictConfig, path: Path) -> DictConfig:
    """Merges the content `above` of the file `path` into the inherited config `below`, and returns the result.

    If a block of `above` has `_override_: true`, it replaces the inherited block.
    """
    for key in list(above):
        # A child may set a mandatory value (`???`). Interpolations are resolved after all merges.
        if OmegaConf.is_missing(above, key) or OmegaConf.is_interpolation(above, str(key)):
            continue
        block = above[key]
        mark: Any = block._get_node(_REPLACES) if isinstance(block, DictConfig) else None
        if mark is not None:
            written = mark._value()  # reading a missing value or an interpolation would raise
            if not isinstance(written, bool):
                raise ConfigError(f"{path}: {key}.{_REPLACES}: {written!r}; it must be true or false")
            if block.pop(_REPLACES):
                below.pop(key, None)
    return merged(below, above, str(path), f"; or set `{_REPLACES}: true` in a block that replaces it")


def _read_yaml(path: Path) -> Any:
    """Returns the content of the YAML file at `path` as OmegaConf reads it. Raises ConfigError if it cannot be read."""
    text = _read_text(path)
    try:
        return OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}{_place(error)}: {problem(error)}") from error
    except OSError as error:  # OmegaConf raises it for a file with only a number or a date
        raise ConfigError(f"{path}: expected a mapping of sections at the top") from error
    except (TypeError, *UNREADABLE) as error:
        raise ConfigError(f"{path}: a value in it cannot be read ({problem(error)}); quote it") from error


def _read_text(path: Path) -> str:
    name = str(path) if len(str(path)) <= _SHOWN else f"{str(path)[:_SHOWN]}..."
    try:
        content = read_regular(path, _MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            raise ConfigError(f"config file {name} does not exist") from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"config file {name!r} cannot be read: {reason}; name a YAML file") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"config file {name} has more than {_MAX_BYTES >> 20} MiB; name a YAML file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}, line {line}: not UTF-8 text; save it as UTF-8") from error


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return f", line {mark.line + 1}, column {mark.column + 1}"
    position = getattr(error, "position", None)
    return f", character {position + 1}" if isinstance(position, int) else ""
