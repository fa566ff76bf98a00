# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML config as NeMo-RL does: `defaults:` inheritance, interpolation, `key=value` overrides.

An error is a ConfigError that names the file or the override, line and column if they are known, and the usual fix.
"""

import errno
import io
import operator
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_specrollout.config.strict import ConfigError, join
from nemo_specrollout.storage.files import read_regular

NEMO_RL_DIR = "NEMO_RL_DIR"
"""Environment variable with the folder of NeMo-RL, which the shipped recipes use in `defaults`."""
_MAX_BYTES = 16 << 20
_SHOWN = 120
_FIXES = {
    "cannot start any token": "indent with spaces, not tabs; quote a value that begins with @, ` or %",
    "mapping values are not allowed": "indent keys of one block alike; quote a value that has ': ' in it",
    "expected ':'": "a key is followed by ': '",
    "block end": "indent keys of one block alike",
    "block mapping": "indent keys of one block alike",
    "did not find expected": "close what was opened; quote a value that has brackets or commas in it",
    "unexpected end of stream": "close the quotes",
    "duplicate key": "write it once",
    "undefined alias": "quote a value that begins with *",
    "single document": "remove the '---' between them",
    "not allowed": "remove that character",
}
"""Usual fix of a mistake, by words of the parser's message."""
_UNREADABLE = (OmegaConfBaseException, yaml.YAMLError, ValueError, AttributeError, LookupError, RecursionError)
"""Errors of OmegaConf and of the YAML parser about what a user wrote, beside TypeError."""
_REPLACES = "_override_"
"""A block at the top of a file with this key set to true replaces its parents' block instead of merging with it."""
_KEY = re.compile(r"[\w/+-]+(\.[\w/+-]+)*")


# OmegaConf cannot inspect the signature of `max` itself.
_RESOLVERS = {"add": operator.add, "mul": operator.mul, "div": operator.truediv, "max": lambda *values: max(values)}
"""NeMo-RL's functions for values such as ${mul:${policy.max_total_sequence_length}, 2}."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the resolved tree of the file at `path`, on top of its `defaults`, with `overrides` applied.

    Later files of `defaults` win. An override may begin with `+`, as in NeMo-RL for new keys. Raises ConfigError.
    """
    with warnings.catch_warnings():
        # OmegaConf 2.4 renames this method to one that means something else in 2.3.
        warnings.simplefilter("ignore", UserWarning)
        for name, function in _RESOLVERS.items():
            if not OmegaConf.has_resolver(name):
                OmegaConf.register_new_resolver(name, function)
    tree = _load_with_defaults(path, ())
    for override in overrides:
        tree = _override(tree, override)
    try:
        return dict(OmegaConf.to_container(tree, resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        own = [o for o in overrides if f"{key}.".startswith(f"{o.partition('=')[0].lstrip('+')}.")]
        raise ConfigError(f"{f'override {own[-1]!r}' if own else path}: {_problem(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: a value refers to itself by ${{...}}; write the value itself") from error


def new_keys(path: Path, overrides: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Returns valid overrides without `+` whose key the file at `path` lacks, with the missing name and its block's names."""
    tree = _load_with_defaults(path, ())
    found = list[tuple[str, str, list[str]]]()
    for override in overrides:
        node: Any = OmegaConf.to_container(tree, resolve=False)
        for name in () if override.startswith("+") else override.partition("=")[0].split("."):
            if isinstance(node, dict) and name not in node:
                found.append((override, name, [str(key) for key in node]))
            node = node.get(name) if isinstance(node, dict) else None
        tree = _override(tree, override)
    return found


def _load_with_defaults(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    tree = _read_yaml(path)
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `defaults` leads back to this file")
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of sections at the top")
    merged = OmegaConf.create({})
    for parent in _parents(path, tree):
        merged = _with_file(merged, _load_with_defaults(parent, (*seen, path.resolve())), path)
    return _with_file(merged, tree, path)


def _parents(path: Path, tree: DictConfig) -> list[Path]:
    """Returns the files that `defaults` of `tree`, read from `path`, names. Removes the key from `tree`."""
    written = str(OmegaConf.to_container(tree, resolve=False).get("defaults"))  # type: ignore[union-attr]
    hint = f"; set {NEMO_RL_DIR} to the folder of your copy of NeMo-RL" if NEMO_RL_DIR in written else ""
    try:
        parents = tree.pop("defaults", [])
        names = list(parents) if isinstance(parents, list | ListConfig) else [parents]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: defaults: {_problem(error)}{hint}") from error
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: defaults: expected a file or a list of files, got {parents!r}")
    files = [path.parent / name for name in names]
    if missing := [file for file in files if not os.path.isfile(file)]:
        raise ConfigError(f"{path}: defaults: {missing[0]} does not exist{hint}")
    return files


def _with_file(below: DictConfig, above: DictConfig, path: Path) -> DictConfig:
    """Returns `below` merged with `above`, read from `path`, or replaced by its marked blocks."""
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
    return _merged(below, above, str(path), f"; or set `{_REPLACES}: true` in a block that replaces it")


def _override(tree: DictConfig, override: str) -> DictConfig:
    """Returns `tree` with one `key=value` applied."""
    where = f"override {override if len(override) <= _SHOWN else f'{override[:_SHOWN]}...'!r}"
    key, equals, value = override.partition("=")
    key = key.removeprefix("++").removeprefix("+")
    if not key.strip() or not equals:
        raise ConfigError(f"{where}: expected key=value, e.g. grpo.max_num_steps=3")
    if "[" in key:
        raise ConfigError(f"{where}: an entry of a list cannot be changed alone; give the whole list")
    if _KEY.fullmatch(key) is None:
        raise ConfigError(f"{where}: {key[:_SHOWN]!r} is not a key; write names with dots, e.g. grpo.max_num_steps")
    if key.split(".")[0] in ("defaults", _REPLACES):
        raise ConfigError(f"{where}: {key!r} belongs at the top of a file; write a config that has it")
    try:
        above = OmegaConf.from_dotlist([f"{key}={value}"])
    except _UNREADABLE as error:
        raise ConfigError(f"{where}: {_problem(error)}") from error
    return _merged(tree, above, where)


def _merged(below: DictConfig, above: DictConfig, where: str, other_fix: str = "") -> DictConfig:
    try:
        return OmegaConf.merge(below, above)  # type: ignore[return-value]
    except TypeError as error:
        was, now = (OmegaConf.to_container(tree, resolve=False) for tree in (below, above))
        raise ConfigError(f"{where}: {_clash(was, now)}{other_fix}") from error
    except _UNREADABLE as error:
        raise ConfigError(f"{where}: {_problem(error)}") from error


def _clash(below: Any, above: Any, path: str = "") -> str:
    """Returns a sentence about the first key that is a block in one tree and a list in the other; empty if none is."""
    if isinstance(below, dict) and isinstance(above, dict):
        inner = (_clash(below[key], value, join(path, key)) for key, value in above.items() if key in below)
        return next(filter(None, inner), "")
    kinds: dict[type, str] = {dict: "block", list: "list"}
    was, now = (kinds.get(type(value)) for value in (below, above))
    return f"{path} is a {now} here, but a {was} below it; write a {was}" if was and now and was != now else ""


def _read_yaml(path: Path) -> Any:
    """Returns the OmegaConf tree of the file at `path`. Raises ConfigError for any content that it cannot read."""
    text = _read_text(path)
    try:
        return OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}{_place(error)}: {_problem(error)}") from error
    except OSError as error:  # OmegaConf raises it for a file with only a number or a date
        raise ConfigError(f"{path}: expected a mapping of sections at the top") from error
    except (TypeError, *_UNREADABLE) as error:
        raise ConfigError(f"{path}: a value in it cannot be read ({_problem(error)}); quote it") from error


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


def _problem(error: Exception) -> str:
    """Returns one line about a YAML error, with the usual fix, or about an OmegaConf error, with its key."""
    is_marked = isinstance(error, yaml.MarkedYAMLError)
    text = str(error.problem or error.context) if is_marked else str(error).split("\n", 1)[0]  # type: ignore[attr-defined]
    text = " ".join(text.split())
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {text}" if error.full_key else text
    return text + next((f"; {fix}" for words, fix in _FIXES.items() if words in text), "")


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return f", line {mark.line + 1}, column {mark.column + 1}"
    position = getattr(error, "position", None)
    return f", character {position + 1}" if isinstance(position, int) else ""
