# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML config as NeMo-RL does: `defaults:` inheritance, interpolation, `key=value` overrides."""

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
from yaml import YAMLError

from nemo_specrollout.config.files import read_regular
from nemo_specrollout.config.strict import ConfigError, join

MOST_BYTES = 16 << 20
"""Largest config file, in bytes."""
DEEPEST = 100
"""Deepest nesting of blocks."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
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
_LONGEST_NAME = 120
"""Characters of a path that a message shows."""


def read_yaml(path: Path) -> Any:
    """Returns the OmegaConf tree of the file at `path`. Raises ConfigError for any content that it cannot read."""
    text = _read_text(path)
    try:
        check_depth(text, str(path))
        return OmegaConf.load(io.StringIO(text))
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_place(error)}: {problem_of(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {problem_of(error)}") from error
    except OSError as error:  # OmegaConf raises it for a file with only a number or a date
        raise ConfigError(f"{path}: expected a mapping of sections at the top") from error
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ConfigError(f"{path}: a value in it cannot be read ({error}); quote it") from error


def problem_of(error: Exception) -> str:
    """Returns one line about a YAML error, with the usual fix, or about an OmegaConf error, with its key."""
    if isinstance(error, yaml.MarkedYAMLError):
        text = " ".join(str(error.problem or error.context).split())
    else:
        text = " ".join(str(error).split("\n", 1)[0].split())
    if isinstance(error, OmegaConfBaseException):
        key = str(getattr(error, "full_key", None) or "")
        return f"{key}: {text}" if key else text
    return text + next((f"; {fix}" for words, fix in _FIXES.items() if words in text), "")


def check_depth(text: str, where: str) -> None:
    """Raises ConfigError if blocks are nested more than `DEEPEST` deep, and YAMLError for malformed YAML.

    Call it before the blocks are built, because building recurses as deep as they are nested.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            line = event.start_mark.line + 1
            raise ConfigError(f"{where}, line {line}: blocks are nested more than {DEEPEST} deep; no config needs that")


def _read_text(path: Path) -> str:
    name = str(path) if len(str(path)) <= _LONGEST_NAME else f"{str(path)[:_LONGEST_NAME]}..."
    try:
        content = read_regular(path, MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            raise ConfigError(f"config file {name} does not exist") from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"config file {name!r} cannot be read: {reason}; name a YAML file") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"config file {name} has more than {MOST_BYTES >> 20} MiB; name a YAML file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}, line {line}: not UTF-8 text; save it as UTF-8") from error


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return f", line {mark.line + 1}, column {mark.column + 1}"
    position = getattr(error, "position", None)
    return f", character {position + 1}" if isinstance(position, int) else ""


_REPLACES = "_override_"
"""A block at the top of a file with this key set to true replaces its parents' block instead of merging with it."""
NEMO_RL_DIR = "NEMO_RL_DIR"
"""Environment variable with the folder of NeMo-RL, which the shipped recipes use in `defaults`."""


def _larger(a: Any, b: Any) -> Any:  # OmegaConf cannot inspect the signature of `max`
    return max(a, b)


_RESOLVERS = {"add": operator.add, "mul": operator.mul, "div": operator.truediv, "max": _larger}
"""NeMo-RL's functions for values such as ${mul:${policy.max_total_sequence_length}, 2}."""
_KEY = re.compile(r"[^\s.=\[\]{}:,'\"$#&*!|>%@`]+(\.[^\s.=\[\]{}:,'\"$#&*!|>%@`]+)*")
"""Dotted names of keys, without characters that have a meaning in YAML or OmegaConf."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the resolved tree of the file at `path`, on top of its `defaults`, with `overrides` applied.

    `defaults` names one or several files relative to the file that has it; later ones win. An override may begin with `+`,
    which NeMo-RL requires for new keys. Raises ConfigError, which names the file or the override.
    """
    _register_resolvers()
    tree = _load_with_defaults(path, ())
    for override in overrides:
        tree = _override(tree, override)
    try:
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{_origin(error, path, overrides)}: {problem_of(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: a value refers to itself by ${{...}}; write the value itself") from error
    assert isinstance(resolved, dict)
    return resolved  # type: ignore[return-value]


def _register_resolvers() -> None:
    with warnings.catch_warnings():
        # OmegaConf 2.4 renames this method to one that means something else in 2.3.
        warnings.simplefilter("ignore", UserWarning)
        for name, function in _RESOLVERS.items():
            if not OmegaConf.has_resolver(name):
                OmegaConf.register_new_resolver(name, function)


def _origin(error: OmegaConfBaseException, path: Path, overrides: Sequence[str]) -> str:
    """Returns the override that has the key of an error, else the file."""
    key = str(error.full_key or "")
    own = [o for o in overrides if f"{key}.".startswith(f"{o.partition('=')[0].lstrip('+')}.")]
    return f"override {own[-1]!r}" if own else str(path)


def _override(tree: DictConfig, override: str) -> DictConfig:
    """Returns `tree` with one `key=value` applied. Raises ConfigError, which names the override."""
    shown = repr(override if len(override) <= 200 else f"{override[:200]}...")
    key, equals, value = override.partition("=")
    key = key.removeprefix("++").removeprefix("+")
    if not key.strip() or not equals:
        raise ConfigError(f"override {shown}: expected key=value, e.g. grpo.max_num_steps=3")
    if "[" in key:
        raise ConfigError(f"override {shown}: an entry of a list cannot be changed alone; give the whole list")
    if _KEY.fullmatch(key) is None or not key.isprintable() or key.count(".") >= DEEPEST:
        raise ConfigError(
            f"override {shown}: {key[:80]!r} is not a key; write names separated by dots, e.g. grpo.max_num_steps"
        )
    if key.split(".")[0] in ("defaults", _REPLACES):
        raise ConfigError(f"override {shown}: {key!r} belongs at the top of a file; write a config that has it")
    try:
        check_depth(value, f"override {shown}")
        above = OmegaConf.from_dotlist([f"{key}={value}"])
        merged = OmegaConf.merge(tree, above)
    except ConfigError:
        raise
    except TypeError as error:
        raise ConfigError(f"override {shown}: {_clash(tree, above)}") from error
    except (OmegaConfBaseException, YAMLError, ValueError, AttributeError, LookupError, RecursionError) as error:
        raise ConfigError(f"override {shown}: {problem_of(error)}") from error
    assert isinstance(merged, DictConfig)
    return merged


def _clash(below: Any, above: Any, path: str = "") -> str:
    """Returns a sentence about the first key that is a block in one tree and a list in the other; empty if none is."""
    if isinstance(below, DictConfig) and isinstance(above, DictConfig):
        for key in above:
            if (
                key in below
                and not OmegaConf.is_interpolation(below, str(key))
                and not OmegaConf.is_missing(below, key)
            ):
                clash = _clash(below._get_node(key), above._get_node(key), join(path, key))
                if clash:
                    return clash
        return ""
    if isinstance(above, DictConfig) and isinstance(below, ListConfig):
        return f"{path} is a block here, but a list below it; write a list"
    if isinstance(above, ListConfig) and isinstance(below, DictConfig):
        return f"{path} is a list here, but a block below it; write a block"
    return ""


def _load_with_defaults(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    tree = read_yaml(path)
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `defaults` leads back to this file")
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of sections at the top")
    merged = OmegaConf.create({})
    for parent in _parents(path, tree):
        merged = _merge(merged, _load_with_defaults(parent, (*seen, path.resolve())), path)
    return _merge(merged, tree, path)


def _parents(path: Path, tree: DictConfig) -> list[Path]:
    """Returns the files that `defaults` of `tree`, read from `path`, names. Removes the key from `tree`."""
    written = str(OmegaConf.to_container(tree, resolve=False).get("defaults"))  # type: ignore[union-attr]
    hint = f"; set {NEMO_RL_DIR} to the folder of your copy of NeMo-RL" if NEMO_RL_DIR in written else ""
    try:
        parents = tree.pop("defaults", [])
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {problem_of(error)}") from error
    try:
        names = [parents] if isinstance(parents, str) else list(parents) if isinstance(parents, ListConfig) else parents
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: defaults: {problem_of(error)}{hint}") from error
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{path}: defaults: expected a file or a list of files, got {parents!r}")
    files = [path.parent / name for name in names]
    for file in files:
        if not os.path.isfile(file):
            raise ConfigError(f"{path}: defaults: {file} does not exist{hint}")
    return files


def _merge(below: DictConfig, above: DictConfig, path: Path) -> DictConfig:
    """Returns `below` merged with `above`, read from `path`, or replaced by its marked blocks. Raises ConfigError."""
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
    try:
        merged = OmegaConf.merge(below, above)
    except TypeError as error:
        raise ConfigError(
            f"{path}: {_clash(below, above)}; or set `{_REPLACES}: true` in a block that replaces it"
        ) from error
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path}: {problem_of(error)}") from error
    assert isinstance(merged, DictConfig)
    return merged
