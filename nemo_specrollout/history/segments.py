# SPDX-License-Identifier: Apache-2.0
"""The files of a history. Each engine writes files of its own, and reads those of all others, even while they grow.

A segment consists of two files with the same name. `NAME.texts` has the tokens of texts, one text after another, and
`NAME.rows` has a row of fixed size for each text. So a reader finds the texts of a prompt without reading any others. Both
files begin with the same header, and only ever grow. A text is written before its row, and its row has a checksum. So if a
crash, a full disk or another program damages a text, this is detected when the text is read, and the text is left out.

Numbers are little-endian. Shapes: R texts of a segment.
"""

import errno
import os
import struct
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

FORMAT = 1
"""Version of the file format."""
TEXTS, ROWS = ".texts", ".rows"
"""Endings of the two files of a segment."""
MOST_TOKENS = 1 << 24
"""Most tokens of a text. A row that claims more is damaged."""
_MAGIC = b"SPECHIST"
_HEADER = struct.Struct("<8sI4x16s32x")
_ROW = np.dtype(
    [
        ("group", "<i8"),
        ("offset", "<u8"),
        ("num_tokens", "<u4"),
        ("num_context", "<u4"),
        ("checksum", "<u4"),
        ("unused", "<u4"),
    ]
)


class Text(NamedTuple):
    """A response, with the end of its prompt before it."""

    group: int
    """Hash of the prompt, which all samples of a prompt share."""
    num_context: int
    """Number of leading tokens that belong to the prompt. They serve as contexts of the response, but never as drafts."""
    tokens: np.ndarray
    """Token ids, int32."""


class OtherSegment(Exception):
    """Raised for a segment of another tokenizer or format, or for a file that is no segment."""


@dataclass(frozen=True)
class Place:
    """The location of a text."""

    segment: str
    """Name of the segment."""
    row: int
    """Number of the text's row in the segment, from 0 on."""


class SegmentWriter:
    """Writes a segment. Owns its two files, which no other process writes."""

    def __init__(self, folder: Path, fingerprint: bytes, created_ns: int) -> None:
        """Creates the files of an empty segment. Raises OSError.

        `fingerprint` has 16 bytes, which differ between tokenizers. `created_ns` is the time in nanoseconds.
        """
        self.name = f"{created_ns:020d}-{uuid.uuid4().hex[:12]}"
        """Name of the segment. Names sort by age, the oldest first."""
        header = _HEADER.pack(_MAGIC, FORMAT, fingerprint)
        self.num_bytes = 2 * len(header)
        self.num_rows = 0
        self._end = len(header)
        """Size in bytes of the file of texts."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._texts = os.open(folder / f"{self.name}{TEXTS}", flags, 0o644)
        try:
            self._rows = os.open(folder / f"{self.name}{ROWS}", flags, 0o644)
        except OSError:
            os.close(self._texts)
            raise
        _write(self._texts, header)
        _write(self._rows, header)

    def append(self, texts: Sequence[Text]) -> None:
        """Adds texts. After an OSError the segment must not be used again, but what it has stays readable."""
        content = [np.ascontiguousarray(text.tokens, "<i4").tobytes() for text in texts]
        rows_R = np.zeros(len(texts), _ROW)
        sizes_R = np.array(list(map(len, content)), np.uint64)
        rows_R["group"] = [text.group for text in texts]
        rows_R["offset"] = self._end + np.cumsum(sizes_R) - sizes_R
        rows_R["num_tokens"] = sizes_R // 4
        rows_R["num_context"] = [text.num_context for text in texts]
        rows_R["checksum"] = [_checksum(text.group, part) for text, part in zip(texts, content, strict=True)]
        everything = b"".join(content)
        _write(self._texts, everything)
        _write(self._rows, rows_R.tobytes())
        self._end += len(everything)
        self.num_rows += len(texts)
        self.num_bytes += len(everything) + rows_R.nbytes

    def is_removed(self) -> bool:
        """Returns whether another process has removed the segment to make room."""
        return os.fstat(self._rows).st_nlink == 0

    def close(self) -> None:
        """Closes the files."""
        os.close(self._texts)
        os.close(self._rows)


class SegmentReader:
    """Reads a segment, which may grow at the same time. Owns the rows that it has read, 32 bytes each.

    A text is only read from its file when it is requested, so a large history takes little memory.
    """

    def __init__(self, folder: Path, name: str, fingerprint: bytes) -> None:
        """Checks the segment's header, but reads no row yet.

        Raises OtherSegment if nothing of the segment can be used, and OSError if it cannot be read or is just being created.
        """
        self.name = name
        self._path = folder / name
        self._rows_R = np.zeros(0, _ROW)
        self._by_group_R: np.ndarray | None = None
        """Numbers of the rows in the order of their groups, and within a group the oldest first."""
        with self._path.with_name(f"{name}{ROWS}").open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise OSError(errno.EAGAIN, "its header is not written yet", str(folder / name))
        if _HEADER.unpack(header) != (_MAGIC, FORMAT, fingerprint):
            raise OtherSegment(f"{name} is of another tokenizer or format")

    @property
    def num_rows(self) -> int:
        return len(self._rows_R)

    @property
    def groups_R(self) -> np.ndarray:
        """Group of each text, int64, the oldest first."""
        groups_R: np.ndarray = self._rows_R["group"]
        return groups_R

    def refresh(self) -> int:
        """Reads the rows that were added since the last call, and returns their number. Raises OSError.

        A row that is not complete yet is left for the next call.
        """
        begin = _HEADER.size + self.num_rows * _ROW.itemsize
        with self._path.with_name(f"{self.name}{ROWS}").open("rb") as file:
            file.seek(begin)
            content = file.read()
        new_R = np.frombuffer(content, _ROW, len(content) // _ROW.itemsize)
        if len(new_R):
            self._rows_R = np.concatenate([self._rows_R, new_R])
            self._by_group_R = None
        return len(new_R)

    def find(self, group: int) -> np.ndarray:
        """Returns the numbers of the rows of a group's texts, int64, the oldest first."""
        if self._by_group_R is None:
            self._by_group_R = np.argsort(self.groups_R, kind="stable")
        groups_R = self.groups_R[self._by_group_R]
        first, end = np.searchsorted(groups_R, group, "left"), np.searchsorted(groups_R, group, "right")
        return self._by_group_R[first:end]

    def has(self, text: Text) -> bool:
        """Returns whether the segment has a text of the same prompt with the same length and checksum."""
        rows_R = self._rows_R[self.find(text.group)]
        of_length_R = rows_R[rows_R["num_tokens"] == len(text.tokens)]
        return len(of_length_R) > 0 and bool((of_length_R["checksum"] == checksum_of(text)).any())

    def num_tokens(self, row: int) -> int:
        """Returns the number of tokens that a row claims, at most `MOST_TOKENS`."""
        return min(int(self._rows_R[row]["num_tokens"]), MOST_TOKENS)

    def read(self, row: int) -> Text | None:
        """Returns the text of a row, or None if it is damaged. Raises OSError."""
        facts = self._rows_R[row]
        num_tokens, num_context = int(facts["num_tokens"]), int(facts["num_context"])
        if num_tokens > MOST_TOKENS or num_context > num_tokens:
            return None
        with self._path.with_name(f"{self.name}{TEXTS}").open("rb") as file:
            if int(facts["offset"]) > os.fstat(file.fileno()).st_size:
                return None
            file.seek(int(facts["offset"]))
            content = file.read(4 * num_tokens)
        group = int(facts["group"])
        if len(content) < 4 * num_tokens or _checksum(group, content) != int(facts["checksum"]):
            return None
        return Text(group, num_context, np.frombuffer(content, "<i4"))


def checksum_of(text: Text) -> int:
    """Returns the checksum that the row of a text has."""
    return _checksum(text.group, np.ascontiguousarray(text.tokens, "<i4").tobytes())


def _checksum(group: int, content: bytes) -> int:
    """Returns the checksum of a text and its group."""
    return zlib.crc32(content, group & 0xFFFFFFFF)


def _write(descriptor: int, content: bytes) -> None:
    """Writes all of `content`. Raises OSError, also if the disk has room for only a part of it."""
    rest = memoryview(content)
    while rest:
        written = os.write(descriptor, rest)
        if written <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[written:]
