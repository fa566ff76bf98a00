# SPDX-License-Identifier: Apache-2.0
"""Reads and writes segments, which are the files of a history. Each engine writes its own segments and reads all segments.

A segment consists of two files with the same name. `NAME.texts` has the tokens of the texts, one text after another.
`NAME.rows` has a row of fixed size for each text, so that a reader finds the texts of a prompt without reading other texts.
Both files begin with the same header, and they are only appended to. They can be read while they grow.

A text is written before its row, and the row has a checksum of the text. If a crash, a full disk or another program damages a
text, the reader therefore notices it and leaves the text out.

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
"""File name endings of the two files of a segment, for the tokens and for the rows."""
MOST_TOKENS = 1 << 24
"""Largest number of tokens of a text. A row with a larger number is damaged."""
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
    """A response, with the last tokens of its prompt before it."""

    group: int
    """Hash of the prompt, which is the same for all samples of the prompt."""
    num_context: int
    """Number of tokens at the beginning that belong to the prompt. They are the contexts of the response's first tokens, but
    are never proposed as drafts."""
    tokens: np.ndarray
    """Token ids, int32."""


class OtherSegment(Exception):
    """Raised for a segment that is for another tokenizer or in another format, and for a file that is no segment."""


@dataclass(frozen=True)
class Place:
    """Location of a stored text, which is a segment and a row of that segment."""

    segment: str
    """Name of the segment."""
    row: int
    """Index of the text's row in the segment, from 0 on."""


class SegmentWriter:
    """Creates a segment and appends texts to it. Owns the segment's two files, to which no other process writes."""

    def __init__(self, folder: Path, fingerprint: bytes, created_ns: int) -> None:
        """Creates the files of an empty segment in `folder`. Raises OSError.

        `fingerprint` has 16 bytes that differ between tokenizers. `created_ns` is the present time in nanoseconds since 1970.
        """
        self.name = f"{created_ns:020d}-{uuid.uuid4().hex[:12]}"
        """Name of the segment. It begins with the time of creation, so sorted names have the oldest segment first."""
        header = _HEADER.pack(_MAGIC, FORMAT, fingerprint)
        self.num_bytes = 2 * len(header)
        self.num_rows = 0
        self._end = len(header)
        """Present size in bytes of the file `NAME.texts`."""
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
        """Appends texts to the segment. Raises OSError.

        After an error nothing more may be appended to the segment. Texts that were appended before the error stay readable.
        """
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
        """Returns whether another process has deleted the segment's files to make room in the folder."""
        return os.fstat(self._rows).st_nlink == 0

    def close(self) -> None:
        """Closes the segment's two files."""
        os.close(self._texts)
        os.close(self._rows)


class SegmentReader:
    """Reads a segment, even while its writer appends to it. Owns the rows that it has read, which have 32 bytes each.

    The tokens of a text are read from the file only when `read` asks for them, so a large history takes little memory.
    """

    def __init__(self, folder: Path, name: str, fingerprint: bytes) -> None:
        """Opens the segment `name` in `folder` and checks its header, but reads no row yet.

        Raises OtherSegment if the segment was written for another tokenizer than that of `fingerprint`, or in another format.
        Raises OSError if the segment cannot be read, or if its header is not written yet.
        """
        self.name = name
        self._path = folder / name
        self._rows_R = np.zeros(0, _ROW)
        self._by_group_R: np.ndarray | None = None
        """Indices of the rows, sorted by group. Rows of the same group are in the order of their age, the oldest first. None
        until they are needed."""
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
        """The group of each text (the hash of its prompt), int64 [R], the oldest text first."""
        groups_R: np.ndarray = self._rows_R["group"]
        return groups_R

    def refresh(self) -> int:
        """Reads the rows that were appended since the last call, and returns their number. Raises OSError.

        If only a part of the last row is in the file yet, that row is left for the next call.
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
        """Returns the row indices of all texts of a group (the hash of a prompt), int64, the oldest text first."""
        if self._by_group_R is None:
            self._by_group_R = np.argsort(self.groups_R, kind="stable")
        groups_R = self.groups_R[self._by_group_R]
        first, end = np.searchsorted(groups_R, group, "left"), np.searchsorted(groups_R, group, "right")
        return self._by_group_R[first:end]

    def has(self, text: Text) -> bool:
        """Returns whether the segment has a text with the same group, length and checksum as `text`."""
        rows_R = self._rows_R[self.find(text.group)]
        of_length_R = rows_R[rows_R["num_tokens"] == len(text.tokens)]
        return len(of_length_R) > 0 and bool((of_length_R["checksum"] == checksum_of(text)).any())

    def num_tokens(self, row: int) -> int:
        """Returns the number of tokens of the text that belongs to a row.

        The number is read from the row. It is at most `MOST_TOKENS` even if the row is damaged.
        """
        return min(int(self._rows_R[row]["num_tokens"]), MOST_TOKENS)

    def read(self, row: int) -> Text | None:
        """Returns the text that belongs to a row, or None if the text or the row is damaged. Raises OSError."""
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
    """Returns the checksum that a segment stores for a text."""
    return _checksum(text.group, np.ascontiguousarray(text.tokens, "<i4").tobytes())


def _checksum(group: int, content: bytes) -> int:
    """Returns the checksum of a text, from the bytes of its tokens (`content`) and its group (the hash of its prompt)."""
    return zlib.crc32(content, group & 0xFFFFFFFF)


def _write(descriptor: int, content: bytes) -> None:
    """Writes all bytes of `content` to a file. Raises OSError, also if the disk has room for only a part of them."""
    rest = memoryview(content)
    while rest:
        written = os.write(descriptor, rest)
        if written <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[written:]
