# SPDX-License-Identifier: Apache-2.0
"""The reader of text and JSON lines that a user gave: what it reads, and the sentence for what it cannot read."""

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from nemo_specrollout.storage.text_files import json_lines, parse_json, text_lines, whole_number

pytestmark = pytest.mark.unit


def lines_of(folder: Path, content: bytes) -> list[tuple[str, Any]]:
    file = folder / "lines.jsonl"
    file.write_bytes(content)
    return [(where.removeprefix(f"{file}, "), value) for where, value in json_lines(file)]


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1}\n{"b": 2}\n',
        b'\xef\xbb\xbf{"a": 1}\n{"b": 2}',
        b'\xef\xbb\xbf{"a": 1}\n\xef\xbb\xbf{"b": 2}\n',  # two files with a mark each, one after the other
        b'{"a": 1}\r\n{"b": 2}\r\n',
    ],
)
def test_lines_are_read_whatever_the_editor(tmp_path: Path, content: bytes) -> None:
    assert lines_of(tmp_path, content) == [("line 1", {"a": 1}), ("line 2", {"b": 2})]


def test_blank_lines_count_and_separators_of_unicode_end_no_line(tmp_path: Path) -> None:
    content = '\n{"a": "x\u2028y"}\n \n{"b": 2}'.encode()
    assert lines_of(tmp_path, content) == [("line 2", {"a": "x\u2028y"}), ("line 4", {"b": 2})]
    assert lines_of(tmp_path, b"") == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1}\n{"a": ', "line 2: not JSON (Expecting value at character 7); write the line again, or remove it"),
        (b'{"a": 1}\n\0\0\0', "line 2: not JSON (a NUL character, as after a crash or in UTF-16 text, at character 1)"),
        (b'{"x":' + b"[" * 100_000, "line 1: not JSON (it is nested too deeply)"),
        (b"9" * 5000, "line 1: not JSON (a number has too many digits)"),
        (b'{"a": 1}\n{"a": "\xe9"}', "line 2: it is not UTF-8 text; save the file as UTF-8"),
        ('{"a": 1}'.encode("utf-16"), ": it is UTF-16 text; save it as UTF-8"),
        (gzip.compress(b'{"a": 1}', mtime=0), ": it is gzip data; unpack it first"),
        (b"PAR1\x15\xff\x80", ": it is a Parquet file; write its rows as JSON lines"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        lines_of(tmp_path, content)
    assert str(raised.value).startswith(str(tmp_path / "lines.jsonl")) and words in str(raised.value)


def test_a_path_that_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (
        ("pipe", "it is not a regular file"),
        (".", "Is a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("missing", "No such file or directory"),
        ("a\0b", "embedded null byte"),
    ):
        with pytest.raises(ValueError) as raised:
            list(text_lines(tmp_path / name))
        assert f"cannot be read ({reason}); name a text file" in str(raised.value)


def test_values_of_other_kinds_are_no_whole_numbers() -> None:
    for given, whole in ((4, 4), (4.0, 4), (-1.0, -1), (10**400, 10**400)):
        assert whole_number(given) == whole and type(whole_number(given)) is int
    for given in (0.5, float("nan"), float("inf"), True, "4", None, [4]):
        assert whole_number(given) is None
    assert parse_json("[1.0]") == [1.0]
