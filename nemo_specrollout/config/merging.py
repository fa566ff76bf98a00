# SPDX-License-Identifier: Apache-2.0
"""Merges configs, and turns errors of OmegaConf and the YAML parser into sentences for the user."""

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
"""The usual fix of a mistake in a YAML file, by words in the message of the YAML parser."""
UNREADABLE = (OmegaConfBaseException, yaml.YAMLError, ValueError, AttributeError, LookupError, RecursionError)
"""Types of errors that OmegaConf and the YAML parser raise if a user has made a mistake.

TypeError is not among them. It is caught separately, because after a failed merge it means that a block met a list (`clash`).
"""


def merged(below: DictConfig, above: DictConfig, where: str, other_fix: str = "") -> DictConfig:
    """Merges the config `above` into the config `below`, and returns the result.

    Neither argument is changed. Raises ConfigError, whose message begins with `where`, in two cases. In the first, a key is a
    block of keys in one config and a list in the other, and the message ends with `other_fix`. In the second, a value cannot
    be read.
    """
    try:
        return OmegaConf.merge(below, above)  # type: ignore[return-value]
    except TypeError as error:
        was, now = (OmegaConf.to_container(tree, resolve=False) for tree in (below, above))
        raise ConfigError(f"{where}: {clash(was, now)}{other_fix}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{where}: {problem(error)}") from error


def clash(below: Any, above: Any, path: str = "") -> str:
    """Returns a sentence about the first key that is a block of keys in one config and a list in the other, or "" if none is.

    `below` and `above` may be parts of two whole configs. Then `path` is the key of these parts in the whole configs.
    """
    if isinstance(below, dict) and isinstance(above, dict):
        inner = (clash(below[key], value, join(path, key)) for key, value in above.items() if key in below)
        return next(filter(None, inner), "")
    kinds: dict[type, str] = {dict: "block", list: "list"}
    was, now = (kinds.get(type(value)) for value in (below, above))
    return f"{path} is a {now} here, but a {was} below it; write a {was}" if was and now and was != now else ""


def problem(error: Exception) -> str:
    """Returns one line about an error of the YAML parser or of OmegaConf, with the usual fix or the key if it is known."""
    is_marked = isinstance(error, yaml.MarkedYAMLError)
    text = str(error.problem or error.context) if is_marked else str(error).split("\n", 1)[0]  # type: ignore[attr-defined]
    text = " ".join(text.split())
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {text}" if error.full_key else text
    return text + next((f"; {fix}" for words, fix in _FIXES.items() if words in text), "")
