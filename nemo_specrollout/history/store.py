# SPDX-License-Identifier: Apache-2.0
"""Stores the history of a run in a folder of segments. If the folder becomes too large, the oldest segments are removed."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from nemo_specrollout.history.segments import (
    ROWS,
    TEXTS,
    OtherSegment,
    Place,
    SegmentReader,
    SegmentWriter,
    Text,
)

SEGMENTS = 16
"""A segment takes at most the allowed size of the folder divided by this number. Only whole segments are removed to make room,
so they must be small."""
RETRY_S = 60.0
"""Seconds after which writing is tried again if it has failed."""
_MIB = 1 << 20


class HistoryStore:
    """Reads and writes the history in a folder. Owns the segment to which it writes, and a reader for each segment.

    Several processes and several runs may use the same folder at once. Each process writes segments of its own, and reads
    the segments of all processes. Problems of the disk raise no errors. Instead `take_problems` returns sentences about them,
    and the store continues with the files that still work.
    """

    def __init__(
        self, folder: Path, most_bytes: int, fingerprint: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`most_bytes` bounds the size of the files in `folder`. `fingerprint` has 16 bytes that differ between tokenizers.

        `clock` returns the time in seconds.
        """
        self._folder = folder
        self._most_bytes = most_bytes
        self._fingerprint = fingerprint
        self._clock = clock
        self._readers: dict[str, SegmentReader] = {}
        self._foreign: set[str] = set()
        self._seen_bytes: dict[str, int] = {}
        """Size of each segment in bytes at the time when its rows were last read."""
        self._writer: SegmentWriter | None = None
        self._own: set[str] = set()
        """Names of the segments that this store has written."""
        self._writes_again_at = 0.0
        """After writing has failed, it is not tried again before this time of the clock."""
        self._has_folder = True
        self._said: set[str] = set()
        self._problems: list[str] = []
        self.num_read = 0
        """Number of texts that the folder had when it was opened."""
        self.bytes_read = 0
        """Size of the folder's files in bytes when it was opened."""

    def open(self) -> None:
        """Creates the folder if it does not exist, and reads the rows of all texts that are in it, but not their tokens."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._say("folder", f"cannot be made ({error.strerror}), so responses are not kept")
            self._has_folder = False
            return
        self.bytes_read = sum(self._sizes().values())
        if self.bytes_read > self._most_bytes:
            held, most = self.bytes_read / _MIB, self._most_bytes / _MIB
            self._say(
                "bound", f"held {held:.1f} MiB, more than history_mib {most:.0f}, so the oldest responses were removed"
            )
        self.refresh()
        self.num_read = sum(reader.num_rows for reader in self._readers.values())
        if self._foreign:
            self._say(
                "foreign",
                f"{len(self._foreign)} of its segments are of another tokenizer or format, or damaged, so their responses are "
                "not used",
            )

    def append(self, texts: Sequence[Text]) -> list[Place]:
        """Writes the texts that the folder does not have yet, and returns their places.

        Returns an empty list if there is no new text or if writing fails. The folder may already have a text, because a
        repeated training step or a greedy sample produces the same response again.
        """
        texts = [text for text in texts if not any(reader.has(text) for reader in self._readers.values())]
        if not texts or not self._has_folder or self._clock() < self._writes_again_at:
            return []
        try:
            writer = self._writer_for()
            first = writer.num_rows
            writer.append(texts)
        except OSError as error:
            self._say("write", f"cannot be written ({error.strerror}), so new responses are not kept")
            self._writes_again_at = self._clock() + RETRY_S
            self._drop_writer()
            return []
        return [Place(writer.name, first + i) for i in range(len(texts))]

    def refresh(self) -> list[tuple[str, int, np.ndarray]]:
        """Reads the rows that were added since the last call. Removes the oldest segments if the folder is too large.

        Returns a tuple for each segment to which another process has added texts. The tuple has the segment's name, the row
        index of the first added text, and the groups (hashes of the prompts) of the added texts, int64.
        """
        sizes = self._sizes()
        self._make_room(sizes)
        for name in [name for name in self._readers if name not in sizes]:
            self._forget(name)
        added = []
        for name in sorted(sizes):
            if (reader := self._reader(name)) is None:
                continue
            if self._seen_bytes.get(name) == sizes[name]:
                continue
            self._seen_bytes[name] = sizes[name]
            first = reader.num_rows
            try:
                is_longer = reader.refresh() > 0
            except OSError:  # removed by another process, or no longer readable
                self._forget(name)
                continue
            if is_longer and name not in self._own:
                added.append((name, first, reader.groups_R[first:]))
        return added

    def find(self, group: int) -> list[tuple[Place, int]]:
        """Returns the place and the number of tokens of each text of a group (the hash of a prompt), the newest text first."""
        found = []
        for name in sorted(self._readers, reverse=True):
            reader = self._readers[name]
            found += [(Place(name, row), reader.num_tokens(row)) for row in reader.find(group)[::-1].tolist()]
        return found

    def is_own(self, place: Place) -> bool:
        """Returns whether this store has written the text at `place`."""
        return place.segment in self._own

    def read(self, place: Place) -> Text | None:
        """Returns the text at `place`, or None if it was removed or is damaged."""
        reader = self._readers.get(place.segment)
        try:
            text = None if reader is None else reader.read(place.row)
        except OSError:
            return None
        if reader is not None and text is None:
            self._say("damaged", f"a response in {place.segment} is damaged and was left out")
        return text

    def take_problems(self) -> list[str]:
        """Returns a sentence for each new kind of problem since the last call. The same kind is reported only once."""
        problems = self._problems
        self._problems = []
        return problems

    def close(self) -> None:
        """Closes the segment to which this store writes."""
        self._drop_writer()

    def _say(self, kind: str, sentence: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._problems.append(f"history: {self._folder} {sentence}")

    def _writer_for(self) -> SegmentWriter:
        """Returns the writer for the next texts. Raises OSError.

        A new segment is begun if this store has none yet, or if its segment is full or was removed by another process.
        """
        writer = self._writer
        if writer is not None and (writer.num_bytes * SEGMENTS >= self._most_bytes or writer.is_removed()):
            self._drop_writer()
        if self._writer is None:
            self._writer = SegmentWriter(self._folder, self._fingerprint, time.time_ns())
            self._own.add(self._writer.name)
        return self._writer

    def _drop_writer(self) -> None:
        writer = self._writer
        self._writer = None
        if writer is not None:
            with suppress(OSError):
                writer.close()

    def _reader(self, name: str) -> SegmentReader | None:
        """Returns the reader of a segment, or None if it cannot be read or is for another tokenizer or in another format."""
        if name in self._readers or name in self._foreign:
            return self._readers.get(name)
        try:
            self._readers[name] = SegmentReader(self._folder, name, self._fingerprint)
        except OtherSegment:
            self._foreign.add(name)
        except OSError:
            return None
        return self._readers.get(name)

    def _forget(self, name: str) -> None:
        self._readers.pop(name, None)
        self._seen_bytes.pop(name, None)

    def _sizes(self) -> dict[str, int]:
        """Returns the size of each segment in bytes, by its name. The result is empty if the folder cannot be read."""
        sizes: dict[str, int] = {}
        if not self._has_folder:
            return sizes
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    name, ending = os.path.splitext(entry.name)
                    if ending in (TEXTS, ROWS):
                        with suppress(OSError):
                            sizes[name] = sizes.get(name, 0) + entry.stat(follow_symlinks=False).st_size
        except OSError as error:
            self._say("read", f"cannot be read ({error.strerror}), so earlier responses are not used")
        return sizes

    def _make_room(self, sizes: dict[str, int]) -> None:
        """Deletes the oldest segments until the others fit into `most_bytes`, and removes their entries from `sizes`.

        The segment to which this store writes is never deleted.
        """
        total = sum(sizes.values())
        for name in sorted(sizes):
            if total <= self._most_bytes:
                return
            if self._writer is not None and name == self._writer.name:
                continue
            self._remove(name, (ROWS, TEXTS))
            total -= sizes.pop(name)

    def _remove(self, name: str, endings: Iterable[str]) -> None:
        for ending in endings:
            with suppress(OSError):  # another process was first, or removal is not allowed
                (self._folder / f"{name}{ending}").unlink()
