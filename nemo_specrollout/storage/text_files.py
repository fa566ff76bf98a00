# SPDX-License-Identifier: Apache-2.0
"""Reads text files and JSONL files of the user. The message of an error is a sentence with the file, the line, and a fix.

A byte-order mark at the beginning, which some editors write, is skipped. Blank lines are skipped, but they count in line
numbers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_specrollout.storage.files import read_regular

_BYTE_ORDER_MARK = "\ufeff"
_UNPACK = "unpack it first"
_OTHER_KINDS = {
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8"),
    b"\x1f\x8b": ("gzip data", _UNPACK),
    b"BZh": ("bzip2 data", _UNPACK),
    b"\xfd7zXZ": ("xz data", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("Zstandard data", _UNPACK),
    b"PK\x03\x04": ("a zip archive", _UNPACK),
    b"PAR1": ("a Parquet file", "write its rows as JSON lines"),
}
"""The first bytes of files that are not UTF-8 text, each with words for the kind of file and a fix."""


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines of a text file that are not blank, each as its place "FILE, line N" and its text.

    Raises ValueError if the file cannot be read, or if it is not UTF-8 text.
    """
    content = _content(path)
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            text = line.decode("utf-8").lstrip(_BYTE_ORDER_MARK)
        except UnicodeDecodeError as error:
            raise ValueError(_not_text(path, number, content)) from error
        if text.strip():
            yield f"{path}, line {number}", text


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the lines of a JSONL file that are not blank, each as its place "FILE, line N" and its JSON value.

    Raises ValueError if the file cannot be read, or if a line is not JSON.
    """
    for where, text in text_lines(path):
        yield where, json_of_line(text, where)


def json_of_line(text: str, where: str) -> Any:
    """Returns the value of a line of JSON. Raises ValueError if it is not JSON. The message begins with the place `where`."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); write the line again, or remove it") from error


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if the text is not JSON, with the reason but no file name."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        has_nul = error.doc[error.pos : error.pos + 1] == "\0"
        what = "a NUL character, as after a crash or in UTF-16 text," if has_nul else error.msg
        raise ValueError(f"{what} at character {error.pos + 1}") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error
    except ValueError as error:  # Python does not convert numbers of more than 4,300 digits
        raise ValueError("a number has too many digits") from error


def whole_number(value: object) -> int | None:
    """Returns `value` as an int if it is a whole number, and otherwise None. A float such as 4.0 is a whole number too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def _content(path: Path) -> bytes:
    try:
        return read_regular(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read ({reason}); name a text file") from error


def _not_text(path: Path, number: int, content: bytes) -> str:
    for begins, (kind, fix) in _OTHER_KINDS.items():
        if content.startswith(begins):
            return f"{path}: it is {kind}; {fix}"
    return f"{path}, line {number}: it is not UTF-8 text; save the file as UTF-8"
