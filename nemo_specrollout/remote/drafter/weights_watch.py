# SPDX-License-Identifier: Apache-2.0
"""Watches a folder for new weights of a draft model, in a thread of its own, while the drafter drafts."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.remote.protocol.messages import as_line
from nemo_specrollout.storage.weights_folder import Publication, publications, stamp_of

PERIOD_S = 2.0
"""Seconds between two checks of the folder."""


@dataclass(frozen=True)
class NewWeights:
    """A publication that was read completely, and its tensors by name."""

    publication: Publication
    tensors: list[tuple[str, Any]]


class WeightsWatch:
    """Watches a folder for publications. Owns the thread, weights that were read but not taken, and unusable publications.

    A publication is a folder with a checkpoint, inside the watched folder. The thread reads and checks its files, and the
    drafter's loop takes the weights between two engine steps. A publication that cannot be used is not tried again unless its
    files change. Until then, the newest publication that can be used is in use. If the newest publication is removed, the
    drafter goes back to the one before it.
    """

    def __init__(self, folder: Path, read: Callable[[Path], list[tuple[str, Any]]]) -> None:
        """Prepares to watch `folder`. `start` starts the thread.

        `read` returns the tensors of a checkpoint, and raises ValueError or OSError if the drafter cannot use it.
        """
        self._folder = folder
        self._read = read
        self._lock = threading.Lock()
        self._ready: NewWeights | None = None
        self._latest: Publication | None = None
        """The publication that is in use, or is about to be."""
        self._unusable: dict[str, Publication] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.problem = ""
        """Why the newest publication is not in use, or empty if it is."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after it has read its current file."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def take(self) -> NewWeights | None:
        """Returns the weights that were read since the last call, or None. The call is cheap if there are none."""
        if self._ready is None:
            return None
        with self._lock:
            ready = self._ready
            self._ready = None
        return ready

    def refuse(self, weights: NewWeights, reason: str) -> None:
        """Notes that the drafter could not load weights that `take` has returned, and why. They are not read again."""
        self._note(weights.publication, reason)

    def look(self) -> None:
        """Reads the newest publication that can be used, unless it is already in use."""
        found = publications(self._folder)
        names = {publication.path.name for publication in found}
        self._unusable = {name: p for name, p in self._unusable.items() if name in names}
        if not found:
            self.problem = ""
        for publication in found:
            if self._unusable.get(publication.path.name) == publication:
                continue
            if publication == self._latest or self._reads(publication):
                if publication is found[0]:
                    self.problem = ""
                return

    def _reads(self, publication: Publication) -> bool:
        """Reads the weights of a publication for the next `take`. Returns False if they cannot be used."""
        try:
            tensors = self._read(publication.path)
            if stamp_of(publication.path) != publication.stamp:
                raise ValueError(f"{publication.path} changed while it was read; publish by renaming a whole folder")
        except (ValueError, OSError, RuntimeError) as error:
            self._note(publication, as_line(error) or type(error).__name__)
            return False
        with self._lock:
            self._latest = publication
            self._ready = NewWeights(publication, tensors)
        return True

    def _note(self, publication: Publication, reason: str) -> None:
        self._unusable[publication.path.name] = publication
        self.problem = reason

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.look()
