# SPDX-License-Identifier: Apache-2.0
"""The file in which a process keeps what it has learned, for a later start of the same kind.

The first line is a JSON object with the key, the time, the number of steps and the checksum of the second line. The second
line is the state. The key is what a reader must have in common with the writer, and the file's name follows from it. So
processes with the same key overwrite each other's file, each time completely, and others use different files.
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
"""Version of the file's format, and of what the states mean."""
MOST_BYTES = 64 << 20
"""Most bytes of a file. What an engine learns takes less than one MiB, so a larger file is not ours."""
MOST_FILES = 32
"""Most files of a kind in a folder. Beyond these the oldest ones are removed."""
WRITING_SHARE = 0.01
"""Largest share of the time that writing files may take."""
_STALE_S = 3600.0
"""Seconds after which the temporary file of a writer that died is removed."""


@dataclass(frozen=True)
class Found:
    """What a start has found from an earlier one."""

    state: Any = None
    """The learned state, or None if there is nothing to begin with."""
    saved: str = ""
    """When the state was saved."""
    num_steps: int = 0
    """Number of steps from which the state was learned. They are training steps of a driver or engine steps of an engine."""
    reason: str = "what was kept is of others"
    """Why there is nothing to begin with."""
    is_told: bool = True
    """Whether the user should be told. In a folder without any such file there is nothing to tell."""


class KeptFile:
    """The file of one process's learned state. Owns the thread that writes it, and at most one problem not reported yet.

    Only `read` and `settle` wait for the disk. No method raises an error of the disk.
    """

    def __init__(self, folder: Path, kind: str, key: Mapping[str, Any]) -> None:
        """`kind` is the prefix of the file's name. `key` has JSON values, and is written into the file as it is."""
        self._key = json.loads(json.dumps({**key, "format": FORMAT}))
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self._kind = kind
        self.path = folder / f"{kind}-{digest[:16]}.json"
        self._writer: threading.Thread | None = None
        self._next_s = 0.0
        """Time before which nothing is written again."""
        self._problem: str | None = None
        self._was_told = False
        """Whether a problem of writing was already noted. Only the first one is."""

    def read(self) -> Found:
        """Returns the state in the file, or the reason why there is none for this process."""
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
        """Returns why a file's content cannot be used, or None if it can."""
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
        """Returns a result without a state for a state that does not fit, and notes the problem. `why` is the reason."""
        return self._unusable(f"does not fit ({why})")

    @property
    def is_due(self) -> bool:
        """Whether it is time to write again. The last write must be done, and have taken a small share of the time since."""
        is_writing = self._writer is not None and self._writer.is_alive()
        return not is_writing and time.monotonic() >= self._next_s

    def keep(self, state: Any, num_steps: int) -> None:
        """Writes a state in a thread if a write is due. The state must not be changed afterwards."""
        if not self.is_due:
            return
        self._writer = threading.Thread(target=self._write, args=(state, num_steps), daemon=True)
        self._writer.start()

    def settle(self) -> None:
        """Waits until the write that is under way has ended."""
        if self._writer is not None:
            self._writer.join()

    def take_problem(self) -> str | None:
        """Returns a sentence about what went wrong since the last call, or None if nothing did."""
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
        """Removes temporary files of writers that died, and the oldest files beyond the number that is kept."""
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
