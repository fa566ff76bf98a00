# SPDX-License-Identifier: Apache-2.0
"""The file in which an engine or a driver saves what it has learned, for a later start of the run.

The first line is a JSON object with the key, the time, the number of steps and the checksum of the second line. The second
line is the learned state. The key has the settings that a reader must have in common with the writer. The file's name follows
from the key. So processes with the same key replace each other's file, and processes with different keys have different files.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.storage.files import read_regular, replacing_file
from nemo_specrollout.storage.text_files import parse_json

logger = logging.getLogger(__name__)
FORMAT = 1
"""Version of the file's format and of the meaning of the learned states."""
MOST_BYTES = 64 << 20
"""Maximum size of a file in bytes. What an engine learns takes less than one MiB, so a larger file is a wrong one."""
MOST_FILES = 32
"""Maximum number of files of the same kind in a folder. If there are more, the oldest ones are removed."""
WRITING_SHARE = 0.01
"""Largest share of the run's time that writing the file may take."""
_STALE_S = 3600.0
"""Age in seconds from which a temporary file is removed, because its writer must have died."""


@dataclass(frozen=True)
class Found:
    """The learned state that a start of a run has found, or the reason why it has found none."""

    state: Any = None
    """The learned state, or None if none was found."""
    saved: str = ""
    """The time at which the state was saved, as text."""
    num_steps: int = 0
    """Number of steps from which the state was learned. They are training steps of a driver or engine steps of an engine."""
    reason: str = "what was kept is of others"
    """The reason why no state was found, as a phrase."""
    is_told: bool = True
    """Whether the user should be told about this result. It is False if the folder has no file of this kind at all."""


class KeptFile:
    """The file with the learned state of one engine or driver. A thread writes it.

    Only `read` and `settle` wait for the disk. No method raises an error of the disk, but `take_problem` returns a sentence
    about it.
    """

    def __init__(self, folder: Path, kind: str, key: Mapping[str, Any]) -> None:
        """Computes the file's path in `folder`. It does not open the file yet.

        Args:
            folder: the folder of all such files.
            kind: the kind of process. The file's name begins with it.
            key: JSON values that must be equal in the process that writes the file and the process that reads it.
        """
        self._key = json.loads(json.dumps({**key, "format": FORMAT}))
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self._kind = kind
        self.path = folder / f"{kind}-{digest[:16]}.json"
        self._writer: threading.Thread | None = None
        self._next_s = 0.0
        """The time, as `time.monotonic` tells it, before which the file is not written again."""
        self._problem: str | None = None
        self._was_told = False
        """Whether an error in writing was already reported. Only the first one is reported."""

    def read(self) -> Found:
        """Reads the file, and returns the learned state in it, or the reason why there is no state for this process."""
        try:
            content = read_regular(self.path, MOST_BYTES + 1)
        except FileNotFoundError:
            return Found(is_told=any(self.path.parent.glob(f"{self._kind}-*.json")))
        except OSError as error:
            return self._unusable(f"cannot be read ({error.strerror or error})")
        why = self._fault(content)
        if why is not None:
            return self._unusable(why)
        first, _, body = content.partition(b"\n")
        head = parse_json(first)
        return Found(parse_json(body), str(head["saved"]), int(head["num_steps"]), reason="")

    def _fault(self, content: bytes) -> str | None:
        """Returns a phrase that says why the content of a file cannot be used, or None if it can be used."""
        if len(content) > MOST_BYTES:
            return f"is larger than {MOST_BYTES >> 20} MiB"
        first, _, body = content.partition(b"\n")
        try:
            head = parse_json(first)
            if head["sha256"] != hashlib.sha256(body).hexdigest():
                return "is damaged"
            if head["key"] != self._key:
                return "is of another kind of engine, or of another version"
            if parse_json(body) is None:
                return "is damaged"
            int(head["num_steps"])
            str(head["saved"])
        except (ValueError, TypeError, LookupError, OverflowError):
            return "is damaged"
        return None

    def unfit(self, why: str) -> Found:
        """Logs that the state in the file does not fit this process, and returns a result without a state.

        `why` is the reason. `take_problem` returns it too.
        """
        return self._unusable(f"does not fit ({why})")

    @property
    def is_due(self) -> bool:
        """Whether the file may be written now.

        It may not be written if a write is under way. It also may not if too little time has passed since the last write, so
        that writing would take a larger share of the time than `WRITING_SHARE`.
        """
        is_writing = self._writer is not None and self._writer.is_alive()
        return not is_writing and time.monotonic() >= self._next_s

    def keep(self, state: Any, num_steps: int) -> None:
        """Starts a thread that writes `state` to the file, or does nothing if no write is due (`is_due`).

        `state` has JSON values, which the caller must not change afterwards. `num_steps` is the number of steps from which it
        was learned.
        """
        if not self.is_due:
            return
        self._writer = threading.Thread(target=self._write, args=(state, num_steps), daemon=True)
        self._writer.start()

    def settle(self) -> None:
        """Waits until the thread that writes the file has ended, if there is one."""
        if self._writer is not None:
            self._writer.join()

    def take_problem(self) -> str | None:
        """Returns a sentence about an error with the file since the last call, or None if there was no error."""
        problem = self._problem
        self._problem = None
        return problem

    def _unusable(self, why: str) -> Found:
        self._problem = f"{self.path} {why}, so it is not used, and is written anew"
        logger.warning("specrollout: %s", self._problem)
        return Found(reason=f"{self.path.name} {why}")

    def _write(self, state: Any, num_steps: int) -> None:
        started = time.monotonic()
        try:
            body = json.dumps(state, allow_nan=False).encode()
            head = {
                "key": self._key,
                "saved": time.strftime("%Y-%m-%d %H:%M:%S%z"),
                "num_steps": num_steps,
                "sha256": hashlib.sha256(body).hexdigest(),
            }
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                self._make_room()
            with replacing_file(self.path) as temporary:
                temporary.write_bytes(json.dumps(head).encode() + b"\n" + body)
        except (OSError, ValueError) as error:
            if not self._was_told:
                self._was_told = True
                reason = (error.strerror if isinstance(error, OSError) else None) or error
                self._problem = f"{self.path} cannot be written ({reason}), so a later start may learn all of it anew"
                logger.warning("specrollout: %s", self._problem)
        ended = time.monotonic()
        self._next_s = ended + (ended - started) / WRITING_SHARE

    def _make_room(self) -> None:
        """Removes files of this kind until there is room for one more (`MOST_FILES`), the oldest first.

        It also removes temporary files of writers that have died.
        """
        now_s = time.time()
        for stale in self.path.parent.glob(f".{self._kind}-*.json.*"):
            with suppress(OSError):
                if now_s - stale.stat().st_mtime > _STALE_S:
                    stale.unlink()
        ages: dict[Path, float] = {}
        for other in self.path.parent.glob(f"{self._kind}-*.json"):
            with suppress(OSError):
                ages[other] = os.stat(other).st_mtime
        for old in sorted(ages, key=lambda path: ages[path])[: max(len(ages) - MOST_FILES + 1, 0)]:
            with suppress(OSError):
                old.unlink()
