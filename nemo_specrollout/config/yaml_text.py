# SPDX-License-Identifier: Apache-2.0
"""Reads YAML files as OmegaConf trees; an error names file, line, column and the usual fix."""

import errno
import io
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_specrollout.config.files import read_regular
from nemo_specrollout.config.strict import ConfigError

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
