# SPDX-License-Identifier: Apache-2.0
"""Merges config trees, and tells in a sentence what OmegaConf or the YAML parser cannot read or merge."""

from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_specrollout.config.strict import ConfigError, join

_FIXES = {
    "cannot start any token": "indent with spaces, not tabs; quote a value that begins with @, ` or %",
    "mapping values are not allowed": "indent keys of one block alike; quote a value that has ': ' in it",
    "expected ':'": "a key is followed by ': '",
    "block end": "indent keys of one block alike",
    "block mapping": "indent keys of one block alike",
    "did not find expected": "close what was opened; quote a value that has brackets or commas in it",
    "expected the node content": "close what was opened",
    "unexpected end of stream": "close the quotes",
    "duplicate key": "write it once",
    "undefined alias": "quote a value that begins with *",
    "single document": "remove the '---' between them",
    "not allowed": "remove that character",
}
"""Usual fix of a mistake, by words of the parser's message."""
UNREADABLE = (OmegaConfBaseException, yaml.YAMLError, ValueError, AttributeError, LookupError, RecursionError)
"""Errors that OmegaConf and the YAML parser raise about what a user wrote. TypeError is another, which is handled apart."""


def merged(below: DictConfig, above: DictConfig, where: str, other_fix: str = "") -> DictConfig:
    """Returns `below` with `above` merged into it.

    Raises ConfigError if they do not fit together. Its message begins with `where`, and ends with `other_fix` if a block and a
    list meet.
    """
    try:
        return OmegaConf.merge(below, above)  # type: ignore[return-value]
    except TypeError as error:
        was, now = (OmegaConf.to_container(tree, resolve=False) for tree in (below, above))
        raise ConfigError(f"{where}: {clash(was, now)}{other_fix}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{where}: {problem(error)}") from error


def clash(below: Any, above: Any, path: str = "") -> str:
    """Returns a sentence about the first key that is a block in one tree and a list in the other; empty if none is."""
    if isinstance(below, dict) and isinstance(above, dict):
        inner = (clash(below[key], value, join(path, key)) for key, value in above.items() if key in below)
        return next(filter(None, inner), "")
    kinds: dict[type, str] = {dict: "block", list: "list"}
    was, now = (kinds.get(type(value)) for value in (below, above))
    return f"{path} is a {now} here, but a {was} below it; write a {was}" if was and now and was != now else ""


def problem(error: Exception) -> str:
    """Returns one line about a YAML error, with the usual fix, or about an OmegaConf error, with its key."""
    is_marked = isinstance(error, yaml.MarkedYAMLError)
    text = str(error.problem or error.context) if is_marked else str(error).split("\n", 1)[0]  # type: ignore[attr-defined]
    text = " ".join(text.split())
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {text}" if error.full_key else text
    return text + next((f"; {fix}" for words, fix in _FIXES.items() if words in text), "")
