# SPDX-License-Identifier: Apache-2.0
"""Writes the rows (samples) that an engine has finished into the folder of its run, while the engine goes on."""

import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from nemo_specrollout.audit.rows import EngineFacts, FinishedRow, write_rows

ROWS_OF_A_FILE = 512
"""Number of finished rows that are written into one file. A file has fewer rows if `flush` is called earlier."""
MOST_TOKENS = 1 << 26
"""Maximum number of tokens that may wait to be written, which take about 512 MB. Rows beyond this limit are not recorded."""


class RowRecorder:
    """Records the rows of one engine. A thread writes them, so that no request waits for the disk.

    A problem with the disk never ends the engine. `take_problem` returns a sentence about it.
    """

    def __init__(self, folder: Path, facts: EngineFacts) -> None:
        """Starts the thread that writes rows. The thread creates `folder` when it writes the first file."""
        self._folder = folder
        self._facts = facts
        self._open = list[FinishedRow]()
        self._queue = queue.Queue[list[FinishedRow]]()
        self._num_waiting = 0
        self._num_lost = 0
        self._num_files = 0
        self._problem = ""
        self._lock = threading.Lock()
        threading.Thread(target=self._write_all, name="specrollout-rows", daemon=True).start()

    def add(self, row: FinishedRow) -> None:
        """Adds a finished row. It is dropped if `MOST_TOKENS` tokens are waiting to be written."""
        num_tokens = len(row.token_ids)
        with self._lock:
            if self._num_waiting + num_tokens > MOST_TOKENS:
                self._num_lost += 1
                return
            self._num_waiting += num_tokens
            self._open.append(row)
        if len(self._open) >= ROWS_OF_A_FILE:
            self.flush()

    def flush(self) -> None:
        """Makes the thread write all rows that were added so far. Engines call this at the end of a batch or of a step."""
        with self._lock:
            rows = self._open
            self._open = []
        if rows:
            self._queue.put(rows)

    def settle(self) -> None:
        """Waits until all rows that were added so far are on disk."""
        self.flush()
        self._queue.join()

    def take_problem(self) -> str:
        """Returns a sentence about rows that could not be recorded since the last call, or an empty string."""
        with self._lock:
            lost = self._num_lost
            problem = self._problem
            self._num_lost = 0
            self._problem = ""
        if not lost and not problem:
            return ""
        reason = problem or f"{self._folder} is slower than the engine"
        return f"engine {self._facts.engine} has not recorded {lost:,} rows for an audit: {reason}"

    def _write_all(self) -> None:
        while True:
            rows = self._queue.get()
            try:
                self._write(rows)
            finally:
                with self._lock:
                    self._num_waiting -= sum(len(row.token_ids) for row in rows)
                self._queue.task_done()

    def _write(self, rows: Sequence[FinishedRow]) -> None:
        # Files of one engine sort by time, even if a resumed run continues in the same folder.
        name = f"{time.time_ns():020d}-engine{self._facts.engine}-{os.getpid()}-{self._num_files}.npz"
        self._num_files += 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_rows(self._folder / name, self._facts, rows)
        except Exception as error:  # the thread must survive, because `settle` waits for it
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            with self._lock:
                self._num_lost += len(rows)
                self._problem = f"{self._folder}: {reason}"
